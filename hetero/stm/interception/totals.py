"""Norms of gradients that lie in several places, in the order in which torch would take them in one.

Owns the order, and where the norm of those norms is taken. Invariant: a total has the bits of the unmanaged run (but
for norms that `hetero.stm.gradients.access` has to take at home), also if only some of its gradients are managed ones
(a parameter of the loss or a head that was added later is clipped with the model), or if those are of several managers,
one of which has settled.

[Note: order of norms]
The norm of norms depends on their order, in its last bit. torch takes norms by groups, of one device and type each, so
a list of which a part is at home would be two groups where unmanaged it is one. Groups are therefore made of where each
gradient would be unmanaged. Each norm is taken where its gradient is; of one at home on the device, from a copy, where
it might have other bits at home (`hetero.stm.gradients.access`, [Note: norms where they round alike]).
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch.utils._foreach_utils import _device_has_foreach_support, _group_tensors_by_device_and_dtype

from hetero.devices import Accelerator, norms_depend_on
from hetero.stm.gradients.norms import norms_of_group
from hetero.stm.interception.foldable import foldable, foldable_parts
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.neighbours import make_room, managed_devices
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.hostcopies import is_at_home

__all__ = ["gradient_norms", "norms_of"]


def gradient_norms(
    parameters: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor | None:
    """Of these parameters' gradients, in a vector. None if torch's own way has the same bits: none is managed."""
    tensors = foldable(parameters) if foreach is None else []
    if tensors:
        return tensors[0].owner.gradient_access.norms(tensors, norm_type)
    with plain():  # looks at gradients, neither reading nor holding them
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not any(map(is_managed, parameters)) or not all(map(_is_flat, parameters)):
            return None
        places = [_place_of_gradient(parameter) for parameter in parameters]
    norms: dict[int, torch.Tensor] = {}
    for tensors in foldable_parts(parameters) if foreach is None else []:
        taken = tensors[0].owner.gradient_access.norms(tensors, norm_type).to(places[0].device)
        norms.update(zip([id(tensor.parameter) for tensor in tensors], taken.unbind(), strict=True))
    rest = [(p, place) for p, place in zip(parameters, places, strict=True) if id(p) not in norms]
    gradients = [(cast(torch.Tensor, parameter.grad), place) for parameter, place in rest]
    others = _norms(gradients, norm_type, foreach, places[0].device)
    norms.update(zip([id(parameter) for parameter, _ in rest], others, strict=True))
    return _in_order([norms[id(parameter)] for parameter in parameters], places)


def norms_of(tensors: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor | None:
    """Of these tensors, which may be gradients that were looked at, likewise. None also if all of them are at home, and
    have the same norms there."""
    if not any(map(is_at_home, tensors)):
        return None
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if not devices:
        devices = {device for device in managed_devices() if norms_depend_on(device, norm_type)}
    if len(devices) != 1:
        return None
    (device,) = devices
    places = [_place(tensor, device if is_at_home(tensor) else tensor.device) for tensor in tensors]
    pairs = list(zip(tensors, places, strict=True))
    return _in_order(_norms(pairs, norm_type, foreach, places[0].device), places)


def _is_flat(parameter: torch.Tensor) -> bool:
    """Its gradient is not sparse: torch refuses those, in words of its own."""
    return parameter.grad is not None and parameter.grad.layout is torch.strided


def _place_of_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return _place(gradient, managed_of(parameter).owner.device if is_managed(parameter) else gradient.device)


def _place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Stands for ``tensor`` where it would be unmanaged; without numbers, so without memory."""
    return torch.empty(0, dtype=tensor.dtype, device=device)


def _norms(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    norm_type: float,
    foreach: bool | None,
    device: torch.device,
) -> list[torch.Tensor]:
    """Of each tensor, which would be in the place beside it; all of them are on ``device`` then, where torch takes the
    total."""
    found: list[torch.Tensor | None] = [_norm_of_copy(*pair, norm_type, foreach) for pair in pairs]
    rest = [index for index, norm in enumerate(found) if norm is None]
    for group in _groups([pairs[index][0] for index in rest]):
        taken = _take_norms([pairs[rest[index]][0] for index in group], norm_type, foreach)
        for index, norm in zip(group, taken, strict=True):
            found[rest[index]] = norm
    norms = cast(list[torch.Tensor], found)
    for group in _groups(norms):  # together: each by itself would take a block of the device
        moved = torch.stack([norms[index] for index in group]).to(device).unbind()
        for index, norm in zip(group, moved, strict=True):
            norms[index] = norm
    return norms


def _norm_of_copy(
    tensor: torch.Tensor, place: torch.Tensor, norm_type: float, foreach: bool | None
) -> torch.Tensor | None:
    """Of one at home, on the host; None where none is needed, or finds room on the device."""
    if tensor.device == place.device or not norms_depend_on(place.device, norm_type):
        return None
    if not make_room(place.device, tensor.nbytes + place.element_size()):
        return None
    try:
        (norm,) = _take_norms([tensor.to(place.device)], norm_type, foreach)
        return norm.cpu()
    except torch.OutOfMemoryError:  # within the budget, but no gap is large enough
        Accelerator(place.device).note_answered()
        return None


def _in_order(norms: list[torch.Tensor], places: list[torch.Tensor]) -> torch.Tensor:
    """[Note: order of norms]."""
    return torch.stack([norms[index] for indices in _groups(places) for index in indices])


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Those of one device and type each, by index, in torch's order."""
    if not tensors:
        return []
    groups = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return [indices for _, indices in groups.values()]


def _take_norms(tensors: list[torch.Tensor], norm_type: float, foreach: bool | None) -> list[torch.Tensor]:
    """As `norms_of_group`, where torch would not refuse."""
    device = tensors[0].device
    if foreach and not _device_has_foreach_support(device):
        raise RuntimeError(f"foreach=True was passed, but can't use the foreach API on {device.type} tensors")
    return norms_of_group(tensors, norm_type, foreach=foreach)
