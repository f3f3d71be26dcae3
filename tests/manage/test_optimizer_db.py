"""PyTorch's own optimizer database: every optimizer, every configuration it lists for the CPU, bit for bit.

The reference is the same loop unmanaged on the CPU: the virtual device computes what the CPU computes, and a managed
optimizer steps there. Where neither ``fused`` nor ``foreach`` is given, hetero chooses the fused kernels: then it is
the same loop with ``fused=True``.
"""

import copy

import pytest
import torch
from accelerators import ON_CUDA, ON_HOST, races
from equality import as_chosen, assert_identical, device, on_host, values_of
from torch import nn
from torch_databases import optim_db

import hetero

pytestmark = pytest.mark.skipif(ON_CUDA, reason=ON_HOST)

STEPS = 5


class Net(nn.Module):
    """Parameters of one to four dimensions, one of them a scalar's neighbour (a single element)."""

    def __init__(self, *, matrices_only: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=not matrices_only)
        self.norm = nn.Identity() if matrices_only else nn.LayerNorm(10)
        self.second = nn.Linear(10, 7, bias=not matrices_only)
        self.last = nn.Linear(7, 1, bias=not matrices_only)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(self.norm(torch.relu(self.first(x))))))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 5, sparse=True)
        self.others = nn.Embedding(9, 5, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.words(x) * self.others(x % 9)).sum(-1, keepdim=True)


def configurations():
    for info in optim_db:
        for number, given in enumerate(info.optim_inputs_func(device="cpu")):
            # The database's own list leaves out the for-loop, which every optimizer has.
            for implementation in ("forloop", "foreach", "fused", "open"):
                if implementation in ("foreach", "fused") and implementation not in info.supported_impls:
                    continue
                if implementation == "fused" and "cpu" not in info.supports_fused_on:
                    continue
                keywords = {k: v for k, v in given.kwargs.items() if k not in ("foreach", "fused")}
                if implementation in ("foreach", "fused"):
                    keywords[implementation] = True
                    if keywords.get("differentiable"):
                        continue
                elif as_chosen(info.optim_cls, keywords) != keywords:
                    # "open" says nothing, and the choice is hetero's.
                    keywords |= {"foreach": False} if implementation == "forloop" else {}
                elif implementation == "open":
                    continue
                name = f"{info.optim_cls.__name__}-{number}-{implementation}"
                yield pytest.param(info, keywords, id=name)


def model_for(info) -> nn.Module:
    torch.manual_seed(0)
    if info.only_supports_sparse_grads:
        return Sparse()
    return Net(matrices_only=info.optim_cls is torch.optim.Muon)


def make(info, model, keywords):
    keywords = copy.deepcopy(keywords)  # a tensor lr is the optimizer's own
    return info.optim_cls(model.parameters(), **keywords)


def batch(info, target, step):
    generator = torch.Generator().manual_seed(100 + step)
    if info.only_supports_sparse_grads:
        return torch.randint(0, 12, (4, 3), generator=generator).to(target)
    return torch.randn(4, 6, generator=generator).to(target)


def run(info, model, optimizer, target, *, between=None, steps=STEPS):
    """What the loop showed: losses, and state_dict every other step."""
    seen = []
    for step in range(steps):
        x = batch(info, target, step)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        if info.step_requires_closure:
            seen.append(optimizer.step(closure))
        else:
            seen.append(closure())
            optimizer.step()
        if between is not None:
            between(step, seen[-1].detach().cpu())
        if step % 2:
            seen.append(optimizer.state_dict()["state"])
    return on_host([s.detach() if isinstance(s, torch.Tensor) else s for s in seen])


def dense_values_of(model):
    return {name: value.to_dense() for name, value in values_of(model).items()}


def states_of(optimizer):
    return on_host(optimizer.state_dict())


