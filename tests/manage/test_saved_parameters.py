"""Saved parameters come back through a view that is kept from one backward to the next."""

import pytest
import torch
from torch import nn
from twins import device

import hetero

WIDTH = 16


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x, other):
        return torch.mm(x, self.weight.t() if other else self.weight)


def saved(model, x, *, other=True):
    """A graph, and the parameter as that graph has saved it."""
    y = model(x, other)
    return y, y.grad_fn._saved_mat2


@pytest.mark.parametrize("other", [True, False])
def test_who_holds_what_backward_reads_holds_the_copy(other):
    target = device()
    torch.manual_seed(0)
    model = Linear()
    x = torch.randn(4, WIDTH).to(target).requires_grad_()
    with hetero.manage(model, None, device=target, device_budget="1MiB") as manager:
        tensor = manager._stm.tensors[0]
        y, seen = saved(model, x, other=other)
        assert tensor.is_held()
        values = seen.cpu()
        manager._stm.relief.relieve()
        assert tensor.is_resident
        assert torch.equal(seen.cpu(), values)
        del seen
        assert not tensor.is_held()
        y.sum().backward()
        del y
        assert not tensor.is_held()
        manager._stm.relief.relieve()
        assert not tensor.is_resident


def test_what_somebody_makes_of_a_saved_parameter_stays_theirs():
    target = device()
    torch.manual_seed(0)
    model = Linear()
    model.weight.mul_(8).round_()  # sums of whole numbers are exact, whichever kernel makes them
    want = model.weight.detach().clone()
    x = torch.randn(4, WIDTH).to(target).requires_grad_()
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        for edit in (lambda t: None, lambda t: t.requires_grad_(), lambda t: setattr(t, "data", t + 1)):
            for other, expected in ((True, want), (False, want.t())):
                for _ in range(6):  # the last of them follow the plan
                    y, seen = saved(model, x, other=other)
                    edit(seen)
                    y.sum().backward()
                    assert torch.equal(x.grad.cpu(), torch.ones(4, WIDTH) @ expected)
                    x.grad = None
