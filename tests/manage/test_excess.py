"""Blocks of the allocator that are larger than what was asked for: whether they are depends on where others lie, and is
another matter in each iteration."""

from types import SimpleNamespace

import pytest
import torch
from accelerators import in_segments
from bits import same_bits
from torch import nn
from twins import managed, unmanaged

from hetero.devices import LARGEST_WITHOUT_EXCESS, Accelerator
from hetero.stm.running.backlog import Backlog

MIB = 1 << 20


@pytest.fixture
def target():
    with in_segments() as found:
        yield found


def block(target, mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device=target)


def test_what_was_not_asked_for_is_told_apart(target):
    accelerator = Accelerator(target)
    _, before = accelerator.asked_bytes()
    hole, beside = block(target, 14), block(target, 14)  # a segment for each
    del hole
    accelerator.reset_peak()
    found, small = block(target, 13.25), block(target, 0.3)
    assert accelerator.asked_bytes()[1] == accelerator.peak_excess_bytes() == before + 0.75 * MIB
    del found
    assert accelerator.asked_bytes()[1] == before
    assert accelerator.peak_excess_bytes() == before + 0.75 * MIB
    del beside, small


@pytest.mark.parametrize(("known", "expected"), [(0, [100, 100, 93, 93]), (None, [93, 93, 91, 91])])
def test_only_a_large_copy_has_it_measured_again(known, expected):
    sizes = [LARGEST_WITHOUT_EXCESS, LARGEST_WITHOUT_EXCESS + 512, 512, 512]
    limits, measured = [], iter([7, 9, 11])

    def prefetch(tensor, *, limit):
        limits.append(limit)
        return True

    tensors = [SimpleNamespace(device_nbytes=nbytes, is_resident=False) for nbytes in sizes]
    backlog = Backlog(tensors, SimpleNamespace(prefetch=prefetch), None)
    backlog.prefetch((0, 1, 2, 3), 100, known, lambda: next(measured))
    assert limits == expected


class Block(nn.Module):
    """Weights of 0.75, 2.25 and 3 MiB: one that has left makes room for a smaller one, and more."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        a, b, c = self.mix(x).chunk(3, dim=-1)
        x = x + self.out(a * b.sigmoid() + c)
        return x + self.down(nn.functional.gelu(self.up(x)))


# With the smaller budgets some fetch finds no room but for what it knows of excess.
@pytest.mark.parametrize(("width", "mib"), [(448, 26), (448, 18), (480, 18), (480, 22), (512, 18), (512, 20)])
@pytest.mark.usefixtures("target")
def test_a_budget_holds_and_copies_come_as_planned(width, mib):
    def build():
        return nn.Sequential(*(Block(width) for _ in range(6)), nn.Linear(width, 64))

    def loop(model, optimizer, target):
        torch.manual_seed(2)
        seen = []
        for _ in range(12):
            loss = model(torch.randn(48, width).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().cpu())
        return torch.stack(seen)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)

    expected, state, _ = unmanaged(build, loop, sgd)
    budget = mib * MIB
    before = torch.accelerator.memory_allocated()
    got, got_state, manager = managed(build, loop, budget, sgd, device_homes=False, speculate=False)
    assert same_bits(got, expected)
    assert all(map(same_bits, got_state, state))
    stats = manager.stats
    assert stats.peak_device_bytes <= before + budget
    assert stats.unplanned_fetches <= 12
    assert stats.bytes_moved <= 1.2 * stats.lower_bound_bytes
