"""What most tests of this folder train, and how: a small network, random inputs, loops of a few steps."""

import torch
from torch import nn


def mlp(width: int = 64, depth: int = 4) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


class WithMore(nn.Module):
    """`mlp`, with one layer behind it where ``more`` is true."""

    def __init__(self):
        super().__init__()
        self.body, self.extra, self.more = mlp(), nn.Linear(64, 64), False

    def forward(self, x):
        x = self.body(x)
        return self.extra(x) if self.more else x


def batch(target, rows=8, width=64):
    return torch.randn(rows, width).to(target)


def square_loss(model, target):
    return model(batch(target)).square().mean()


def square_loss_of_32(model, target):
    return model(batch(target, 32)).square().mean()


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


def losses(model, optimizer, target, steps, micro_batches=1):
    """As `train`, looking at nothing but the loss."""
    seen = []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = square_loss(model, target)
            loss.backward()
            seen.append(loss)
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


ACTIONS = (
    *(
        "micro-batch",
        "micro-batch",
        "by parts",
        "step",
        "step",
        "clip",
        "clip value",
        "zero",
        "zero in place",
        "read",
        "read gradient",
    ),
    *(
        "write",
        "write data",
        "eval",
        "state",
        "hold",
        "let go",
        "freeze",
        "other step",
        "lr",
        "scale gradients",
        "scaled step",
        "overflow",
    ),
)


def two_optimizers(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    optimizer.other = torch.optim.SGD(list(model.parameters())[:3], lr=1e-2, foreach=False)
    return optimizer


def mixed_loop(actions):
    """A loop that does these `ACTIONS`, in this order."""

    def loop(model, optimizer, target):
        seen = []
        held = []
        scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=2)
        two_steps(model, optimizer, target)
        parameters = list(model.parameters())
        for number, action in enumerate(actions):
            chosen = parameters[number % len(parameters)]
            with torch.no_grad():
                if action == "micro-batch":
                    with torch.enable_grad():
                        loss = model(batch(target)).square().mean()
                        loss.backward()
                    seen.append(loss)
                elif action == "by parts":
                    with torch.enable_grad():
                        x = batch(target)
                        for part in model:
                            x = part(x)
                        loss = x.square().mean()
                        loss.backward()
                    seen.append(loss)
                elif action == "step":
                    optimizer.step()
                elif action == "clip":
                    seen.append(torch.nn.utils.clip_grad_norm_(parameters, 1e-2))
                elif action == "clip value":
                    if any(p.grad is not None for p in parameters):  # torch's raises for none
                        torch.nn.utils.clip_grad_value_(parameters, 1e-3)
                elif action == "zero":
                    optimizer.zero_grad()
                elif action == "zero in place":
                    optimizer.zero_grad(set_to_none=False)
                elif action == "read":
                    seen.append(chosen.detach().clone())
                elif action == "read gradient":
                    seen.append(None if chosen.grad is None else chosen.grad.clone())
                elif action == "write":
                    chosen.mul_(0.9)
                elif action == "write data":
                    chosen.data.add_(0.01)
                elif action == "eval":
                    seen.append(model(batch(target, 4)))
                elif action == "state":
                    seen.append(optimizer.state[chosen].get("step", torch.zeros(())).clone())
                elif action == "hold":
                    held.append((chosen.data, chosen.grad))
                elif action == "let go":
                    seen += [[d.clone(), None if g is None else g.clone()] for d, g in held]
                    held.clear()
                elif action == "freeze":
                    chosen.requires_grad_(not chosen.requires_grad)
                elif action == "other step":
                    optimizer.other.step()
                elif action == "lr":
                    optimizer.param_groups[0]["lr"] *= 0.7
                elif action in ("scaled step", "overflow"):
                    with torch.enable_grad():
                        loss = model(batch(target)).square().mean()
                        scaler.scale(loss * (float("inf") if action == "overflow" else 1.0)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    seen.append([loss, scaler.get_scale()])
                elif action == "scale gradients":
                    for p in parameters:
                        if p.grad is not None:
                            p.grad.mul_(0.5)
        return seen

    return loop
