"""Which of two threads that number autograd's nodes is ahead, said by the test and not by what ran before."""

import torch


class _ManyNodes(torch.autograd.Function):
    """Its backward makes many nodes of a graph."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            for _ in range(100_000):
                gradient.requires_grad_().view_as(gradient)
        return gradient


def number_apart(target: torch.device, backwards_higher: bool) -> None:
    """Let nodes that backward makes (``create_graph=True``) have higher numbers than forward's, or lower ones.

    Autograd takes nodes by their numbers, and each thread counts its own. Where the counts pass each other is the
    history's: two unmanaged runs in one process differ in the last bit (docs/limits.md)."""
    x = torch.zeros(1, device=target, requires_grad=True)
    if backwards_higher:
        _ManyNodes.apply(x).sum().backward()
    else:
        _ManyNodes.backward(None, x.detach())
