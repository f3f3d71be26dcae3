"""What a user takes to the host is theirs, as it is when parameters lie on a device: it follows no later step."""

import copy

import pytest
import torch
from loops import backward, mlp, square_loss
from twins import adamw, assert_twins, device

import hetero
from hetero.stm.tensors import hostcopies

TAKES = {
    "p.detach().cpu()": lambda p, o: p.detach().cpu(),
    "p.detach().to('cpu')": lambda p, o: p.detach().to("cpu"),
    "p.detach().to(device, copy=False)": lambda p, o: p.detach().to(torch.device("cpu"), copy=False),
    "p.detach().to(other)": lambda p, o: p.detach().to(torch.zeros(1)),
    "p.data.cpu().numpy()": lambda p, o: torch.as_tensor(p.data.cpu().numpy()),
    "p.cpu()": lambda p, o: p.cpu(),
    "a view": lambda p, o: p.detach().flatten()[1:].to(device="cpu"),
    "p.grad.cpu()": lambda p, o: p.grad.cpu(),
    "p.grad.detach().to('cpu')": lambda p, o: p.grad.detach().to("cpu"),
    "state": lambda p, o: o.state[p]["exp_avg"].cpu(),
}


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("budget", [None, 64 << 20], ids=["tight", "all fits"])
def test_what_was_taken_to_the_host_follows_no_later_step(name, budget):
    take = TAKES[name]

    def loop(model, optimizer, target):
        taken = []
        for _ in range(5):
            backward(model, target)
            optimizer.step()
            taken.append([take(p, optimizer) for p in model.parameters()])
            for p in model.parameters():
                p.grad.mul_(0.5)
            optimizer.zero_grad()
        return taken  # looked at here, after all steps

    assert_twins(mlp, loop, budget=budget)


def test_the_best_weights_are_those_of_their_step():
    def loop(model, optimizer, target):
        best = {}
        for step in range(4):
            backward(model, target)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                best = {name: value.cpu() for name, value in model.state_dict().items()}
                states = {
                    name: value.cpu()
                    for name, value in optimizer.state_dict()["state"][0].items()
                    if value.dim()
                }
        return [*best.values(), *states.values()]

    assert_twins(mlp, loop)


def test_a_gradient_of_a_loss_flows_through_such_a_copy():
    def loop(model, optimizer, target):
        for _ in range(2):
            penalty = model[0].weight.cpu().square().sum()
            (model(torch.ones(2, 64).to(target)).sum() + 1e-2 * penalty.to(target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model[0].weight]

    assert_twins(mlp, loop)


def test_aliases_stay_aliases_and_other_tensors_are_left_alone():
    model = mlp()
    manager = hetero.manage(model, None, device=device(), device_budget="4MiB")
    weight = model[0].weight
    other = torch.zeros(3)
    assert other.cpu() is other
    assert other.to("cpu") is other
    view = weight.detach()
    assert view.to(torch.float32) is view  # no device is named
    assert view.float().data_ptr() == view.data_ptr()
    taken = view.cpu()
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(view, weight)
    assert torch.equal(2.0 * taken, view)
    manager.close()
    assert "cpu" not in vars(torch.Tensor)
    assert "to" not in vars(torch.Tensor)
    kept = weight.detach()
    assert kept.cpu() is kept  # an ordinary parameter of the host again
    assert copy.copy(kept).to("cpu").data_ptr() == weight.data_ptr()


def test_what_has_been_in_many_places_is_not_remembered_in_all_of_them(monkeypatch):
    monkeypatch.setattr(hostcopies, "_least_to_prune", 8)
    monkeypatch.setattr(hostcopies, "_prune_at", 8)
    monkeypatch.setattr(hostcopies, "_at_home", type(hostcopies._at_home)())
    tensor, places = torch.ones(4), []
    for _ in range(100):
        places.append(torch.ones(4))  # kept, so that no place is used again
        tensor.data = places[-1]
        hostcopies.note_at_home(tensor)
    assert len(hostcopies._at_home) <= 9
    assert hostcopies.is_at_home(tensor)


@pytest.mark.parametrize("how", ["device", "number", "keyword", "method"])
def test_states_that_are_taken_to_the_device_find_room(how):
    target = device()
    move = {
        "device": lambda state: state.to(target),
        "number": lambda state: state.to(0),
        "keyword": lambda state: state.to(device=0),
        # As ``Tensor.cuda`` is made, of the device that is there.
        "method": lambda state: hostcopies._moved_by(target.type)(state),
    }[how]
    model = mlp()
    optimizer = adamw(model)
    free = torch.accelerator.memory_allocated()
    budget = free + 2 * sum(p.nbytes for p in model.parameters()) // 3
    with hetero.manage(model, optimizer, device=target, device_budget=budget, device_homes=False):
        for _ in range(4):
            optimizer.zero_grad()
            backward(model, target)
            optimizer.step()
        # The backward needs at once what the forward has used last: how slow the machine is makes no difference.
        loss = square_loss(model, target)
        room = budget - torch.accelerator.memory_allocated()
        # One state more than there is room for fits the budget.
        assert room <= budget - model[0].weight.nbytes
        taken, size = [], 0
        for parameter in model.parameters():
            taken.append(move(optimizer.state[parameter]["exp_avg"]))
            size += parameter.nbytes
            if size > room:
                break
        assert size > room
        assert torch.accelerator.memory_allocated() <= budget
        del taken
        loss.backward()
