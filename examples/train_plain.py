"""A plain training loop whose model data do not fit the device. One line is hetero's.

Run it: ``python examples/train_plain.py``. Without an accelerator it makes a virtual one.
"""

import torch
from torch import nn
from torch.nn import functional

import hetero


def main() -> None:
    torch.manual_seed(0)
    virtual = None if torch.accelerator.is_available() else hetero.virtual_device(memory="16MiB")
    budget = "8MiB" if virtual else "72MiB"  # on a GPU, cuBLAS alone keeps up to 64 MiB
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)), nn.Linear(512, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    manager = hetero.manage(model, optimizer, device=virtual, device_budget=budget)

    inputs, targets = torch.randn(64, 512), torch.randint(10, (64,))
    for step in range(10):
        optimizer.zero_grad()
        scores = model(inputs.to(manager.device))
        loss = functional.cross_entropy(scores, targets.to(manager.device))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    print(manager.stats)
    manager.close()  # the model is plain again: same parameters, on the host
    print(f"closed; the first weight is on {next(model.parameters()).device}")


if __name__ == "__main__":
    main()
