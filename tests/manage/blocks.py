"""Residual blocks whose activations take far more than their weights."""

import torch
import torch.nn.functional as F
from accelerators import device
from torch import nn

import hetero

WIDTH = 64
ROWS = 512  # activations take far more than weights


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def deep(depth=6, width=WIDTH):
    return nn.Sequential(*[Block(width) for _ in range(depth)])


def steps(model, optimizer, target, count=4, rows=ROWS):
    seen = []
    for _ in range(count):
        loss = model(torch.randn(rows, WIDTH).to(target)).square().mean()
        loss.backward()
        seen.append([loss.detach(), *[p.grad for p in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def manage_for(model, budget="16MiB", optimizer=None, **keywords):
    return hetero.manage(model, optimizer, device=device(), device_budget=budget, **keywords)


def shed_all(manager):
    """All saved tensors that can leave do; returns how many bytes."""
    with manager._stm.lock:
        return manager._stm.activations.shed(1 << 60)
