"""The accelerator that the tests of this folder run on: CUDA where there is one, else the virtual one.

``make test`` hides CUDA devices, so that everything runs on the virtual accelerator, with races detected and memory
poisoned; ``make test-cuda`` runs the same tests, marked ``cuda``, on the real one.
"""

import contextlib
import functools
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from backward_ends import wait_for_backward_ends
from torch.utils.weak import WeakIdKeyDictionary

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
    _warm_up()
    found = torch.device("cuda", 0)
    wait_for_backward_ends(found)
    gc.collect()
    return found


@contextlib.contextmanager
def in_segments(**link: str) -> Iterator[torch.device]:
    """1 GiB whose allocator keeps segments: CUDA's, or the virtual one as it does."""
    found = device(memory="1GiB", **link)
    gc.collect()
    torch.accelerator.empty_cache()
    if ON_CUDA:
        yield found
        return
    virtual.set_in_segments(True)
    yield found
    wait_for_backward_ends(found)
    gc.collect()
    virtual.set_in_segments(False)
    virtual.set_memory_limit("256MiB")


@functools.cache
def _warm_up() -> None:
    """What libraries allocate once for the process would otherwise count for the test that comes first."""
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        # On autograd's thread there is no CUDA context before cuBLAS makes one, of which torch warns once.
        warnings.simplefilter("ignore", UserWarning)
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        (torch.nn.functional.linear(x, x, x[0]) @ x).sum().backward()


@functools.cache
def libraries_bytes() -> int:
    """Of the device, what libraries keep for good. To be asked before a test has anything there."""
    if not (ON_CUDA or SEGMENTS):
        return 0
    device()
    return torch.accelerator.memory_allocated()


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


class StepsAtHome(threading.local):  # the queue's thread steps as well
    """Lets every optimizer step parameters that live on a CUDA device with the host's arithmetic.

    hetero steps at home; a device's kernels round otherwise. On the virtual accelerator both are the host's. While a
    step runs, copies on the host stand in for parameters and states; what was written to them is then written there.
    So all of them stay the same objects, in the same memory, as in a step on the device. `begin` each, `end` each.
    """

    def __init__(self) -> None:
        # One may call another's.
        self._steps: list[tuple[torch.optim.Optimizer, dict[Any, _Visit], dict[str, torch.Tensor]]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before each step, the first one."""
        if not any(p.is_cuda for p in _parameters(optimizer)):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        changed = None
        if closure is not None:  # it runs the model, which is on the device
            with torch.enable_grad():
                loss = closure()
            changed = (args[0], lambda: loss), {}

        # Between all hooks of others, and left there: none may be removed while they are called.
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        others = {key: hook for key, hook in after.items() if key != id(self)}
        before.pop(id(self), None)
        before[id(self)] = lambda *_: self.begin(optimizer)
        after.clear()
        after.update({id(self): lambda *_: self.end(), **others})
        return changed

    def wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, which calls no hooks, between `begin` and `end`."""

        def around(optimizer: torch.optim.Optimizer) -> None:
            depth = len(self._steps)
            try:
                self.begin(optimizer)
                step(optimizer)
            finally:
                if len(self._steps) > depth:  # an interrupt may come as early as within `begin`
                    self.end()

        return around

    @torch.inference_mode(False)  # copies are ordinary tensors
    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        visits = {p: _Visit(p) for p in _parameters(optimizer) if p.is_cuda}
        # torch would send home what `GradScaler` has set there, and not wait for it.
        scaling = {
            name: value
            for name in ("grad_scale", "found_inf")
            if visits and isinstance(value := getattr(optimizer, name, None), torch.Tensor)
        }
        self._steps.append((optimizer, visits, scaling))
        for name, value in scaling.items():
            setattr(optimizer, name, value.cpu())
        for group in optimizer.param_groups:
            group["params"][:] = [visits[p].twin if p in visits else p for p in group["params"]]
        _rename(optimizer.state, {p: visit.twin for p, visit in visits.items()})
        for visit in visits.values():
            visit.send_states(dict.get(optimizer.state, visit.twin) or {})

    def end(self) -> None:
        optimizer, visits, scaling = self._steps.pop()
        for name, value in scaling.items():
            setattr(optimizer, name, value)
        back = {visit.twin: p for p, visit in visits.items()}
        for group in optimizer.param_groups:
            group["params"][:] = [back.get(p, p) for p in group["params"]]
        for visit in visits.values():
            visit.end(dict.get(optimizer.state, visit.twin) or {})
        _rename(optimizer.state, back)


# Wrappers around an optimizer know by them which parameter is which.
_twins: Any = WeakIdKeyDictionary()


class _Visit:
    """Of one parameter on the host, by a copy, its ``twin``: the same one each time."""

    def __init__(self, p: torch.nn.Parameter) -> None:
        self._p = p
        self.twin: torch.Tensor = _twins.setdefault(p, torch.empty(0))
        self.twin.data = p.detach().cpu()
        self.twin.requires_grad_(p.requires_grad)
        self.twin.__dict__.update(p.__dict__)
        self._version = self.twin._version
        self._gradient = None if p.grad is None else p.grad.cpu()
        self.twin.grad = self._gradient
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # there, and here

    def send_states(self, entry: dict[str, Any]) -> None:
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                entry[key] = value.detach().cpu()
                self._states[key] = value, entry[key]

    def end(self, entry: dict[str, Any]) -> None:
        _write(self._p, self.twin, since=self._version)
        if self._gradient is not None and self.twin.grad is self._gradient:
            _write(self._p.grad, self._gradient)
        self.twin.grad, self.twin.data = None, torch.empty(0)
        for key, value in entry.items():
            there, here = self._states.get(key, (None, None))
            if there is not None and value is here:
                _write(there, here)
                entry[key] = there
            elif isinstance(value, torch.Tensor) and (there is not None or value.shape == self._p.shape):
                entry[key] = value.to(self._p.device)
                if not (value.is_inference() or entry[key].is_inference()):
                    torch._C._autograd._unsafe_set_version_counter((entry[key],), (value._version,))


def _write(there: torch.Tensor, here: torch.Tensor, *, since: int = 0) -> None:
    """What was written to ``here``, a copy of ``there``, ``since`` that version; version counters move as often, where
    there are some: not in inference mode."""
    if there.is_inference() or here.is_inference():
        with torch.inference_mode():
            there.copy_(here)
        return
    version = there._version + here._version - since
    with torch.no_grad():
        there.copy_(here)
    torch._C._autograd._unsafe_set_version_counter((there,), (version,))


def _rename(state: Any, names: dict[Any, Any]) -> None:
    """The same entries in the same order."""
    if names:
        entries = list(dict.items(state))
        dict.clear(state)
        dict.update(state, {names.get(p, p): entry for p, entry in entries})


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
