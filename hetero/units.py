"""Sizes, rates and times as people write them, and sizes as allocators round them.

Owns the only parser and the only formatter of byte sizes. Bytes are ``int``, rates bytes per second, times
seconds; text is read once, at the edge, by these functions.
"""

import math
import re

from hetero.errors import ConfigError

__all__ = [
    "format_bytes",
    "format_rate",
    "format_seconds",
    "parse_budget",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
    "round_up",
    "unit_for",
]

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ%/]*)\s*")


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """Bytes from an ``int`` or text such as ``"20GiB"``, ``"500MB"``, ``"64KiB"``.

    Raises `ConfigError` for anything ambiguous: ``"20G"`` might mean 20 GB or 20 GiB.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r}: expected bytes as an int or text such as '20GiB'")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name}={value!r}: a size cannot be negative")
        return value
    number, unit = _split(value, name)
    if unit in ("K", "M", "G", "T"):
        raise ConfigError(
            f"{name}={value!r} is ambiguous: write '{number:g}{unit}iB' (powers of 1024) or "
            f"'{number:g}{unit}B' (powers of 1000)"
        )
    if unit not in _BYTE_UNITS:
        raise ConfigError(f"{name}={value!r}: unknown unit {unit!r}; use one of {', '.join(_BYTE_UNITS)}")
    return round(number * _BYTE_UNITS[unit])


def parse_budget(value: int | float | str, total: int, *, name: str = "budget") -> int:
    """A budget in bytes: what `parse_bytes` reads, or a share of ``total`` as ``"80%"`` or a float <= 1.0.

    An ``int`` is always bytes, a ``float`` always a share. Raises `ConfigError` if it is not positive.
    """
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise ConfigError(
                f"{name}={value!r}: a share must lie in (0, 1]; for bytes pass an int or '20GiB'"
            )
        nbytes = int(value * total)
    elif isinstance(value, str) and value.strip().endswith("%"):
        number, _ = _split(value, name)
        if not 0.0 < number <= 100.0:
            raise ConfigError(f"{name}={value!r}: a percentage must lie in (0, 100]")
        nbytes = int(number / 100.0 * total)
    else:
        nbytes = parse_bytes(value, name=name)
    if nbytes <= 0:
        raise ConfigError(f"{name}={value!r} is {nbytes} bytes: a budget must be positive")
    return nbytes


def parse_rate(value: int | float | str, *, name: str = "bandwidth") -> float:
    """Bytes per second from a number or text such as ``"4GiB/s"``."""
    if isinstance(value, str):
        text = value.strip()
        if not text.endswith("/s"):
            raise ConfigError(f"{name}={value!r}: expected bytes per second, such as '4GiB/s'")
        rate = float(parse_bytes(text.removesuffix("/s"), name=name))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        rate = float(value)
    else:
        raise ConfigError(f"{name}={value!r}: expected bytes per second, such as '4GiB/s'")
    if not rate > 0.0 or math.isnan(rate):
        raise ConfigError(f"{name}={value!r}: a rate must be positive")
    return rate


def parse_seconds(value: int | float | str) -> float:
    """Seconds from a number or text such as ``"10us"``."""
    if isinstance(value, str):
        number, unit = _split(value, "latency")
        if unit not in _TIME_UNITS:
            raise ConfigError(
                f"latency={value!r}: unknown unit {unit!r}; use one of {', '.join(_TIME_UNITS)}"
            )
        seconds = number * _TIME_UNITS[unit]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ConfigError(f"latency={value!r}: expected seconds, such as '10us'")
    if seconds < 0.0 or not math.isfinite(seconds):
        raise ConfigError(f"latency={value!r}: a time must be finite and not negative")
    return seconds


def format_bytes(nbytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def unit_for(nbytes: int) -> tuple[int, str]:
    """The unit, and its size, in which sizes up to this one read well on an axis."""
    for exponent, unit in enumerate(("bytes", "KiB", "MiB")):
        if nbytes < 10 << 10 * (exponent + 1):
            return 1 << 10 * exponent, unit
    return 1 << 30, "GiB"


def format_rate(bytes_per_second: float) -> str:
    """``4 * 2**30`` -> ``"4.0 GiB/s"``."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """``0.0042`` -> ``"4.20 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-9:.0f} ns" if seconds else "0 s"


def round_up(nbytes: int, granularity: int) -> int:
    """The next multiple of ``granularity``."""
    return -(-nbytes // granularity) * granularity


def _split(text: str, name: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or not match.group(2):
        raise ConfigError(f"{name}={text!r}: expected a number and a unit, such as '20GiB'")
    number = float(match.group(1))
    if not math.isfinite(number):
        raise ConfigError(f"{name}={text!r}: that is more than can be counted")
    return number, match.group(2)
