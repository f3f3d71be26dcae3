"""What is left when management is over: optimizer states with their parameters, and nothing of ours."""

import gc
import weakref

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from equality import fresh_memory
from loops import backward, mlp
from our_calls import our_calls
from twins import device

import hetero


def keeping_the_loss(model, optimizer, target, steps):
    """As most loops are written: the last loss is still there when the next forward runs."""
    for _ in range(steps):
        loss = model(torch.ones(4, 64).to(target)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("budget", ["768KiB", "64MiB"], ids=["tight", "all fits"])
@pytest.mark.parametrize("keeps", [True, False], ids=["loss kept", "loss dropped"])
def test_a_model_whose_loop_is_over_is_freed(closes, budget, keeps):
    def life():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        manager = hetero.manage(model, optimizer, device=target, device_budget=budget)
        loss = keeping_the_loss(model, optimizer, target, 8)
        assert (manager.stats.settled_forwards > 0) == (budget == "64MiB")
        if not keeps:
            del loss
        if closes:
            manager.close()
        return [weakref.ref(value) for value in (model, optimizer, *model.parameters())]

    target = device()
    gc.collect()
    before = torch.accelerator.memory_allocated()  # of libraries
    left = life()
    for _ in range(3):  # what a finalizer lets go of is found by the next one
        gc.collect()
    assert [reference() for reference in left] == [None] * len(left)
    assert torch.accelerator.memory_allocated() == before


def test_hooks_of_the_time_when_all_fitted_are_gone_from_parameters():
    target = device()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=target, device_budget="64MiB") as manager:
        keeping_the_loss(model, optimizer, target, 8)
        assert manager.stats.settled_forwards > 0
    weight = model[0].weight
    held = weakref.ref(manager)
    del manager
    gc.collect()
    assert held() is None
    model(torch.ones(4, 64)).sum().backward()
    seen = weight.grad
    model(torch.ones(4, 64)).sum().backward()
    assert weight.grad is seen  # accumulated in place, as where no hook replaces it


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("budget", ["768KiB", "64MiB"], ids=["tight", "all fits"])
def test_new_states_go_where_their_parameter_is(fused, budget):
    target = device()
    fresh_memory()
    model = mlp().to(target)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        keeping_the_loss(model, optimizer, target, 5)
    for parameter in model.parameters():
        entry = optimizer.state[parameter]
        assert parameter.device == target
        assert entry["exp_avg"].device == entry["exp_avg_sq"].device == target
        assert entry["step"].device == (target if fused else torch.device("cpu"))
    backward(model, target)
    optimizer.step()  # raises where they are apart


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_states_that_were_kept_on_the_host_go_back_there():
    target = device()
    model = torch.nn.Linear(8, 8).to(target)

    class StatesAtHome(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                entry = self.state[parameter]
                entry.setdefault("sum", torch.zeros(parameter.shape))
                entry["sum"] += parameter.grad.cpu()

    optimizer = StatesAtHome(model.parameters())
    model(torch.ones(2, 8).to(target)).sum().backward()
    optimizer.step()
    with hetero.manage(model, optimizer, device=target, device_budget="16MiB"):
        model(torch.ones(2, 8).to(target)).sum().backward()
        optimizer.step()
    assert {entry["sum"].device.type for entry in optimizer.state.values()} == {"cpu"}
    assert model.weight.device == target


def test_what_close_does_is_linear_in_the_number_of_parameters():
    def calls(depth):
        model = mlp(width=4, depth=depth)
        manager = hetero.manage(model, device=device(), device_budget="1MiB")
        return our_calls(manager.close).total()

    # Of 60 parameters, and of twice, three times as many: what comes on top is the same.
    few, more, most = calls(10), calls(20), calls(30)
    assert most - more == more - few


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("budget", ["192KiB", "448KiB"])
@pytest.mark.parametrize(
    "between",
    [
        *(["close"], ["close", "manage"]),
        *(["step", "close"], ["close", "step"], ["close", "manage", "step"], ["step", "close", "manage"]),
        *(["write", "close"], ["close", "write"], ["close", "manage", "write"]),
    ],
    ids=" ".join,
)
def test_a_graph_from_before_the_end_is_refused_where_autograd_refuses_it(between, budget, fused):
    """Else gradients would be those of weights that forward never saw."""

    def gradients_of(managed):
        target = device()
        gc.collect()
        torch.manual_seed(0)
        model = mlp(depth=2) if managed else mlp(depth=2).to(target)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False, fused=fused)

        def manage():
            return hetero.manage(model, optimizer, device=target, device_budget=budget) if managed else None

        manager = manage()
        torch.manual_seed(1)
        for _ in range(4):
            backward(model, target)
            optimizer.step()
            optimizer.zero_grad()
        loss = model(torch.randn(8, 64).to(target)).square().mean()
        for action in between:
            if action == "step":
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
                optimizer.zero_grad()
            elif action == "write":
                with torch.no_grad():
                    model[2].weight.mul_(2.0)
            elif managed:
                manager = manager.close() if action == "close" else manage()
        try:
            loss.backward()
            found = [p.grad.cpu() for p in model.parameters()]
        except RuntimeError as error:
            found = str(error).partition(":")[0]
        if manager is not None:
            manager.close()
        return found

    expected, found = gradients_of(False), gradients_of(True)
    if isinstance(expected, str):
        assert "modified by an inplace operation" in expected
        assert found == expected
    else:
        assert all(map(torch.equal, found, expected))
