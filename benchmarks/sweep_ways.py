"""The ways of training that `benchmarks.sweep` compares; each in a process of its own, so that its memory can be told.

Owns the loop, and what is counted. Invariant: every way trains the same weights on the same batches with the same
optimizer (`benchmarks.sweep_models`). It compares nothing: that is `benchmarks.sweep`.

python -m benchmarks.sweep_ways SETTINGS.json ROW.json     # one of them, as the sweep runs it in another environment
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from benchmarks.record import median
from benchmarks.sweep_models import Settings, adamw, batches, build, loss_of
from hetero.cli.placing import choose_device, limit_memory
from hetero.devices import Accelerator
from hetero.errors import HeteroError
from hetero.stm.plans.timings import AT_LAST, UNTIL_AGAIN

__all__ = ["WARM_UP", "held_bytes", "train_quietly"]

WARM_UP = 12  # hetero measures, plans, times what it planned, and chooses who lives on the device
# That may come back, and be timed anew, and all of it is looked at again some steps later. A plan that has stayed for
# so many stays for longer than is timed; no more are waited for than so many: batches may show more at any time.
_STAYS, _MOST_WARM_UP = UNTIL_AGAIN + AT_LAST + 1, 60

Row = dict[str, Any]

# -- counting ----------------------------------------------------------------------------------------------------------


def held_bytes(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of the storages behind ``tensors``, each once: on the host, of that pinned, and on the device."""
    found = {"host": 0, "pinned": 0, "device": 0}
    seen = set()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP2's are DTensors
        storage = local.untyped_storage()
        key = (local.device, storage.data_ptr())
        if key in seen:
            continue
        seen.add(key)
        found["host" if local.device.type == "cpu" else "device"] += storage.nbytes()
        if local.device.type == "cpu" and local.is_pinned():
            found["pinned"] += storage.nbytes()
    return found


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, Tensor))


def _status() -> dict[str, int]:
    """What the system says of this process, bytes: resident now, and at most. Empty where there is no procfs."""
    path = Path("/proc/self/status")
    if not path.exists():
        return {}
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # what was freed is not held
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


_LIBC = ctypes.CDLL(None)


# -- the loop ----------------------------------------------------------------------------------------------------------


class Loop:
    """Trains, times and counts. ``device``: where inputs go; ``accelerator`` None: it has no counters (a CPU)."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.accelerator = None if device.type == "cpu" else Accelerator(device)
        # One iteration more than is timed: host bytes are counted in the last.
        self._batch = batches(settings, settings["steps"] + _MOST_WARM_UP + 1)
        self._warm_up()
        self._resident_before = _status().get("now", 0)

    def _warm_up(self) -> None:
        """What libraries take once is not the model's."""
        x = torch.ones(64, 64, device=self.device, requires_grad=True)
        (x @ x).sum().backward()

    def run(
        self,
        model: nn.Module,
        step: Callable[[], None],
        zero_grad: Callable[[], None],
        count_host: Callable[[], dict[str, int]],
        *,
        backward: Callable[[Tensor], object] = torch.autograd.backward,
        moved_so_far: Callable[[], int] = lambda: 0,
        plan: Callable[[], object] = lambda: None,
    ) -> Row:
        """``plan``: what it follows; steps are timed once that has stayed the same for a while."""
        if self.accelerator is not None:
            self._synchronize()
            self.accelerator.reset_peak()
        seconds, step_seconds, losses, moved = [], [], [], []
        counted: dict[str, int] = {}
        followed = [plan()]
        first, steps = _MOST_WARM_UP, self.settings["steps"]
        for number in range(_MOST_WARM_UP + steps + 1):
            host_inputs, host_targets = self._batch(number)
            before, begin = moved_so_far(), time.perf_counter()
            inputs, targets = host_inputs.to(self.device), host_targets.to(self.device)
            loss = loss_of(model, inputs, targets)
            backward(loss)
            losses.append(loss.item())
            self._synchronize()
            stepped = time.perf_counter()
            step()
            if number == first + steps:
                counted = self._count(count_host)
                break
            zero_grad()
            self._synchronize()
            step_seconds.append(time.perf_counter() - stepped)
            seconds.append(time.perf_counter() - begin)
            moved.append(moved_so_far() - before)
            followed.append(plan())
            if number + 1 >= WARM_UP and all(one is followed[-1] for one in followed[-_STAYS - 1 :]):
                first = min(first, number + 1)
        return {
            "seconds": median(seconds[first:]),
            "optimizer_seconds": median(step_seconds[first:]),
            "warm_up_steps": first,
            **({} if self.accelerator is None else {"peak_device_bytes": self.accelerator.peak_bytes()}),
            **counted,
            "losses": losses,
            "samples": {"seconds": seconds, "optimizer_seconds": step_seconds, "bytes_moved": moved},
        }

    def _count(self, count_host: Callable[[], dict[str, int]]) -> Row:
        """With parameters, gradients and states all there: what is counted, and what the system says."""
        self._synchronize()
        used = 0 if self.accelerator is None else self.accelerator.used_bytes()
        status = _status()
        return {
            **count_host(),
            "device_bytes_at_the_end": used,
            "resident_growth_bytes": status.get("now", 0) - self._resident_before,
            "resident_peak_growth_bytes": status.get("peak", 0) - self._resident_before,
        }

    def _synchronize(self) -> None:
        if self.accelerator is not None:
            self.accelerator.synchronize()


