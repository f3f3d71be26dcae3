"""Gradient accumulation, clipping, a learning-rate schedule and an evaluation pass, all as without hetero.

Run it: ``python examples/train_accumulate.py``.
"""

import torch
from torch import nn
from torch.nn import functional

import hetero

MICRO_BATCHES = 4


def main() -> None:
    torch.manual_seed(0)
    virtual = None if torch.accelerator.is_available() else hetero.virtual_device(memory="64MiB")
    budget = "10MiB" if virtual else "74MiB"  # on a GPU, cuBLAS alone keeps up to 64 MiB
    layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)

    with hetero.manage(model, optimizer, device=virtual, device_budget=budget) as manager:
        inputs = torch.randn(MICRO_BATCHES, 4, 16, 128, device=manager.device)
        targets = torch.randint(10, (MICRO_BATCHES, 4 * 16), device=manager.device)
        for step in range(6):
            model.train()
            total = 0.0
            for x, y in zip(inputs, targets, strict=True):
                loss = functional.cross_entropy(model(x).flatten(0, 1), y) / MICRO_BATCHES
                loss.backward()
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            model.eval()
            with torch.no_grad():
                right = (model(inputs[0]).flatten(0, 1).argmax(-1) == targets[0]).float().mean()
            rate = scheduler.get_last_lr()[0]
            print(f"step {step}: loss {total:.4f}, norm {norm:.3f}, rate {rate:.4f}, right {right:.0%}")
        stats = manager.stats

    print(f"budget {stats.device_budget:,} bytes, peak {stats.peak_device_bytes:,}")


if __name__ == "__main__":
    main()
