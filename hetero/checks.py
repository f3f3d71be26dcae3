"""Whether a model and optimizer can be managed under given budgets.

Owns every refusal of `hetero.manage`. Reads only: when one of these raises, nothing has been changed.
"""

import mmap

import torch
from torch import nn

from hetero.config import Config
from hetero.devices import Accelerator
from hetero.errors import BudgetError, ManageError
from hetero.stm.activations.slots import promised_bytes
from hetero.stm.settled.who import record_of
from hetero.stm.tensors.overlap import first_overlap
from hetero.stm.tensors.precision import computes_in
from hetero.stm.updates.optimizers import DECLARATION, may_be_tried
from hetero.stm.updates.traits import probe_step
from hetero.units import format_bytes

__all__ = ["check_budgets", "check_manageable", "check_step", "named_parameters"]


def check_manageable(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, parameters: list[tuple[str, nn.Parameter]]
) -> None:
    """Raises `ManageError` for what cannot be managed as it is. ``parameters``: `named_parameters` of ``model``."""
    if not isinstance(model, nn.Module):
        raise _not_a_model(model)
    if not parameters:
        raise ManageError(f"{type(model).__name__} has no parameters: there is nothing to manage")
    for name, parameter in parameters:
        _check_parameter(name, parameter)
    _check_shared_memory(parameters, list(model.named_buffers()))
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ManageError(
                f"{type(module).__name__} copies the model to several devices or processes, and hetero is for one: "
                "manage the module inside it (.module), and call that"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ManageError(
                f"{module.original_name} is a TorchScript module, whose operators run where nothing of Python can "
                "bring their parameters: manage the module that it was made from, and export that when it is trained"
            )
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _not_an_optimizer(optimizer)
    if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        raise ManageError(
            f"{type(optimizer).__name__} was made without Optimizer.__init__, so it is not told of loading: if it "
            "wraps another optimizer (timm's Lookahead does), pass that one, and go on stepping the wrapper"
        )
    ours = {id(parameter) for _, parameter in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(parameter) not in ours for parameter in held)
    if foreign == len(held):
        raise ManageError(
            f"the optimizer holds none of the model's {len(parameters)} parameters (it holds {len(held)} others): "
            "make it from model.parameters() after the last change of the model's device or dtype"
        )
    with_ours = [g for g in optimizer.param_groups if any(id(p) in ours for p in g["params"])]
    if any(group.get("capturable") and not group.get("fused") for group in with_ours):
        raise ManageError(
            f"{type(optimizer).__name__} has capturable=True, which torch takes on accelerators only, and hetero steps "
            "parameters at home: leave it False, or set fused=True, where it makes no difference"
        )


def _not_a_model(model: object) -> ManageError:
    cure = (
        "is it hetero.manage(model, optimizer)?"
        if isinstance(model, torch.optim.Optimizer)
        else "pass a model"
    )
    return ManageError(f"model is of type {type(model).__name__}, not a torch.nn.Module: {cure}")


def _not_an_optimizer(optimizer: object) -> ManageError:
    cure = "pass an optimizer, or None"
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        cure = "pass the optimizer that it schedules; the scheduler needs nothing"
    if (
        optimizer
        and isinstance(optimizer, list | tuple)
        and all(isinstance(o, torch.optim.Optimizer) for o in optimizer)
    ):
        cure = "pass the one that holds most, and go on stepping the others as they are"
    return ManageError(
        f"optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer: {cure}"
    )


def _check_shared_memory(
    parameters: list[tuple[str, nn.Parameter]], buffers: list[tuple[str, torch.Tensor]]
) -> None:
    """Different parameters over the same bytes: a write to one would not be seen through the other's copy. A buffer
    over a parameter's would stay behind when that goes home."""
    found = first_overlap(parameters, buffers)
    if found is None:
        return
    name, other, nbytes = found
    if any(other == buffer for buffer, _ in buffers):
        raise ManageError(
            f"buffer {other} and parameter {name} lie over the same memory ({nbytes} bytes): use {name} where the "
            f"buffer is used, or give the buffer memory of its own (module.{other} = module.{other}.clone())"
        )
    raise ManageError(
        f"{name} and {other} are two parameters over the same memory ({nbytes} bytes): make them one nn.Parameter "
        "(module.weight = other.weight), or give each its own (p.data = p.data.clone())"
    )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if record_of(parameter) is not None:
        raise ManageError(f"{name} is managed already: go on with its manager, or call close() on that first")
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ManageError(f"{name} has no shape yet (a lazy module): run one forward first, then manage")
    if parameter.is_meta:
        raise ManageError(
            f"{name} is on the meta device: give it memory first (model.to_empty(device='cpu'))"
        )
    if type(parameter).__name__ == "DTensor":  # by name: importing torch.distributed.tensor takes a second
        raise ManageError(
            f"{name} is a DTensor (FSDP2, tensor parallelism), which hetero cannot manage: it is for one device "
            "and one process. Manage the model instead of calling fully_shard or parallelize_module, or leave that "
            "module to them"
        )
    if type(parameter) is not nn.Parameter:
        raise ManageError(
            f"{name} is a {type(parameter).__name__}, not a plain nn.Parameter: its class would be lost; convert it, "
            "or leave that module out"
        )
    if parameter.layout is not torch.strided:
        raise ManageError(
            f"{name} has layout {parameter.layout}: only dense parameters can be managed; convert it "
            "(parameter.to_dense()), or leave that module out"
        )


def check_budgets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parameters: list[tuple[str, nn.Parameter]],
    config: Config,
    accelerator: Accelerator,
    *,
    states: int,
) -> int:
    """Host memory that model data at home may come to, in bytes; ``states``: as `check_step` tells. Raises
    `BudgetError` if the budgets cannot work."""
    buffers = sum(accelerator.allocated_size(b.numel() * b.element_size()) for b in model.buffers())
    copies = {name: p.numel() * computes_in(p.dtype, config.precision).itemsize for name, p in parameters}
    name, largest = max(parameters, key=lambda item: copies[item[0]])
    needed = buffers + accelerator.allocated_size(copies[name])
    if needed > config.device_budget:
        raise BudgetError(
            f"{name} {tuple(largest.shape)} and the buffers ({format_bytes(buffers)}) need {needed} bytes on "
            f"{accelerator.device} at once, device_budget is {config.device_budget} bytes: raise it to at least "
            f"{needed} bytes ({format_bytes(needed)}), activations not counted"
        )
    homes = sum(p.numel() * p.element_size() for _, p in parameters)
    trained = sum(p.numel() * p.element_size() for _, p in parameters if p.requires_grad)
    twins = sum(
        copies[name] for name, p in parameters if computes_in(p.dtype, config.precision) is not p.dtype
    )
    kept = 0 if optimizer is None else trained * states
    total = homes + twins + (0 if optimizer is None else trained) + kept
    if total > config.host_budget:
        others = promised_bytes() if config.shares_host else 0
        raise BudgetError(
            f"model data at home need {total} bytes of host memory ({format_bytes(homes)} of parameters"
            + (f", {format_bytes(twins)} for them in {config.precision}" if twins else "")
            + (
                f", {format_bytes(trained)} of gradients, {format_bytes(kept)} of optimizer states"
                if optimizer is not None
                else ""
            )
            + f"), host_budget is {config.host_budget} bytes"
            + (
                f" (what is free, less {format_bytes(others)} that other managed models will take)"
                if others
                else ""
            )
            + f": raise it to at least {total} bytes ({format_bytes(total)})"
            + (", or use an optimizer with fewer states" if kept else "")
        )
    # Gradients are cut from slabs of whole pages.
    pages = sum(-p.numel() * p.element_size() % mmap.PAGESIZE for _, p in parameters if p.requires_grad)
    # Without an optimizer there may be none: they refuse no budget, but activations leave them room.
    return total + pages + (trained if optimizer is None else 0)


def check_step(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's size ``optimizer`` keeps. Raises `ManageError` if it says that it steps
    parameters independently, and draws random numbers."""
    traits = probe_step(optimizer)
    if traits.draws and may_be_tried(optimizer):
        raise ManageError(
            f"{type(optimizer).__name__} says {DECLARATION}, and its step draws random numbers: made later, updates "
            "would draw others than unmanaged. Do not say it of an optimizer that draws: it is stepped whole then, at "
            "once, with the same numbers"
        )
    return traits.states


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Of ``model``, each once; none of what is no module, which `check_manageable` refuses."""
    return list(model.named_parameters()) if isinstance(model, nn.Module) else []
