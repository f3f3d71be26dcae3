"""What the user may set, validated at once.

Owns the keywords of `hetero.manage` and their defaults, but for ``policy`` (`hetero.eviction.resolve_policy`). Keywords
win over everything; there is no hidden state.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero.errors import ConfigError
from hetero.units import format_bytes, parse_budget

__all__ = ["Config", "Size", "resolve"]

Size = int | float | str
"""Bytes, a share as a float <= 1.0, or text such as ``"20GiB"`` and ``"80%"`` (`hetero.units.parse_budget`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Resolved settings; what each means is said in `hetero.manage`.

    Attributes:
        device_budget: bytes of the device that may be in use.
        host_budget: bytes of model data in host memory.
        shares_host: ``host_budget`` was not passed: it is what was free, and other managed models take of it, too.
        warmup_budget: a share of ``device_budget``, in (0, 1].
        warmup_steps: iterations, at least 1.
        prefetch, activations, device_homes: as given.
        pin_memory: where the system allows it.
        precision: that operators compute in; None: the parameters' own type.
        speculate: None where host memory decides.
    """

    device_budget: int
    host_budget: int
    shares_host: bool
    warmup_budget: float
    warmup_steps: int
    prefetch: bool
    pin_memory: bool
    precision: torch.dtype | None
    activations: bool
    device_homes: bool
    speculate: bool | None

    @property
    def warmup_bytes(self) -> int:
        """Model data allowed on the device before anything has been measured (Gemini's warm-up share)."""
        return int(self.warmup_budget * self.device_budget)


def resolve(
    *,
    device_budget: Size | None,
    host_budget: Size | None,
    warmup_budget: float,
    warmup_steps: int,
    prefetch: bool,
    pin_memory: bool | None,
    precision: torch.dtype | None,
    activations: bool,
    device_homes: bool,
    speculate: bool | None,
    device_total: int,
    device_free: Callable[[], int],
    host_total: int,
    host_free: Callable[[], int],
) -> Config:
    """Check every keyword and fill in the defaults. Raises `ConfigError` naming the value and the cure."""
    if isinstance(warmup_budget, bool) or not isinstance(warmup_budget, int | float):
        raise ConfigError(
            f"warmup_budget={warmup_budget!r}: expected a fraction of device_budget, such as 0.3"
        )
    if not 0.0 < warmup_budget <= 1.0:
        raise ConfigError(f"warmup_budget={warmup_budget!r}: a fraction of device_budget lies in (0, 1]")
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
        raise ConfigError(
            f"warmup_steps={warmup_steps!r}: at least 1 iteration has to be measured; pass an int >= 1"
        )
    for name, flag in (
        ("prefetch", prefetch),
        ("pin_memory", pin_memory),
        ("activations", activations),
        ("device_homes", device_homes),
        ("speculate", speculate),
    ):
        may_be_open = name in ("pin_memory", "speculate")
        if not isinstance(flag, bool) and not (may_be_open and flag is None):
            choices = "True, False or None" if may_be_open else "True or False"
            raise ConfigError(f"{name}={flag!r}: expected {choices}")
    if not any(precision is known for known in (None, torch.bfloat16, torch.float16)):
        raise ConfigError(
            f"precision={precision!r}: pass torch.bfloat16 or torch.float16, or None to compute in the parameters' own "
            "type"
        )
    device_bytes = (
        device_free()
        if device_budget is None
        else parse_budget(device_budget, device_total, name="device_budget")
    )
    if device_bytes > device_total:
        raise ConfigError(
            f"device_budget={device_budget!r} is {format_bytes(device_bytes)}, but the device has only "
            f"{format_bytes(device_total)}: pass at most that, or '100%'"
        )
    host_bytes = (
        host_free() if host_budget is None else parse_budget(host_budget, host_total, name="host_budget")
    )
    return Config(
        device_budget=device_bytes,
        host_budget=host_bytes,
        shares_host=host_budget is None,
        warmup_budget=float(warmup_budget),
        warmup_steps=warmup_steps,
        prefetch=prefetch,
        pin_memory=True if pin_memory is None else pin_memory,
        precision=precision,
        activations=activations,
        device_homes=device_homes,
        speculate=speculate,
    )
