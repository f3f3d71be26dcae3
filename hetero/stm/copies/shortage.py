"""What the user is told of a budget that is too small.

Owns the words and the number. Invariant: where "at least" is said, a budget of that many bytes holds every operator of
the iterations that were measured; where none was, what the operator allocates itself is said to come on top.
"""

import re

import torch

from hetero.devices import Accelerator
from hetero.errors import BudgetError
from hetero.units import format_bytes, parse_bytes

__all__ = ["NoRoomError", "least_bytes", "no_gap", "no_room", "too_small"]


class NoRoomError(BudgetError, torch.OutOfMemoryError):
    """An operator does not fit beside what cannot leave. For ``except torch.OutOfMemoryError`` as well."""

    __module__ = "hetero"  # where it is public


def too_small(
    accelerator: Accelerator,
    budget: int,
    operator: str,
    *,
    wanted: int,
    short: int,
    held: int,
    saved: int,
    others: int,
    enough: int | None,
) -> NoRoomError:
    """``operator`` lacks ``short`` of the ``wanted`` bytes that its operands take beside what is there; of that,
    ``held``: copies that cannot leave, ``saved``: saved tensors that could, had the host room for them, ``others``:
    what is no model data. ``enough``: for all that was measured; None if nothing was."""
    operands = budget + short
    if enough is None:
        cure = (
            f"more than {format_bytes(operands)}, because what it allocates itself has not been measured and comes on "
            f"top ({operands} bytes){_WHOLE}"
        )
    else:
        enough = max(enough, operands)
        cure = f"at least {format_bytes(enough)}, of which {format_bytes(operands)} for operands ({enough} bytes)"
    return NoRoomError(
        f"{operator} needs {format_bytes(wanted)} more on {accelerator.device}, where "
        f"{format_bytes(accelerator.used_bytes())} of the budget of {format_bytes(budget)} are in use "
        f"({format_bytes(held)} by copies that cannot be evicted now{_saved(saved)}{_others(others)}): lower the batch "
        f"size, {_kept(others, budget)}{_HOST if saved else ''}or raise device_budget to {cure}"
    )


def no_room(
    accelerator: Accelerator,
    budget: int,
    operator: str,
    error: RuntimeError,
    *,
    held: int,
    saved: int,
    others: int,
    enough: int | None,
) -> NoRoomError:
    """``operator`` has failed with ``error``, and nothing is left that could leave. The others: as above."""
    asked = _asked_for(error)
    wanted = None if asked is None else _bytes_in(asked)
    used = _used_bytes(accelerator, error)
    cure = "raise device_budget"
    if asked is not None and wanted is not None:
        # Without gaps it is not within the budget, whatever its digits say.
        rounded = 0 if accelerator.leaves_gaps else _rounded_by(asked) + 2 * _used_rounded_by(error)
        least = max(used + wanted + rounded, enough or 0)
        alone = "" if enough else f" for this operator alone{_WHOLE}"
        cure += f" to more than {format_bytes(least)} ({least} bytes){alone}"
        if least <= budget:
            cure = f"leave more of the device to this process: {_NOT_IN_ONE_PIECE}"
    needs = "more" if wanted is None else f"{format_bytes(wanted)} more"
    return NoRoomError(
        f"{operator} needs {needs} on {accelerator.device}, where {format_bytes(used)} of the budget of "
        f"{format_bytes(budget)} are in use ({format_bytes(held)} by copies of parameters{_saved(saved)}"
        f"{_others(others)}) and nothing else can leave: lower the batch size, {_kept(others, budget)}"
        f"{_HOST if saved else ''}or {cure}. The allocator: {error}"
    )


def no_gap(accelerator: Accelerator, budget: int, error: RuntimeError) -> NoRoomError:
    """Where all was planned, an operator has failed with ``error`` within the budget."""
    used = format_bytes(_used_bytes(accelerator, error))
    return NoRoomError(
        f"an operator found no memory on {accelerator.device}, where {used} of "
        f"the budget of {format_bytes(budget)} are in use: leave more of the device to this process, or go on: "
        f"{_NOT_IN_ONE_PIECE}. From now on operators are tried again with less on the device. The allocator: {error}"
    )


def _saved(nbytes: int) -> str:
    if not nbytes:
        return ""
    return f", {format_bytes(nbytes)} by saved tensors for which host_budget has no room"


def _others(nbytes: int) -> str:
    return f", {format_bytes(nbytes)} by tensors that are not managed" if nbytes else ""


def _kept(nbytes: int, budget: int) -> str:
    """Where most of the budget is taken by such, it may be the caller's own doing."""
    if nbytes <= budget // 2:
        return ""
    return (
        "let go of what you keep on the device (a checkpoint loaded with map_location=device, an average), "
    )


_HOST = "raise host_budget, "
_NOT_IN_ONE_PIECE = (
    "that would be within the budget, and is not there in one piece (with "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it is in pieces less often)"
)
# Where nothing has been measured, this operator is all that is known of.
_WHOLE = "; `hetero plan` tells what the other operators need"


def least_bytes(accelerator: Accelerator, error: RuntimeError) -> int | None:
    """What would have been in use at least, had the allocator not refused; None if it says nothing that we know."""
    asked = _asked_for(error)
    if asked is None:
        return None
    return _used_bytes(accelerator, error) + accelerator.least_request(_bytes_in(asked))


_SIZE = r"([0-9.]+) ([KMGT]iB|bytes|B)\b"


def _asked_for(error: RuntimeError) -> re.Match[str] | None:
    return re.search(f"[Tt]ried to allocate {_SIZE}", str(error))


def _used_bytes(accelerator: Accelerator, error: RuntimeError) -> int:
    """In use when the allocator refused: an operator that had allocated before has given that back since."""
    found = _used_in(error)
    now = accelerator.used_bytes()
    return now if found is None else max(now, _bytes_in(found) - _rounded_by(found))


def _used_rounded_by(error: RuntimeError) -> int:
    found = _used_in(error)
    return 0 if found is None else _rounded_by(found)


def _used_in(error: RuntimeError) -> re.Match[str] | None:
    return re.search(f"{_SIZE} (?:in use of|is allocated by PyTorch)", str(error))


def _bytes_in(found: re.Match[str]) -> int:
    return parse_bytes(f"{found[1]} {'B' if found[2] == 'bytes' else found[2]}")


def _rounded_by(found: re.Match[str]) -> int:
    """At most: it has two digits after the point."""
    return parse_bytes(f"1 {found[2]}") // 200 if found[2].endswith("iB") else 0
