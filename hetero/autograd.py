"""Where autograd is."""

import torch

__all__ = ["in_backward"]


def in_backward() -> bool:
    """The calling thread runs a node of autograd's engine."""
    return torch._C._current_graph_task_id() != -1
