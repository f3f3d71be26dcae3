"""A small model with what checkpoints trip over, a loop that resumes, and a script for processes without hetero.

Tied weights, buffers that are saved and one that is not, dropout (so the random state counts), a frozen parameter.
Imports torch only.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 96
WIDTH = 48


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        scores: torch.Tensor = self.head(self.norm(x.flatten(0, 1)))
        return scores


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


class Job:
    """A training run that can be saved and resumed."""

    def __init__(self, device: torch.device, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = Net()
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=20)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)

    def step(self) -> float:
        tokens = torch.randint(VOCABULARY, (4, 9)).to(self.device)
        loss = F.cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "device_rng": torch.get_device_module(self.device).get_rng_state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["rng"])
        torch.get_device_module(self.device).set_rng_state(saved["device_rng"])


def plain_steps(saved: dict[str, Any], count: int = 3) -> list[float]:
    """Losses of a plain model and optimizer on the host that go on from ``saved``."""
    model = Net()
    optimizer = adamw(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.manual_seed(7)
    losses = []
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (4, 9))
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    loaded = torch.load(sys.argv[1], weights_only=True, map_location="cpu")
    print([loss.hex() for loss in plain_steps(loaded)])
    assert not [name for name in sys.modules if name.partition(".")[0] == "hetero"]
