"""The same loop under FSDP2 on one rank, on the CPU, as `twins` runs it under hetero on the virtual accelerator.

``fully_shard`` of the whole model with ``MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)``: the
virtual accelerator computes what the CPU computes, so that every number has to be equal.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerators import device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from twins import Build, Loop, adamw, assert_same, managed

import hetero


def one_rank() -> None:
    """A process group of this process alone; nothing is opened on the network."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def local(value: Any) -> Any:
    """A detached copy; of a sharded tensor what this rank has, which is all of it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [local(item) for item in value]
    return value


def sharded(
    build: Build, loop: Loop, precision: torch.dtype, make_optimizer: Callable[[nn.Module], Any] = adamw
) -> tuple[Any, list[torch.Tensor]]:
    """Observations, and final parameters and buffers."""
    device()  # autograd's threads are made at the first backward: one for each device that there is then
    one_rank()
    torch.manual_seed(0)
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    seen = local(loop(model, optimizer, torch.device("cpu")))
    model.reshard()  # a forward without backward leaves it in low precision
    return seen, [local(t) for t in (*model.parameters(), *model.buffers())]


def assert_as_fsdp2(
    build: Build,
    loop: Loop,
    precision: torch.dtype = torch.bfloat16,
    *,
    budget: int = 4 << 20,
    make_optimizer: Callable[[nn.Module], Any] = adamw,
    **keywords: Any,
) -> hetero.Manager:
    """Same observations, same parameters."""
    expected, state = sharded(build, loop, precision, make_optimizer)
    got, got_state, manager = managed(build, loop, budget, make_optimizer, precision=precision, **keywords)
    assert_same(got, expected, "observed")
    assert_same(got_state, state, "state")
    return manager