def both(info, keywords, *, after=None, steps=STEPS):
    """Run unmanaged, on the host if it computes what the device computes, and managed; the manager's step and both
    observations have been compared."""
    target = device()
    reference = target if ON_CUDA else torch.device("cpu")
    model = model_for(info).to(reference)
    optimizer = make(info, model, as_chosen(info.optim_cls, keywords))
    between = after(optimizer) if after else None
    expected = run(info, model, optimizer, reference, between=between, steps=steps)
    wanted, states = dense_values_of(model), states_of(optimizer)
    model = model_for(info)
    optimizer = make(info, model, keywords)
    with hetero.manage(model, optimizer, device=target, device_budget="1MiB") as manager:
        between = after(optimizer) if after else None
        got = run(info, model, optimizer, target, between=between, steps=steps)
        host_step = manager._host_step
    assert_identical(got, expected)
    assert_identical(dense_values_of(model), wanted)
    assert_identical(states_of(optimizer), states)
    assert list(optimizer.state_dict()["state"]) == sorted(optimizer.state_dict()["state"])
    assert races() == []
    return host_step


@pytest.mark.parametrize(("info", "keywords"), list(configurations()))
@pytest.mark.usefixtures("late_queue")
def test_every_optimizer_and_configuration(info, keywords):
    step = both(info, keywords)
    one_by_one = not (
        info.step_requires_closure or info.only_supports_sparse_grads or keywords.get("differentiable")
    )
    assert (step.queued > 0) is one_by_one


def scheduled(kind):
    def after(optimizer):
        if kind == "OneCycleLR":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * STEPS)
        elif kind == "CosineAnnealingLR":
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        else:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)

        def between(step, loss):
            scheduler.step(loss) if kind == "ReduceLROnPlateau" else scheduler.step()

        return between

    return after


def info_of(kind):
    return next(info for info in optim_db if info.optim_cls is kind)


@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize(
    ("optimizer", "keywords"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
        (
            torch.optim.Adam,
            {"lr": torch.tensor(0.01), "betas": (torch.tensor([[0.9]]), torch.tensor([[0.99]]))},
        ),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    ],
)
@pytest.mark.usefixtures("late_queue")
def test_schedulers_move_hyper_parameters_while_updates_are_queued(kind, optimizer, keywords):
    step = both(info_of(optimizer), keywords, after=scheduled(kind), steps=2 * STEPS)
    assert step.queued > 0


@pytest.mark.usefixtures("late_queue")
def test_groups_and_a_group_added_while_managed():
    def loop(target, manage):
        torch.manual_seed(0)
        model = Net()
        groups = [
            {"params": list(model.first.parameters()), "lr": 0.1},
            {"params": list(model.norm.parameters()), "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=False)
        info = info_of(torch.optim.AdamW)
        manager = hetero.manage(model, optimizer, device=target, device_budget="1MiB") if manage else None
        seen = [run(info, model, optimizer, target, steps=3)]
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.03})
        seen.append(run(info, model, optimizer, target, steps=4))
        optimizer.param_groups[0]["lr"] = 0.5
        seen.append(run(info, model, optimizer, target, steps=2))
        if manager is not None:
            assert manager._host_step.queued > 0
            manager.close()
        return on_host([seen, values_of(model), optimizer.state_dict()])

    expected = loop(torch.device("cpu"), False)
    assert_identical(loop(device(), True), expected)


@pytest.mark.usefixtures("late_queue")
@pytest.mark.parametrize("place", ["home", "device"])
def test_momentum_that_begins_later_makes_its_state_then(place, request):
    """Plain SGD keeps nothing; with momentum it does: an update that is queued makes the state."""
    if place == "device":
        request.getfixturevalue("homes_on_device")
    there = place == "device"

    def loop(target, manage):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        info = info_of(torch.optim.SGD)
        manager = None
        if manage:
            manager = hetero.manage(model, optimizer, device=target, device_budget="1MiB", device_homes=there)
        seen = [run(info, model, optimizer, target, steps=3), len(optimizer.state)]
        if manager is not None:
            assert bool(manager.plan.lives_on_device) == there
        optimizer.param_groups[0]["momentum"] = 0.9
        seen += [run(info, model, optimizer, target, steps=3), len(optimizer.state)]
        seen += [list(optimizer.state_dict()["state"]), optimizer.state_dict()]
        if manager is not None:
            assert manager._host_step.queued > 2
            manager.close()
        return on_host([seen, values_of(model)]), seen[1], seen[3], seen[4]

    expected = loop(torch.device("cpu"), False)
    got = loop(device(), True)
    assert_identical(got[0], expected[0])
    assert got[1:] == expected[1:]
