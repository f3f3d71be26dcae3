"""The accelerator that the tests of this folder run on: CUDA where there is one, else the virtual one.

``make test`` hides CUDA devices, so that everything runs on the virtual accelerator, with races detected and memory
poisoned; ``make test-cuda`` runs the same tests, marked ``cuda``, on the real one.
"""

import gc
import os
import warnings
from typing import Any

import torch
from backward_ends import wait_for_backward_ends

import hetero
from hetero.devices import virtual

ON_CUDA = torch.cuda.is_available()
# The virtual device's memory as a CUDA device has it: segments, more than any test asks for, and what cuBLAS keeps for
# each thread (`tests/conftest.py`). What fails then would fail on a CUDA device.
SEGMENTS = not ON_CUDA and bool(os.environ.get("HETERO_TEST_SEGMENTS"))
_workspaces: list[torch.Tensor] = []
if ON_CUDA:  # now: torch's own databases of tests, once imported, let nobody set cuDNN's flags any more
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
# By how much a guarded iteration may pass a budget there: the cap is on segments, and what lies in the gaps of a small
# and a large one that are there anyway is not refused.
GAPS = (2 << 20) + (20 << 20) if ON_CUDA or SEGMENTS else 0

# Why some tests are left out on CUDA: of `StepsAtHome`.
STEPS_AT_HOME = "every optimizer steps on the host there, by hooks, and with parameters in other memory"
# Of the reference, which a test computes on the host.
ON_HOST = "compares with the host, whose kernels round otherwise than the device's"


def device(memory: str | int = "256MiB", **link: str) -> torch.device:
    """With ``memory`` and a link of such a speed if it is virtual. No backward of before holds memory of it."""
    if SEGMENTS:
        found = hetero.virtual_device(memory="8GiB", **link)
        virtual.set_in_segments(True)
        if not _workspaces:
            _workspaces.append(torch.empty(2 * (128 << 10), dtype=torch.uint8, device=found))
        wait_for_backward_ends(found)
        return found
    if not ON_CUDA:
        found = hetero.virtual_device(memory=memory, **link)
        wait_for_backward_ends(found)
        return found
    # What libraries allocate once for the process would otherwise count for the test that comes first. On autograd's
    # thread there is no CUDA context before cuBLAS makes one, of which torch warns once.
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (torch.nn.functional.linear(x, x, x[0]) @ x).sum().backward()
    del x
    found = torch.device("cuda", 0)
    wait_for_backward_ends(found)
    gc.collect()
    return found


def races() -> list[str]:
    """Races found since `clear_races`; no real device can tell."""
    return [] if ON_CUDA else virtual.races()


def clear_races() -> None:
    if not ON_CUDA:
        virtual.clear_races()


def set_memory_limit(nbytes: int) -> None:
    """No allocation passes it, on the virtual device. A real one's cap is on what it reserves, fragments included."""
    if not (ON_CUDA or SEGMENTS):
        virtual.set_memory_limit(nbytes)


class StepsAtHome:
    """Lets every optimizer step parameters that live on a CUDA device with the host's arithmetic.

    hetero steps at home; a device's kernels round otherwise. On the virtual accelerator both are the host's. Parameters
    and states stay the same objects, as in a step on the device.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[torch.nn.Parameter, torch.device, torch.Tensor | None]] = []
        self._states: set[int] = set()  # ids of those that were on the device

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        there = [p for p in _parameters(optimizer) if p.is_cuda]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        changed = None
        if there and closure is not None:  # it runs the model, which is on the device
            with torch.enable_grad():
                loss = closure()
            changed = (args[0], lambda: loss), {}
        for p in there:
            grad, p.grad = p.grad, None
            self._moved.append((p, p.device, grad))
            p.data = p.data.cpu()
            p.grad = None if grad is None else grad.cpu()
            for value in _states(optimizer, p):
                if value.is_cuda:  # with fused kernels the count of steps as well
                    self._states.add(id(value))
                    value.data = value.data.cpu()
        return changed

    def after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for p, home, grad in self._moved:
            p.grad = None
            p.data = p.data.to(home)
            p.grad = grad
            for value in _states(optimizer, p):
                if value.shape == p.shape or id(value) in self._states:
                    value.data = value.data.to(home)
        self._moved.clear()
        self._states.clear()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> list[torch.Tensor]:
    # Without telling whoever watches who looks.
    entry = dict.get(optimizer.state, p) or {}
    return [value for value in entry.values() if isinstance(value, torch.Tensor)]
