"""Whoever shares memory with parameters when management begins.

Owns the search. Homes are new memory, so that an alias from before (an optimizer that has taken ``p.data``, a
``state_dict()``) follows its parameter no longer, as after ``model.to(device)``.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from hetero.devices import storage_of
from hetero.stm.tensors.exposure import memory_is_private
from hetero.stm.tensors.instances import instances_of
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["aliased"]


def aliased(model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of ``parameters`` whose memory another tensor has as well, that Python knows of and that is neither another
    of them nor a buffer."""
    names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters}
    tensors = [*(parameter for _, parameter in parameters), *model.buffers()]
    known = Counter(s._cdata for tensor in tensors if (s := storage_of(tensor)) is not None)
    if all(memory_is_private(p, known[p.untyped_storage()._cdata] - 1) for _, p in parameters):
        return []
    # Where a manager's end was cut off, an error's frames may have its records.
    homes = [record.home for record in instances_of(ManagedTensor)]
    left = {id(tensor) for home in homes for tensor in (home, home._base)}
    ours = {id(tensor) for tensor in tensors} | left | _made_anew(model)
    found = set()
    for tensor in instances_of(torch.Tensor):
        if id(tensor) not in ours and (storage := storage_of(tensor)) is not None:
            found.add(storage._cdata)
    return [name for storage, name in names.items() if storage in found]


def _made_anew(model: nn.Module) -> set[int]:
    """Ids of what hooks of old (``torch.nn.utils.spectral_norm``) make from a parameter before each forward."""
    return {
        id(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if f"{name}_orig" in module._parameters
    }
