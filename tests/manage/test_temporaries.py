"""What an update on the device allocates for a while is no more than is kept free for it."""

import itertools

import pytest
import torch
from twins import device

from hetero.stm.temporaries import temporaries

NUMBERS = 1 << 16


def _optimizers():
    """Settings of SGD that change what its kernels allocate, and of Adam those with the most."""
    for foreach, fused, decay, momentum, nesterov, maximize, lr in itertools.product(
        (None, False, True), (None, True), (0.0, 0.1), (0.0, 0.9), (False, True), (False, True), (0.1, None)
    ):
        if (nesterov and not momentum) or (fused and foreach) or (lr is None and foreach is not False):
            continue
        yield (
            torch.optim.SGD,
            {
                "lr": torch.tensor(0.1) if lr is None else lr,
                "weight_decay": decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "maximize": maximize,
                "foreach": foreach,
                "fused": fused,
            },
        )
    for kind, foreach, decay in itertools.product(
        (torch.optim.Adam, torch.optim.AdamW), (None, False, True), (0.0, 0.1)
    ):
        yield kind, {"lr": 0.1, "amsgrad": True, "weight_decay": decay, "foreach": foreach}


@pytest.mark.parametrize(("kind", "settings"), list(_optimizers()))
def test_an_update_on_the_device_takes_no_more_than_is_kept_free(kind, settings):
    target = device()
    parameter = torch.nn.Parameter(torch.randn(NUMBERS).to(target))
    optimizer = kind([parameter], **settings)
    for step in range(3):
        parameter.grad = torch.randn(NUMBERS).to(target)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        optimizer.step()
        peak = torch.accelerator.max_memory_allocated() - before
        if step:  # the first one makes states as well
            small = 64 << 10  # numbers, rounded up to blocks
            assert peak <= temporaries(optimizer) * parameter.nbytes + small
