"""Ctrl-C between two steps of our own bookkeeping waits until they are done.

Owns the process's handler of SIGINT while anything is managed. Python raises `KeyboardInterrupt` between any two
bytecodes of the main thread, and no ``try`` closes every gap (``finally:`` itself can be interrupted). So while the
innermost Python code that runs is ours, or the standard library on our behalf, the interrupt is put off: a thread
sends it again until it meets the user's code, torch's, or the limit. Costs nothing where nobody interrupts.
Invariant: whatever handler was there decides what an interrupt does, and is there again afterwards.
"""

import _thread
import _weakrefset
import contextlib
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from torch.autograd import grad_mode

__all__ = ["install", "remove"]

_HERE = Path(__file__).parents[1]
# The command line's loops are as interruptible as any user's.
_OURS = (
    *(str(_HERE / room) + "/" for room in ("devices", "eviction", "msc", "stm")),
    str(_HERE / "manager.py"),
)
# torch's: ``no_grad`` is Python, and an interrupt in its ``__enter__`` would leave gradients off for good.
_ON_BEHALF = tuple(module.__file__ for module in (contextlib, threading, grad_mode) if module.__file__)
# Called by the interpreter when objects die: what is raised there is printed and lost.
_SWALLOWING = tuple(module.__file__ for module in (weakref, _weakrefset) if module.__file__)
_AGAIN_SECONDS = 1e-3
# A thing of ours that hangs can be interrupted after all.
_LONGEST_SECONDS = 10.0

_users = 0
_before: Any = None
_put_off_since: float | None = None


def install() -> None:
    """Something is managed. Does nothing outside the main thread, where handlers cannot be set."""
    global _users, _before
    _users += 1
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and handler is not _handle:
        _before = handler
        signal.signal(signal.SIGINT, _handle)


def remove() -> None:
    """It is not any more."""
    global _users
    _users -= 1
    if _users or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is _handle:  # nobody has set another since then
        signal.signal(signal.SIGINT, _before)


def _handle(number: int, frame: FrameType | None) -> Any:
    global _put_off_since
    now = time.monotonic()
    if _users and _is_ours(frame):
        if _put_off_since is None:
            _put_off_since = now
            threading.Thread(target=_send_again, args=(number,), name="hetero-interrupt", daemon=True).start()
            return None
        if now - _put_off_since < _LONGEST_SECONDS:
            return None
    _put_off_since = None
    return _before(number, frame)


def _is_ours(frame: FrameType | None) -> bool:
    if frame is not None and frame.f_code.co_filename in _SWALLOWING:
        return True
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return True
        if name not in _ON_BEHALF:
            return False
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    # It wakes the main thread from a wait; elsewhere than on POSIX nothing does.
    send: Any = getattr(signal, "pthread_kill", lambda _, number: _thread.interrupt_main(number))
    while not sys.is_finalizing():
        time.sleep(_AGAIN_SECONDS)
        if _put_off_since is None:
            return
        send(main, number)