def _host_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """By summing tensors."""
    held = held_bytes(_tensors_of(model, optimizer))
    return {"host_bytes": held["host"], "pinned_bytes": held["pinned"]}


# -- the ways ----------------------------------------------------------------------------------------------------------


def unmanaged(settings: Settings) -> Row:
    device = choose_device(None)
    loop = Loop(settings, device)
    model = build(settings, device).to(device)
    optimizer = adamw(settings, model, device)
    return loop.run(model, optimizer.step, optimizer.zero_grad, lambda: _host_bytes(model, optimizer))


def managed(settings: Settings) -> Row:
    device = choose_device(None)
    loop = Loop(settings, device)
    model = build(settings, device)
    optimizer = adamw(settings, model, torch.device("cpu"))
    limit_memory(device, settings["device_budget"])  # the virtual one's allocator itself refuses a byte more
    begin = time.perf_counter()
    with hetero.manage(
        model,
        optimizer,
        device=device,
        device_budget=settings["device_budget"],
        host_budget=settings["host_budget"],
        # Who lives on a real device is stepped by its kernels, which round otherwise.
        device_homes=device.type == "virtual" or not settings["exact"],
    ) as manager:
        attached = time.perf_counter() - begin
        total = manager._stm.collector.total  # as in manager.stats, which does more than count

        def count() -> dict[str, int]:
            by_kind = manager.stats.by_kind["host"]
            pinned = manager._homes._arena.nbytes if manager.config.pin_memory else 0
            return {
                "host_bytes": sum(by_kind.values()),
                **{f"host_{kind}_bytes": nbytes for kind, nbytes in by_kind.items()},
                "pinned_bytes": pinned,
            }

        facts = loop.run(
            model,
            optimizer.step,
            optimizer.zero_grad,
            count,
            moved_so_far=lambda: (
                total.fetched_bytes
                + total.written_bytes
                + total.activation_out_bytes
                + total.activation_in_bytes
            ),
            plan=lambda: manager._stm.plans.last,
        )
        stats, plan = manager.stats, manager._stm.plans.last
        timings, keys = manager._stm.plans.timings, () if plan is None else plan.keys
        links = timings.links(keys)
        return {
            **facts,
            "peak_device_bytes": max(facts["peak_device_bytes"], stats.peak_device_bytes),
            "bytes_moved": median(facts["samples"]["bytes_moved"][facts["warm_up_steps"] :]),
            # Of the last iteration: plans change, and with them what no schedule can do with less than.
            "last_bytes_moved": stats.bytes_moved,
            "lower_bound_bytes": stats.lower_bound_bytes,
            "predicted_seconds": stats.predicted_seconds,
            "unplanned_fetches": stats.unplanned_fetches,
            "stall_seconds": stats.stall_seconds,
            "manage_seconds": attached,
            "h2d_bandwidth": links.h2d_bandwidth,
            "d2h_bandwidth": links.d2h_bandwidth,
            "issue_seconds": links.issue,  # of one copy, for which operators waited
            "copies_were_measured": timings.get(keys) is not None,  # else probed before training
        }


