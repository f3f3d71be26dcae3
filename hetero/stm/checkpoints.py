"""What loading and exporting may not do to a managed model.

Owns the refusals. Everything else about checkpoints needs nothing of ours: ``state_dict()`` gives plain tensors of
homes, loading copies into homes, and states that are loaded go home (`hetero.stm.step.hoststep`).
"""

import torch
from torch import nn

from hetero.errors import ManageError
from hetero.stm.settled.who import record_of

__all__ = ["check_loads_in_place", "refuse_export"]


def check_loads_in_place(module: nn.Module, *, assign: bool) -> None:
    """Refuse to put other tensors in the place of managed parameters: the manager, and the optimizer as well, would go
    on with those that the model no longer has. Raises `ManageError`; nothing has been loaded."""
    managed = [tensor.name for p in module.parameters() if (tensor := record_of(p)) is not None]
    if not managed:
        return
    way = "assign=True" if assign else "torch.__future__.set_swap_module_params_on_conversion(True)"
    raise ManageError(
        f"{type(module).__name__}.load_state_dict with {way} would replace {len(managed)} managed parameters "
        f"({managed[0]} first), which the optimizer would not see: load in "
        "place, which is the default and needs no device memory, or call manager.close() first, load, make the "
        "optimizer, and manage again"
    )


def refuse_export(name: str, device: torch.device, *, way: str) -> ManageError:
    """The error for ``torch.export.export`` or ``torch.jit.trace``, the ``way``, of a managed model."""
    return ManageError(
        f"{way} of {name} while managed: its parameters are at home on the host, its buffers on {device}, and a "
        f"program cannot hold both. Export a copy: {way}(copy.deepcopy(model).cpu(), ...), or call "
        "manager.close() first"
    )
