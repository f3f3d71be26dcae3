"""Where everything fits: who has looked at parameters at home, and who would notice that they are elsewhere."""

import collections
import copy
import gc
import weakref

import pytest
import torch
from accelerators import device
from backward_ends import wait_for_backward_ends
from bits import same_bits
from loops import losses, mlp, square_loss
from torch.nn.utils import parameters_to_vector
from twins import adamw, assert_same, assert_twins, managed, unmanaged

import hetero

PLENTY = 64 << 20  # bytes

LOOKS = {
    "deep copy": lambda model: sum(p.sum().item() for p in copy.deepcopy(model).parameters()),
    "norms": lambda model: [p.detach().norm().item() for p in model.parameters()],
    "names": lambda model: len(model.state_dict()),
    "vector": lambda model: _without_gradients(lambda: parameters_to_vector(model.parameters()).sum().item()),
    "finite": lambda model: all(torch.isfinite(p).all().item() for p in model.parameters()),
    "clamped": lambda model: [p.data.clamp_(-0.1, 0.1).sum().item() for p in model.parameters()],
}


def _without_gradients(function):
    with torch.no_grad():
        return function()


def _step(model, optimizer, target):
    loss = square_loss(model, target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _looking(look, iterations):
    def loop(model, optimizer, target):
        seen = []
        for number in range(14):
            if number in iterations:
                look(model)
            seen.append(_step(model, optimizer, target))
        return seen

    return loop


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("look", list(LOOKS))
def test_one_look_stands_in_nobodys_way(look, number):
    manager = assert_twins(mlp, _looking(LOOKS[look], [number]), budget=PLENTY)
    assert manager.stats.settled_forwards > 0


# What is brought up to date on the host, from ``made`` of each parameter and its states.
COPIES = {
    "doubles": lambda p, entry: p.detach().double(),
    "low precision": lambda p, entry: p.detach().bfloat16(),
    "stacked": lambda p, entry: torch.stack([p.detach()] * 2),
    "states": lambda p, entry: entry["exp_avg"].clone(),
    "doubles of states": lambda p, entry: entry["exp_avg"].double(),
}


def _loop_with_copies(made, every, *, of_copy=False):
    def loop(model, optimizer, target):
        parameters, copies = list(model.parameters()), None
        if of_copy:
            copies = [p.detach().double() for p in copy.deepcopy(model).parameters()]
        for number in range(14):
            _step(model, optimizer, target)
            if number % every == 0:
                new = [made(p, optimizer.state[p]) for p in parameters]
                copies = new if copies is None else copies
                for mean, now in zip(copies, new, strict=True):
                    mean.mul_(0.9).add_(now * 0.1)  # ``lerp_`` rounds otherwise on another device
        return copies

    return loop


def _assert_goes_on(loop):
    """Managed first: what an unmanaged run leaves on the host might be what parameters are combined with."""
    seen = managed(mlp, loop, PLENTY)[0]
    assert all(map(same_bits, seen, unmanaged(mlp, loop)[0]))


@pytest.mark.parametrize("made", list(COPIES))
def test_who_brings_copies_at_home_up_to_date_in_each_iteration_goes_on_to(made):
    _assert_goes_on(_loop_with_copies(COPIES[made], 1))


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("made", ["doubles", "low precision", "states", "doubles of states"])
def test_who_brings_copies_at_home_up_to_date_now_and_then_goes_on_to(made, every):
    _assert_goes_on(_loop_with_copies(COPIES[made], every))


def test_a_deep_copy_that_is_kept_in_another_type_is_brought_up_to_date():
    _assert_goes_on(_loop_with_copies(COPIES["doubles"], 5, of_copy=True))


# Averages on the host, of who asks for copies there as of parameters on a device.
GLANCES = {
    "cpu": lambda model: [p.detach().cpu() for p in model.parameters()],
    "to a device": lambda model: [p.detach().to("cpu") for p in model.parameters()],
    "to a tensor's": lambda model: [p.detach().to(torch.empty(0)) for p in model.parameters()],
    "in another type": lambda model: [
        p.detach().to("cpu", torch.float64).float() for p in model.parameters()
    ],
    "the parameter": lambda model: [p.cpu() for p in model.parameters()],
    "names": lambda model: [value.cpu() for value in model.state_dict().values()],
}


def _begin(averages):
    for mean, first in zip(averages, mlp_of_the_same().parameters(), strict=True):
        mean.copy_(first.detach())


def _average(averages, copies):
    for mean, copied in zip(averages, copies, strict=True):
        mean.mul_(0.9).add_(copied, alpha=0.1)


def _averaging(glance, averages):
    def loop(model, optimizer, target):
        _begin(averages)
        for _ in range(14):
            _step(model, optimizer, target)
            with torch.no_grad():
                _average(averages, glance(model))
        return averages

    return loop


def mlp_of_the_same():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp()


@pytest.fixture
def averages():
    """From before the model is managed, as a deep copy made then."""
    return [p.detach().clone() for p in mlp_of_the_same().parameters()]


@pytest.mark.parametrize("glance", GLANCES)
@pytest.mark.parametrize("share", [0.7, 4.0])
def test_averages_on_the_host_keep_nothing_there(glance, share, averages):
    manager = assert_twins(mlp, _averaging(GLANCES[glance], averages), share=share)
    assert (manager.stats.settled_forwards > 0) == (share > 1)


KEPT = {
    "copies": lambda model: [p.detach().cpu() for p in model.parameters()],
    "made of copies": lambda model: [p.detach().cpu().clone() for p in model.parameters()],
    "names": lambda model: [value.cpu() for value in model.state_dict().values()],
    "in another type": lambda model: [p.detach().cpu().double() for p in model.parameters()],
}


def _with_copies(made, every, look):
    """Combined with what ``look`` gives of a parameter, now and then."""

    def loop(model, optimizer, target):
        copies, seen = made(model), []
        for number in range(14):
            seen.append(_step(model, optimizer, target))
            if number % every == every - 1:
                seen.append([look(p) - copied for p, copied in zip(model.parameters(), copies, strict=True)])
        return seen

    return loop


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("every", [3, 9])
def test_who_combines_copies_with_what_is_at_home_goes_on_to(kept, every):
    """As long as copies are kept: unmanaged, they are on another device. Managed first, as in `_assert_goes_on`."""
    made = KEPT[kept]
    seen, _, manager = managed(mlp, _with_copies(made, every, lambda p: p.detach()), PLENTY)
    assert_same(seen, unmanaged(mlp, _with_copies(made, every, lambda p: p.detach().cpu()))[0], "observed")
    assert manager.stats.settled_forwards == 0


def test_copies_made_in_forward_hide_no_look():
    """There, they come from the device."""

    class Logs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.logged = mlp(), []

        def forward(self, x):
            if len(self.logged) < 4:
                with torch.no_grad():
                    self.logged.append(sum(p.to("cpu").sum().item() for p in self.body.parameters()))
            return self.body(x)

    def loop(model, optimizer, target):
        seen = []
        for number in range(14):
            seen.append(_step(model, optimizer, target))
            if number == 0:
                first = [p.detach().clone() for p in model.parameters()]
            if number in (9, 13):
                seen.append([p.detach() - then for p, then in zip(model.parameters(), first, strict=True)])
        return seen

    assert_twins(Logs, loop, budget=PLENTY)


def test_nothing_is_kept_by_having_been_looked_at():
    model = mlp()
    manager = hetero.manage(model, device=device(), device_budget=PLENTY)
    kept = [weakref.ref(p._hetero) for p in model.parameters()]
    for p in model.parameters():
        p.detach()
    manager.close()
    del manager
    gc.collect()
    assert not any(each() for each in kept)


def _scaled(p, by):
    alias = p.detach()
    by(alias)
    return alias


WRITES = {
    "unseen": lambda p: _scaled(p, lambda alias: alias.data.mul_(0.9)).cpu(),
    "by a list": lambda p: _scaled(p, lambda alias: torch._foreach_mul_([alias.data], 0.9)).cpu(),
    "in a chain": lambda p: p.detach().data.mul_(0.9).cpu(),
    "seen": lambda p: p.detach().mul_(0.9).cpu(),
    "after the copy": lambda p: ((alias := p.detach()).cpu(), alias.data.mul_(0.9)),
    "by who has another": lambda p: ((alias := p.detach()), p.detach().cpu(), alias.data.mul_(0.9)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("share", [0.7, 4.0])
def test_who_asks_for_a_copy_and_writes_to_the_parameter_is_followed(write, share):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(8):
            seen.append(_step(model, optimizer, target))
            with torch.no_grad():
                for p in model.parameters():
                    WRITES[write](p)
        return seen

    assert_twins(mlp, loop, share=share)


@pytest.mark.parametrize("share", [0.7, 4.0])
@pytest.mark.parametrize("made", [lambda p: p * 1, lambda p: p[0], lambda p: p.clone()])
def test_hooks_of_the_node_behind_what_was_made_of_a_parameter_are_called(made, share):
    def loop(model, optimizer, target):
        node = made(next(model.parameters())).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
        seen = []
        for _ in range(8):
            seen.append(_step(model, optimizer, target))
        return seen

    assert_twins(mlp, loop, share=share)


@pytest.mark.parametrize("how", ["divided", "set as they were", "given"])
def test_gradients_of_ours_that_are_set_again_are_nobody_elses(how):
    """Theirs is memory of a kind that NumPy's arrays have as well, which others read unasked."""

    def loop(model, optimizer, target):
        seen = []
        for _ in range(14):
            loss = square_loss(model, target)
            if how == "given":
                gradients = list(torch.autograd.grad(loss, list(model.parameters())))
                wait_for_backward_ends(target)  # else autograd may hold them still, at the step
                for p in reversed(list(model.parameters())):
                    p.grad = gradients.pop()
                del p
            else:
                loss.backward()
                for p in model.parameters():
                    if how == "divided":
                        p.grad /= 2
                    else:
                        p.grad = p.grad
                del p
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(mlp, loop, share=0.7)
    assert assert_twins(mlp, loop, budget=PLENTY).stats.settled_forwards > 0


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("are_older", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda p, mask: p.mul_(mask),
        lambda p, mask: p.lerp_(p * mask, 0.5),
        lambda p, mask: (p - mask).norm().item(),
    ],
)
def test_who_combines_them_with_what_is_at_home_goes_on_to(use, are_older, every):
    """Masks on the host, as parameters are: none may find them elsewhere later."""

    def loop(model, optimizer, target, masks=()):
        seen = []
        for number in range(14):
            if number % every == 0:
                with torch.no_grad():
                    for p, mask in zip(model.parameters(), masks, strict=False):
                        use(p, mask)
            seen.append(_step(model, optimizer, target))
        return seen

    expected = unmanaged(mlp, loop)[0]
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    masks = [torch.ones(p.shape) for p in model.parameters()]
    with hetero.manage(model, optimizer, device=device(), device_budget=PLENTY) as manager:
        if not are_older:
            masks = [torch.ones(p.shape) for p in model.parameters()]
        torch.manual_seed(1)
        seen = loop(model, optimizer, manager.device, masks)
    assert all(map(same_bits, [value.cpu() for value in seen], expected))


# -- at the optimizer's state ---------------------------------------------------------------------------

STATES = {
    "one": lambda model, states: states[next(model.parameters())]["exp_avg"].norm().item(),
    "all": lambda model, states: sum(states[p]["exp_avg"].sum().item() for p in model.parameters()),
    "names": lambda model, states: len(states),
}


def _training(look, numbers=range(20)):
    def loop(model, optimizer, target):
        seen = []
        for number in range(20):
            seen.append(_step(model, optimizer, target))
            if number in numbers:
                seen.append(look(model, optimizer.state))
        return seen

    return loop


@pytest.mark.parametrize(
    ("look", "numbers"), [("names", range(20)), ("one", [2]), ("all", [2]), ("all", [0, 9])]
)
def test_looks_at_names_of_states_and_single_looks_at_these_stand_in_nobodys_way(look, numbers):
    manager = assert_twins(mlp, _training(STATES[look], numbers), budget=PLENTY)
    assert manager.stats.settled_forwards > 0


@pytest.mark.parametrize("number", [0, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "hold", [lambda entry: entry["exp_avg"][0], lambda entry: entry["exp_avg"].detach(), lambda entry: entry]
)
def test_what_somebody_holds_of_a_state_follows_it(hold, number):
    def loop(model, optimizer, target):
        seen, held = [], None
        for each in range(14):
            seen.append(_step(model, optimizer, target))
            if each == number:
                held = hold(optimizer.state[next(model.parameters())])
            if held is not None:
                seen.append((held["exp_avg"] if isinstance(held, dict) else held).cpu().clone())
        return seen

    assert_twins(mlp, loop, budget=PLENTY)


class _Lookahead(torch.optim.Optimizer):
    """As those of libraries: slow weights that are there from the beginning, combined every ``k`` steps."""

    def __init__(self, optimizer, k):
        self.optimizer, self.k, self.steps = optimizer, k, 0
        self.state = collections.defaultdict(dict)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % self.k == 0:
            with torch.no_grad():
                for p, state in self.state.items():
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
        return loss


@pytest.mark.parametrize("k", [1, 3, 5, 10])
@pytest.mark.parametrize("share", [0.6, 4.0])
def test_a_wrapper_that_has_slow_weights(k, share):
    """The wrapped one is managed, and the wrapper is stepped."""

    def loop(model, optimizer, target):
        return losses(model, wrappers[-1], target, 24)

    def make_optimizer(model):
        wrappers.append(_Lookahead(adamw(model), k))
        return wrappers[-1].optimizer

    wrappers = []
    assert_twins(mlp, loop, share=share, make_optimizer=make_optimizer)
