"""Ctrl-C between two steps of our own bookkeeping waits until they are done.

Owns the process's handler of SIGINT while anything is managed. Python raises `KeyboardInterrupt` between any two
bytecodes of the main thread, and no ``try`` closes every gap (``finally:`` itself can be interrupted). So while the
innermost Python code that runs is ours, a library's on our behalf, or torch's that takes something back, the interrupt
is put off: a thread sends it again until it meets the user's code, torch's on the user's behalf, or the limit. Costs
nothing where nobody interrupts.
Invariant: whatever handler was there decides what an interrupt does, and is there again afterwards.

[Note: on our behalf]
Whatever we call may be in the middle of something that we rely on: a hook that is registered and whose handle nobody
has yet, a job that is not in the executor's queue yet, a dispatch mode that is off its stack. What runs for long, a
module's forward, a backward and an optimizer's step, is the user's, whoever calls it, and we are prepared for whatever
it raises.

[Note: what torch takes back]
``torch.no_grad`` and the like end in Python: interrupted as that begins, gradients stay off for good. By itself an
interrupt hardly ever comes there; one that was put off comes as soon as our code is over, and what then follows in
clipping and in an optimizer's step is exactly that (a few in a thousand with Python 3.12).
"""

import _thread
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import grad_mode, graph
from torch.optim.optimizer import _use_grad_for_differentiable

__all__ = ["install", "remove"]

# Names of modules, because generated code (of dataclasses) has no file. The command line's loops are as interruptible
# as any user's.
_OURS = ("hetero.devices", "hetero.eviction", "hetero.msc", "hetero.stm", "hetero.manager")
# Packages whose code is ours where we have called it ([Note: on our behalf]).
_ON_BEHALF = sys.stdlib_module_names - {"__main__"} | {"numba", "numpy", "psutil", "scipy", "torch"}
# But not what torch calls for the user.
_FOR_THE_USER = (
    nn.Module._call_impl.__code__,
    graph._engine_run_backward.__code__,
    torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__,
)
# [Note: what torch takes back]; the optimizers' own goes through Dynamo, too.
_AROUND_STEPS = _use_grad_for_differentiable(lambda: None).__code__
_BETWEEN = ("__enter__", "__exit__")
# Called by the interpreter when objects die: what is raised there is printed and lost.
_SWALLOWING = ("weakref", "_weakrefset")
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
            # Not by `threading`, whose locks the code that was interrupted may hold.
            _thread.start_new_thread(_send_again, (number,))
            return None
        if now - _put_off_since < _LONGEST_SECONDS:
            return None
    _put_off_since = None
    return _before(number, frame)


def _is_ours(frame: FrameType | None) -> bool:
    if frame is not None and (frame.f_globals.get("__name__") in _SWALLOWING or _takes_back(frame)):
        return True
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.startswith(_OURS):
            return True
        if frame.f_code in _FOR_THE_USER or name.partition(".")[0] not in _ON_BEHALF:
            return False
        frame = frame.f_back
    return False


def _takes_back(frame: FrameType | None) -> bool:
    """Torch is setting what holds for a part of the user's code, or ends that."""
    while frame is not None:
        name, code = frame.f_globals.get("__name__") or "", frame.f_code
        if not name.startswith("torch._dynamo."):
            is_between = name.partition(".")[0] == "torch" and code.co_name in _BETWEEN
            return is_between or name == grad_mode.__name__ or code is _AROUND_STEPS
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