def fsdp2(settings: Settings) -> Row:
    """FSDP2 with everything offloaded, in one process: it gathers a block before it runs, frees it after."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "cpu": "gloo"}.get(device.type)
    if backend is None:
        raise HeteroError(f"no communication backend for {device.type}")
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        loop = Loop(settings, device)
        model: Any = build(settings, device)
        policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        optimizer = adamw(settings, model, torch.device("cpu"))
        return loop.run(model, optimizer.step, optimizer.zero_grad, lambda: _host_bytes(model, optimizer))
    finally:
        torch.distributed.destroy_process_group()


def deepspeed(settings: Settings) -> Row:
    """ZeRO-3 in one process, parameters and optimizer offloaded."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": device.type})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"})
    import deepspeed as library

    library.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
    loop = Loop(settings, device)
    model = build(settings, device)
    offload = {"device": "cpu", "pin_memory": device.type != "cpu"}
    engine, optimizer, _, _ = library.initialize(
        model=model,
        optimizer=adamw(settings, model, torch.device("cpu")),
        config={
            "train_micro_batch_size_per_gpu": settings["batch"],
            "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def count() -> dict[str, int]:
        held = held_bytes(_zero3_tensors(engine, optimizer))
        return {"host_bytes": held["host"], "pinned_bytes": held["pinned"]}

    row = loop.run(engine, engine.step, lambda: None, count, backward=engine.backward)
    return {"version": library.__version__, **row}


def _zero3_tensors(engine: Any, optimizer: Any) -> Iterable[Tensor]:
    """Partitions of parameters, the flat copies that are stepped, their gradients and states."""
    for parameter in engine.module.parameters():
        yield parameter.ds_tensor
    for flat in optimizer.fp32_partitioned_groups_flat:
        yield flat
        if flat.grad is not None:
            yield flat.grad
    # Its gradients stay in one buffer, views of which become ``flat.grad`` for the time of a step.
    if isinstance(optimizer.grad_partitions_flat_buffer, Tensor):
        yield optimizer.grad_partitions_flat_buffer
    for entry in optimizer.optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, Tensor))


WAYS: dict[str, Callable[[Settings], Row]] = {
    "unmanaged": unmanaged,
    "hetero": managed,
    "FSDP2 CPUOffloadPolicy": fsdp2,
    "DeepSpeed ZeRO-3 offload": deepspeed,
}


def train(asked: Path, answered: Path) -> None:
    """Trains as the file ``asked`` says, and writes the row to ``answered``."""
    settings = json.loads(asked.read_text())
    torch.backends.cuda.matmul.allow_tf32 = True
    if torch.accelerator.current_accelerator(check_available=True) is None:
        torch.set_num_threads(1)  # or those of FSDP2 and DeepSpeed wait for each other on a busy machine
    if settings["exact"]:
        # Fused attention is another formula on each device, and not everywhere in a fixed order.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        for kind in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    try:
        row = WAYS[settings["way"]](settings)
    except (HeteroError, RuntimeError, ValueError, ImportError, AttributeError, TypeError) as error:
        # An out-of-memory error is a RuntimeError.
        row = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    answered.write_text(json.dumps(row))


def train_quietly(asked: Path, answered: Path, printed: Path) -> None:
    """As `train`, in a process whose output goes to ``printed``."""
    with printed.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    train(asked, answered)


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
