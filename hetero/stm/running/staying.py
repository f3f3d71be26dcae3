"""Operators of the caller's own, tried again.

Owns what stays among the modes of a thread while the caller goes on, between forward, backward and step, and how it is
taken away: what is over does nothing, and is gone when the caller calls us next.
"""

from collections.abc import Callable
from typing import Any

import torch

from hetero.stm.running import modes
from hetero.stm.running.retry import Retry

__all__ = ["REPLACEMENTS", "guard_caller", "take_away_what_is_over"]

_exit = torch.inference_mode.__exit__


def guard_caller(retry: Retry) -> Callable[[], None]:
    """From now on operators of this thread are tried again by ``retry``, whoever calls them, until what is returned is
    called, on whatever thread; `take_away_what_is_over` then takes it away."""
    take_away_what_is_over()
    retry.begin()
    modes.put_below(retry)
    return retry.end


def take_away_what_is_over() -> None:
    """Take what has stayed, and is over, from this thread. Where the user has called us, because whoever leaves
    inference mode, or enters it, has torch restore that there were modes."""
    over = [retry for retry in modes.active(Retry) if retry.is_over]
    if over and not torch.is_inference_mode_enabled():
        modes.remove(*over)


def _exit_and_agree(self: torch.inference_mode, *exception: Any) -> None:
    """``inference_mode(False)`` as well has torch restore, where it ends, whether there were modes where it began."""
    _exit(self, *exception)
    modes.agree()


REPLACEMENTS: list[tuple[Any, str, Any]] = [(torch.inference_mode, "__exit__", _exit_and_agree)]
