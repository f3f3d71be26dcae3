"""Where autograd is, and in what mode."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["in_backward", "outside_inference", "recording", "saving_hooks"]

saving_hooks: Callable[[bool], tuple[Any, Any] | None] = vars(torch._C._autograd)[
    "_top_saved_tensors_default_hooks"
]
"""The innermost ``saved_tensors_hooks`` on this thread, or None; given True, also while something is traced."""


def in_backward() -> bool:
    """The calling thread runs a node of autograd's engine."""
    return torch._C._current_graph_task_id() != -1


def outside_inference() -> contextlib.AbstractContextManager[None]:
    """Within it, tensors are made that can be trained with later, in whatever mode the caller is. Whether gradients are
    recorded is to be said as well, where it matters. ``torch.inference_mode(False)`` takes microseconds, for each
    tensor that moves, and is entered only below autograd; forward-mode AD is otherwise as the caller has it."""
    return torch.inference_mode(False) if _is_excluded(_AUTOGRAD) else _NOTHING


def recording() -> contextlib.AbstractContextManager[None]:
    """``torch.enable_grad()``, where it is not so already."""
    return _NOTHING if torch.is_grad_enabled() else torch.enable_grad()


# In inference mode, and in modes that handle operators.
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_NOTHING = contextlib.nullcontext()
