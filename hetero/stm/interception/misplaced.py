"""Tensors on the host that a managed forward met on its way.

Owns what is said of them. Invariant: torch's own error is raised, with a note that names what lies on the host and the
cure; nothing is moved, because some arguments belong there (lengths of packed sequences).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hetero.stm.interception.parameter import is_managed

__all__ = ["note_misplaced"]

_MOST = 4


def note_misplaced(
    error: RuntimeError,
    model: nn.Module,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Add a note to ``error``, raised in a call of ``model``, which computes on ``device``, with these arguments, if it
    is about devices."""
    text = str(error)
    if "same device" not in text and "should be the same" not in text:
        return
    arguments = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    given = [
        f"argument {path}"
        for name, argument in arguments.items()
        for path, value in _tensors(argument, name)
        if value.is_cpu and value.dim()
    ]
    added = [
        f"parameter {name} (not managed: it came after hetero.manage, or by functional_call)"
        for name, parameter in model.named_parameters()
        if not is_managed(parameter) and parameter.is_cpu
    ]
    added += [f"buffer {name}" for name, buffer in model.named_buffers() if buffer.is_cpu]
    found = [*given, *added]
    if not found:
        return
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    cures = ["move inputs to manager.device"] if given else []
    if added:
        cures.append(
            "put what was added to the model, or is given to functional_call, on manager.device, or close(), add it "
            "and manage again"
        )
    error.add_note(
        f"hetero: {type(model).__name__} computes on {device}; on the host lie "
        f"{', '.join(found[:_MOST])}{more}: {'; '.join(cures)}"
    )


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _tensors(item, f"{path}[{place}]")
