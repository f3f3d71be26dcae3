"""When autograd's thread of a device holds nothing any more of backwards that are over.

The caller of a backward has its result, or its error, before that thread lets go of the task that failed, with its
node, gradients and the error's frames, of the tasks behind it, and of the gradients that were returned. On a busy
machine that takes many milliseconds, and what is measured meanwhile counts them.
"""

import threading

import torch

__all__ = ["wait_for_backward_ends"]


def wait_for_backward_ends(device: torch.device) -> None:
    """Returns when the thread has let go. What cycles then hold (errors and frames) is left to `gc.collect`."""
    # Tasks of one queue run by their sequence number, the highest first, and those are counted per thread: the first
    # node of a new thread runs when nothing else is left.
    thread = threading.Thread(target=_run_last, args=(device,))
    thread.start()
    thread.join()


def _run_last(device: torch.device) -> None:
    # Tensors of no bytes, so that this one's end does not matter; not by `torch.autograd`, which managers watch.
    x = torch.empty(0, device=device, requires_grad=True)
    y = x.clone()
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (torch.empty(0, device=device),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
