"""Models whose memory depends on values: what was measured of an iteration is no bound for the next one."""

import pytest
import torch
from accelerators import GAPS
from torch import nn
from twins import assert_twins, device

import hetero
from hetero.stm.interception.parameter import managed_in
from hetero.stm.running.byvalues import depends_on_values

WIDTH, ROWS = 64, 256


class Masked(nn.Module):
    """As with experts that tokens are sent to; ``share`` of the rows, which nothing but values tells."""

    def __init__(self, share):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.share = share

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            taken = torch.arange(len(x), device=x.device) < self.share * len(x)
            x = x + x[taken].sin().exp().tanh().mean(0)
        return x


def growing(model, optimizer, target):
    seen = []
    for step in range(8):
        if isinstance(model, Masked):
            model.share = 1.0 if step % 3 == 2 else 0.1 + step / 20
        loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.8])
def test_a_mask_that_takes_more_each_time_does_not_pass_the_budget(share):
    assert_twins(lambda: Masked(0.1), growing, share=share)


@pytest.mark.parametrize("share", [0.7, 0.8, 0.9])
def test_nor_does_a_matrix_exponential_whose_matrix_grows(share):
    """It begins with that of zero, for which one product is enough."""

    assert_twins(orthogonal, growing, share=share)


def orthogonal():
    layers = [nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)) for _ in range(5)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.GELU())])


@pytest.mark.parametrize("share", [0.6, 0.7])
def test_what_has_grown_within_an_operator_comes_to_be_planned(share):
    unplanned = []

    def loop(model, optimizer, target):
        seen = []
        for _ in range(24):
            loss = model(torch.randn(ROWS, WIDTH).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            if manager := next((tensor.owner for tensor in managed_in(optimizer)), None):
                unplanned.append(manager.collector.total.unplanned_fetches)
        return seen

    assert_twins(orthogonal, loop, share=share)
    # Four iterations until it is planned, and at most as many that lose a fetch as there are parameters.
    known = 4 + len(list(orthogonal().parameters()))
    assert unplanned[known] == unplanned[-1]
    assert unplanned[-1] > 0 or GAPS  # else memory never ran short


def test_such_iterations_are_guarded_and_others_are_not():
    for model, is_guarded in ((Masked(0.5), True), (nn.Sequential(*Masked(0.5).layers), False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        with hetero.manage(model, optimizer, device=device(), device_budget="512KiB") as manager:
            growing(model, optimizer, manager.device)
            plan = manager._stm.plans.last
            assert plan.by_values is is_guarded
            loss = model(torch.randn(ROWS, WIDTH).to(manager.device)).square().mean()
            assert manager._stm.executor.is_guarded is is_guarded
            loss.backward()
            assert manager._stm.executor.is_guarded is is_guarded


def test_which_operators_depend_on_values():
    ops, x, mask = torch.ops.aten, torch.ones(4), torch.ones(4, dtype=torch.bool)
    assert depends_on_values(ops.nonzero.default, (x,))
    assert depends_on_values(ops.linalg_matrix_exp.default, (torch.eye(2),))
    assert depends_on_values(ops.index.Tensor, (x, [None, mask]))
    assert depends_on_values(ops.index_put_.default, (x, [mask], x))
    assert not depends_on_values(ops.index.Tensor, (x, [torch.arange(2)]))
    assert not depends_on_values(ops.mul.Tensor, (x, mask))
