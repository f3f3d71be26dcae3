"""What most tests of this folder train, and how: a small network, random inputs, loops of a few steps."""

import torch
from torch import nn


def mlp(width: int = 64, depth: int = 4) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


def batch(target, rows=8, width=64):
    return torch.randn(rows, width).to(target)


def square_loss(model, target):
    return model(batch(target)).square().mean()


def train(model, optimizer, target, steps=3, loss_of=square_loss):
    """Loss and gradients of each step; a gradient is read before the step, and again by whoever compares."""
    seen = []
    for _ in range(steps):
        loss = loss_of(model, target)
        loss.backward()
        seen.append([loss, *[p.grad for p in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def backward(model, target, rows=8):
    model(batch(target, rows)).square().mean().backward()


def two_steps(model, optimizer, target):
    """After them, everything is queued that can be."""
    for _ in range(2):
        backward(model, target)
        optimizer.step()
        optimizer.zero_grad()
