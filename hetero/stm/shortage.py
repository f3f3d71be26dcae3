"""What a budget that is too small is told.

Owns the words and the number. Invariant: where "at least" is said, a budget of that many bytes holds every operator of
the iterations that were measured; where none was, what the operator allocates itself is said to come on top.
"""

from hetero.devices import Accelerator
from hetero.errors import BudgetError
from hetero.units import format_bytes

__all__ = ["too_small"]


def too_small(
    accelerator: Accelerator,
    budget: int,
    operator: str,
    *,
    wanted: int,
    short: int,
    held: int,
    enough: int | None,
) -> BudgetError:
    """``operator`` lacks ``short`` of the ``wanted`` bytes that its operands take beside what is there; ``held``: of
    that, copies that cannot leave. ``enough``: for all that was measured; None if nothing was."""
    operands = budget + short
    if enough is None:
        cure = (
            f"more than {format_bytes(operands)}, because what it allocates itself has not been measured and comes on "
            f"top ({operands} bytes)"
        )
    else:
        enough = max(enough, operands)
        cure = f"at least {format_bytes(enough)}, of which {format_bytes(operands)} for operands ({enough} bytes)"
    return BudgetError(
        f"{operator} needs {format_bytes(wanted)} more on {accelerator.device}, where "
        f"{format_bytes(accelerator.used_bytes())} of the budget of {format_bytes(budget)} are in use "
        f"({format_bytes(held)} by copies that cannot be evicted now): lower the batch size, or raise device_budget to "
        f"{cure}"
    )
