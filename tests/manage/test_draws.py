"""Random numbers of what is tried again."""

import pytest
import torch
from accelerators import ON_CUDA, SEGMENTS, set_memory_limit
from loops import mlp
from torch import nn
from torch.nn import functional
from twins import assert_twins


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = mlp(depth=1)
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.5, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.attention(x, x, x)[0]


@pytest.mark.skipif(
    ON_CUDA or SEGMENTS, reason="memory that is short for one operator needs a cap on what is in use"
)
def test_a_function_that_ran_out_of_memory_after_it_drew_draws_the_same_again(monkeypatch):
    drawn, dropout = [], functional.dropout

    def scarce(*args, **kwargs):
        result = dropout(*args, **kwargs)
        drawn.append(result)
        if fails:
            fails.clear()
            set_memory_limit(torch.accelerator.memory_allocated())
        return result

    monkeypatch.setattr(functional, "dropout", scarce)
    fails = []

    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            drawn.clear()
            fails[:] = [True] if step == 4 and fail else []
            loss = model(torch.randn(4, 16, 64).to(target)).square().mean()
            set_memory_limit("256MiB")
            seen.append([loss, drawn[0]])
            if fail:
                assert len(drawn) == (2 if step == 4 else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    runs = iter([False, True])

    def build():
        nonlocal fail
        fail = next(runs)  # unmanaged, then managed
        return Attending()

    fail = False
    assert_twins(build, loop, share=0.6)
