"""Running one training job managed and unmanaged, from the same start, and keeping what came out.

Owns the loop that both ways share, so that nothing but hetero differs between them. Compares nothing:
`hetero.cli.comparison` does.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hetero.cli.jobs import LossOf, as_if_managed, checked_loss
from hetero.cli.placing import steps_differ
from hetero.devices import Accelerator
from hetero.errors import DeviceError
from hetero.manager import manage
from hetero.report import MemoryStats

__all__ = ["Job", "Outcome", "seed_everything", "train_managed", "train_unmanaged"]

OnStep = Callable[[int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained: ``loss_fn(model, batch)`` gives the scalar loss of one of ``batches``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Any]
    loss_fn: LossOf
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left behind. Bytes; seconds; tensors are copies on the host.

    Attributes:
        losses: one scalar a step.
        tensors: by kind (``"parameter"``, ``"gradient"`` of the last step, ``"buffer"``, or the name of an
            optimizer state) and name. A state that is no tensor stays what it is.
        seconds: wall time of each step.
        model_data_bytes: parameters, gradients, optimizer states and buffers after the last step.
        peak_device_bytes: the allocator's own counter over the run.
        stats: the manager's, where there was one.
    """

    losses: list[Tensor]
    tensors: dict[tuple[str, str], Any]
    seconds: list[float]
    model_data_bytes: int
    peak_device_bytes: int
    stats: MemoryStats | None


def train_managed(
    job: Job, device: torch.device, *, device_budget: int, on_step: OnStep, plot: Path | None = None
) -> Outcome:
    """Train ``job`` under `hetero.manage`, its model on the host before and after. All steps have the host's
    arithmetic: they are compared with `train_unmanaged`'s on the host."""
    accelerator = Accelerator(device)
    _start_peak(accelerator)
    with manage(
        job.model,
        job.optimizer,
        device=device,
        device_budget=device_budget,
        device_homes=not steps_differ(device),
    ) as manager:
        losses, seconds = _train(job, device, job.optimizer.step, on_step)
        stats = manager.stats
        peak = max(accelerator.peak_bytes(), stats.peak_device_bytes)
        if plot is not None:
            manager.plot(str(plot))
    return _outcome(job, losses, seconds, peak, stats)


def train_unmanaged(job: Job, device: torch.device, *, step_on_host: bool, on_step: OnStep) -> Outcome:
    """Train ``job`` with all of it on ``device``, as one would without hetero.

    ``step_on_host``: parameters visit the host for the optimizer's step. A GPU rounds some optimizers'
    arithmetic differently from a CPU; so the step is where the managed one is, and all else can be compared
    bit for bit. A step with the host's arithmetic has the kernels that hetero chooses. Raises `DeviceError` if the
    job does not fit.
    """
    accelerator = Accelerator(device)
    _start_peak(accelerator)

    def step() -> None:
        as_on_host = step_on_host or not steps_differ(device)
        with (
            _parameters_on_host(job.optimizer) if step_on_host else nullcontext(),
            as_if_managed(job.optimizer) if as_on_host else nullcontext(),
        ):
            job.optimizer.step()

    try:
        job.model.to(device)
        losses, seconds = _train(job, device, step, on_step)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the unmanaged run does not fit on {device} ({accelerator.total_bytes()} bytes), so there is "
            "nothing to compare with: use a smaller model or batch"
        ) from error
    return _outcome(job, losses, seconds, accelerator.peak_bytes(), None)


def _train(
    job: Job, device: torch.device, step: Callable[[], object], on_step: OnStep
) -> tuple[list[Tensor], list[float]]:
    seed_everything(job.seed)
    losses, seconds = [], []
    for number, batch in enumerate(job.batches):
        begin = time.perf_counter()
        job.optimizer.zero_grad()
        loss = checked_loss(job.loss_fn, job.model, _moved(batch, device))
        torch.autograd.backward(loss)
        step()
        losses.append(loss.detach().cpu())
        seconds.append(time.perf_counter() - begin)
        on_step(number, float(losses[-1]))
    return losses, seconds


def _start_peak(accelerator: Accelerator) -> None:
    gc.collect()  # of an earlier run, nothing may linger in cycles
    accelerator.synchronize()
    accelerator.reset_peak()


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators, of all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _moved(batch: Any, device: torch.device) -> Any:
    # Some batches, such as a tokenizer's, are no plain containers but know how to move.
    return pytree.tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, batch)


@contextmanager
def _parameters_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    held = [(p, p.device) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in held:
        _move(parameter, torch.device("cpu"))
    try:
        yield
    finally:
        for parameter, device in held:
            _move(parameter, device)


def _move(parameter: Tensor, device: torch.device) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(device)
    parameter.grad = None if gradient is None else gradient.to(device)


def _outcome(
    job: Job, losses: list[Tensor], seconds: list[float], peak: int, stats: MemoryStats | None
) -> Outcome:
    tensors = dict(_tensors_of(job.model, job.optimizer))
    return Outcome(
        losses=losses,
        tensors=tensors,
        seconds=seconds,
        model_data_bytes=sum(value.nbytes for value in tensors.values() if isinstance(value, Tensor)),
        peak_device_bytes=peak,
        stats=stats,
    )


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[str, str], Any]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        yield ("parameter", name), _copied(parameter)
        if parameter.grad is not None:
            yield ("gradient", name), _copied(parameter.grad)
    for name, buffer in model.named_buffers():
        yield ("buffer", name), _copied(buffer)
    for number, (parameter, entries) in enumerate(optimizer.state.items()):
        for key, value in entries.items():
            yield (str(key), names.get(parameter, f"optimizer's parameter {number}")), _copied(value)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
