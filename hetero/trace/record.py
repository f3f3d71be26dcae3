"""Recording a training step: the entry points `trace_step`, `trace_recipe` and `trace_loop`.

Owns the order of things (fake, warm up, record, measure, cut) and the errors a user sees. Invariant: after a
fake recording every tensor, module and optimizer is as before. Plain Python state that the step itself
changes (a scheduler's counter, a list of losses) is the step's own business, fake or not.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from hetero.errors import ConfigError, PlanError
from hetero.trace.fakemode import fake_mode, rows_with_values
from hetero.trace.faking import FakeDevice, Faker, reachable
from hetero.trace.iteration import IterationFinder
from hetero.trace.ledger import Ledger, RecordedOperator
from hetero.trace.steptrace import StepTrace, Storage

__all__ = ["trace_loop", "trace_recipe", "trace_step"]

_FALLBACK = "trace a real step instead (fake=False, or hetero trace --real), with a model and batch that fit"


def trace_step(
    step: Callable[..., object],
    *args: Any,
    fake: bool = False,
    device: torch.device | str | None = None,
    warmup: int = 1,
) -> StepTrace:
    """Record one training step, ``step(*args)``, operator by operator.

    ``step`` is one whole iteration of an ordinary loop: forward, backward, optimizer, clearing of gradients.
    It runs ``warmup`` times unrecorded, so that optimizer states exist and the trace is that of every later
    step, and then once recorded. ``warmup=0`` records the very first step.

    With ``fake=True`` nothing is computed and no memory is used: tensors in ``args``, and the parameters,
    buffers, gradients and optimizer states of modules and optimizers that are in ``args`` or that ``step``
    refers to, are replaced by fake ones for the time of the recording. A model may be on the meta device::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            optimizer = torch.optim.AdamW(model.parameters())
            batch = torch.zeros(1, 2048, dtype=torch.long)
        trace = hetero.trace_step(train_step, model, optimizer, batch, fake=True)

    ``device`` is, for fake tensors, the device to predict (default: where each tensor is, meta as CPU). It
    need not exist here: operators are then the CPU's, while optimizers choose as they would there
    (``foreach`` needs temporaries as big as the parameters). For a real step it is the device whose load is
    asked for by default. On a real accelerator the step's peak in the allocator's statistics is kept as
    ``measured_peak_nbytes``; this resets those peak statistics, and it counts whatever is on the device, also
    tensors that the step never sees.

    Under fake tensors ``loss.item()`` gives a symbol that can be returned and summed, and a `GradScaler`
    finds no overflow. Whatever else depends on a tensor's values (``if loss > 3``, ``nonzero``, LBFGS) raises
    `PlanError` naming the operator; the fallback is to trace a real step. Raises `ConfigError` for arguments
    that cannot be used, and whatever ``step`` raises.
    """
    with _recording([*args, *reachable(step)], args, fake=fake, device=device) as (ledger, arguments):
        return _record_step(ledger, step, arguments, fake=fake, device=device, warmup=warmup)


def trace_recipe(
    recipe: Callable[[], tuple[Any, ...]],
    *,
    fake: bool = True,
    device: torch.device | str | None = None,
    warmup: int = 1,
) -> StepTrace:
    """Trace what a recipe builds: ``recipe()`` returns ``(step, *args)`` as `trace_step` takes them.

    With ``fake=True`` the recipe itself runs on fake tensors, so that a model of any size is built without
    memory, ``model.to(torch.bfloat16)`` and all; otherwise under ``torch.device(device)``. This is what
    ``hetero trace FILE.py:RECIPE`` runs. Everything else is as in `trace_step`. Raises `ConfigError` for a recipe that
    returns something else, and what `trace_step` raises.
    """
    where = (FakeDevice.of(device).tensors if fake else device) or "cpu"
    with _recording([], (), fake=fake, device=device) as (ledger, _):
        with torch.device(where), rows_with_values():
            made = recipe()
        if not isinstance(made, tuple) or not made or not callable(made[0]):
            raise ConfigError(
                f"a recipe returns a tuple (step, *args) with a callable step; got {type(made).__name__}"
            )
        step, *args = made
        _learn(ledger, [*args, *reachable(step)], args)
        return _record_step(ledger, step, args, fake=fake, device=device, warmup=warmup)


def trace_loop(
    loop: Callable[..., object],
    *args: Any,
    fake: bool = False,
    device: torch.device | str | None = None,
    repeats: int = 2,
    max_operators: int = 1_000_000,
) -> StepTrace:
    """Trace one iteration of a plain training loop, which may be endless, without marking its steps.

    Runs ``loop(*args)``, and leaves it by an exception from inside (a ``BaseException`` of hetero's own) as
    soon as ``repeats`` consecutive iterations are equal in operators and sizes; returns the last of them. The
    iteration begins at the first forward operator after the parameters were updated. Everything else is as in
    `trace_step`.

    Raises `PlanError` if no iteration repeats before the loop ends or ``max_operators`` have run.
    """
    finder = IterationFinder(repeats=repeats)
    found: list[tuple[int, int]] = []

    def watch(operator: RecordedOperator) -> None:
        window = finder.feed(
            operator.signature, forward=operator.phase == "forward", updates=operator.updates_parameter
        )
        if window is not None:
            found.append(window)
            raise _IterationFoundError
        if ledger.now >= max_operators:
            raise PlanError(
                f"no training iteration repeated within {ledger.now} operators: raise max_operators, or mark "
                "the step yourself with trace_step"
            )

    objects = [*args, *reachable(loop)]
    with _recording(objects, args, fake=fake, device=device, watch=watch) as (ledger, arguments):
        with suppress(_IterationFoundError):
            loop(*arguments)
        ledger.recording = False
        window = found[0] if found else finder.close()
        if window is None:
            raise PlanError(
                f"the loop ended after {ledger.now} operators before an iteration repeated {repeats} times: "
                "let it run longer (the first one differs: it makes optimizer states), or use trace_step"
            )
        return _cut(ledger, *window, fake=fake, device=device)


class _IterationFoundError(BaseException):
    """Leaves the user's loop; not an Exception, so that a loop which survives errors is still left."""


class _Measured:
    """The allocator's own peak from construction until `peak`."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        if device is not None:
            gc.collect()  # the peak is all of the device's: garbage of before does not belong to this step
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)

    def peak(self) -> int | None:
        if self._device is None:
            return None
        torch.accelerator.synchronize(self._device)
        return int(torch.accelerator.max_memory_allocated(self._device))


def _record_step(
    ledger: Ledger,
    step: Callable[..., object],
    args: Sequence[Any],
    *,
    fake: bool,
    device: torch.device | str | None,
    warmup: int,
) -> StepTrace:
    if warmup < 0:
        raise ConfigError(f"warmup={warmup}: a number of unrecorded steps cannot be negative")
    for _ in range(warmup):
        step(*args)
    ledger.scopes.begin_step()
    begin = ledger.now
    measured = _Measured(None if fake else _accelerator_of(args, step, device))
    step(*args)
    end = ledger.now
    peak = measured.peak()
    ledger.recording = False
    trace = _cut(ledger, begin, end, fake=fake, device=device)
    if peak is not None and trace.device.split(":")[0] != "cpu":
        return replace(trace, measured_peak_nbytes=peak)
    return trace


@contextmanager
def _recording(
    objects: list[object],
    args: tuple[Any, ...],
    *,
    fake: bool,
    device: torch.device | str | None,
    watch: Callable[[RecordedOperator], None] | None = None,
) -> Iterator[tuple[Ledger, tuple[Any, ...]]]:
    """A running ledger that knows the storages of ``objects``, and the arguments to call the step with."""
    with ExitStack() as stack:
        substitute, call = None, None
        if fake:
            mode = fake_mode()
            faker = Faker(mode, FakeDevice.of(device))
            args = stack.enter_context(faker.standing_in(objects, args))
            substitute, call = faker.fake_foreign, faker.call
        ledger = Ledger(substitute=substitute, call=call, on_operator=watch)
        stack.enter_context(_data_dependence_explained(ledger))
        if fake:
            stack.enter_context(mode)
        _learn(ledger, objects, args)
        stack.enter_context(ledger.scopes)
        stack.enter_context(ledger)
        yield ledger, args


def _learn(ledger: Ledger, objects: Sequence[object], args: Sequence[object]) -> None:
    """Name what is known before the step: parameters, buffers, states, gradients, inputs."""
    leaves = pytree.tree_leaves(list(objects))
    for module in (leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)):
        ledger.scopes.learn_module(module)
    for optimizer in (leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)):
        ledger.scopes.learn_optimizer(optimizer)
    for tensor in (leaf for leaf in pytree.tree_leaves(list(args)) if isinstance(leaf, torch.Tensor)):
        ledger.label(tensor, "input", "input")


@contextmanager
def _data_dependence_explained(ledger: Ledger) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise PlanError(
            f"{error.func} needs the values of its input, which fake tensors do not have; {_FALLBACK}"
        ) from error
    except GuardOnDataDependentSymNode as error:
        raise PlanError(
            "the step branches on a value read from a tensor (aten._local_scalar_dense: .item(), bool(), "
            f"float()), which fake tensors do not have; last operator: {ledger.running}; {_FALLBACK}"
        ) from error
    except TypeError as error:
        if "SymFloat.__format__" in str(error) or "SymInt.__format__" in str(error):
            raise PlanError(
                "the step formats a value read from a tensor (aten._local_scalar_dense: .item()), which fake "
                f"tensors do not have; {_FALLBACK}"
            ) from error
        raise


def _accelerator_of(
    args: Sequence[Any], step: Callable[..., object], device: torch.device | str | None
) -> torch.device | None:
    """The accelerator that the step's tensors are on, if its allocator keeps statistics."""
    if device is not None:
        candidates = [torch.device(device)]
    else:
        candidates = list(_devices_of([*args, *reachable(step)]))
    here = torch.accelerator.current_accelerator()
    if here is None:
        return None
    return next((candidate for candidate in candidates if candidate.type == here.type), None)


def _devices_of(objects: list[object]) -> Iterator[torch.device]:
    for leaf in pytree.tree_leaves(objects):
        if isinstance(leaf, torch.Tensor):
            yield leaf.device
        elif isinstance(leaf, torch.nn.Module):
            yield from (parameter.device for parameter in leaf.parameters())


def _cut(ledger: Ledger, begin: int, end: int, *, fake: bool, device: torch.device | str | None) -> StepTrace:
    trace = ledger.cut(begin, end, source="fake" if fake else "real")
    if device is None:
        return trace
    place = FakeDevice.of(device) if fake else FakeDevice(tensors=torch.device(device), called=None)
    if place.called is None:
        return replace(trace, device=_spelled(torch.device(device)))
    called = str(place.called)
    return replace(trace, device=called, storages=tuple(_moved(s, called) for s in trace.storages))


def _moved(storage: Storage, called: str) -> Storage:
    """``storage`` where it would be; optimizers' step counters stay on the CPU."""
    counter = storage.kind == "state" and storage.nbytes <= 8
    return storage if counter else replace(storage, device=called)


def _spelled(device: torch.device) -> str:
    """As storages spell it: ``cuda`` means the current index."""
    if device.type == "cpu" or ":" in str(device):
        return str(device)
    return f"{device.type}:{torch.accelerator.current_device_index()}"
