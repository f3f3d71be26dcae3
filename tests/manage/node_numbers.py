"""Which of two threads that number autograd's nodes is ahead, said by the test and not by what ran before."""

import torch

_LEAD = 100_000  # more nodes than a test makes


def _count_to(number: int) -> int:
    """Make nodes on the calling thread until their numbers have come so far; returns how far that is."""
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        while (reached := leaf.view(1).grad_fn._sequence_nr()) < number:
            for _ in range((number - reached) // 2):
                leaf.view(1)
    return reached


class _InBackward(torch.autograd.Function):
    """Its backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


def number_apart(target: torch.device, backwards_higher: bool) -> None:
    """Let nodes that backward makes (``create_graph=True``) have higher numbers than forward's, or lower ones.

    Autograd takes nodes by their numbers, and each thread counts its own. Where the counts pass each other is the
    history's: two unmanaged runs in one process differ in the last bit (docs/limits.md)."""
    numbers = []

    def in_backward(number: int) -> None:
        _InBackward.apply(
            torch.zeros(1, device=target, requires_grad=True), lambda: numbers.append(_count_to(number))
        ).sum().backward()

    if backwards_higher:
        in_backward(_count_to(0) + _LEAD)
    else:
        in_backward(0)
        _count_to(numbers[0] + _LEAD)
