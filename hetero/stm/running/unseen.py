"""What is done for the loop and is no part of it, unseen by the modes of whoever runs the loop.

A selective checkpoint keeps results of operators by name, and others count or log them: they are to find the loop's.
"""

import contextlib

from hetero.stm.running.modes import has_others, without_others
from hetero.stm.running.retry import Retry

__all__ = ["is_seen", "unseen"]


def is_seen() -> bool:
    """A mode would see what runs here, besides the one that tries operators again."""
    return has_others(Retry)


def unseen() -> contextlib.AbstractContextManager[None]:
    """Within it, no mode sees what runs but the one that tries operators again. Entered for each operator."""
    return without_others(Retry) if has_others(Retry) else _NOTHING


_NOTHING = contextlib.nullcontext()
