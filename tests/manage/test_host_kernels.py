"""The arithmetic of the step at home: which kernels, in slices, and several parameters at once. Equal bits."""

import copy

import pytest
import torch
from accelerators import ON_CUDA, ON_HOST
from equality import as_chosen, assert_identical, device, on_host, values_of
from torch import nn

import hetero
from hetero.stm.deferred import Batch, Update, UpdateQueue
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.step import capture
from hetero.stm.updates import slices as slicing
from hetero.stm.updates.captured import ParameterUpdate, run_together
from hetero.stm.updates.kernels import GroupKernels, is_open, split, takes_fused
from hetero.stm.updates.optimizers import hyper_parameters, make_shell

pytestmark = pytest.mark.skipif(ON_CUDA, reason=ON_HOST)

KINDS = {
    torch.optim.AdamW: {"lr": 0.01},
    torch.optim.Adam: {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    torch.optim.SGD: {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    torch.optim.Adagrad: {"lr": 0.05, "lr_decay": 0.1},
}


def network(layers=6):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(12, 12), nn.LayerNorm(12), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(12, 3))


def backward(model, target, step):
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(step)).to(target)
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, target, steps=5, *, closure=False):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if closure:
            losses.append(optimizer.step(lambda step=step: backward(model, target, step)))
        else:
            losses.append(backward(model, target, step))
            optimizer.step()
    return [loss.detach() for loss in losses]


def unmanaged(kind, keywords, steps=5):
    model = network()
    optimizer = kind(model.parameters(), **keywords)
    losses = train(model, optimizer, torch.device("cpu"), steps)
    return on_host([losses, values_of(model), optimizer.state_dict()])


def managed(kind, keywords, steps=5, *, closure=False, device_homes=False):
    model, target = network(), device()
    optimizer = kind(model.parameters(), **keywords)
    with hetero.manage(
        model, optimizer, device=target, device_budget="1MiB", device_homes=device_homes, speculate=False
    ) as manager:
        losses = train(model, optimizer, target, steps, closure=closure)
        kernels = manager._host_step.kernels
        groups = [group["fused"] for group in optimizer.state_dict()["param_groups"]]
    return on_host([losses, values_of(model), optimizer.state_dict()]), kernels, groups


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_open_is_fused_from_the_first_step_on(kind, closure):
    got, kernels, groups = managed(kind, KINDS[kind], closure=closure)
    assert_identical(got, unmanaged(kind, as_chosen(kind, KINDS[kind])))
    assert kernels == [GroupKernels(fused=26, others=0, chosen=True)]
    assert groups == [None]
    first, *_ = managed(kind, KINDS[kind], 1, closure=closure)
    assert_identical(first, unmanaged(kind, as_chosen(kind, KINDS[kind]), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_live_on_the_device_are_stepped_by_the_same_kernels(kind, monkeypatch):
    there = []
    update = capture.device_update
    monkeypatch.setattr(capture, "device_update", lambda *given: there.append(1) or update(*given))
    monkeypatch.setattr(StatefulTensorMgr, "device_homes", lambda self: frozenset(range(0, 26, 3)))
    got, *_ = managed(kind, KINDS[kind], 12, device_homes=True)
    assert_identical(got, unmanaged(kind, as_chosen(kind, KINDS[kind]), 12))
    assert there


@pytest.mark.parametrize("given", [{"foreach": False}, {"fused": False}, {"fused": True}, {"foreach": True}])
def test_what_the_user_chose_is_what_runs(given):
    keywords = {"lr": 0.01, **given}
    got, kernels, groups = managed(torch.optim.AdamW, keywords)
    assert_identical(got, unmanaged(torch.optim.AdamW, keywords))
    fused = 26 if given.get("fused") else 0
    assert kernels == [GroupKernels(fused=fused, others=26 - fused, chosen=False)]
    assert groups == [given.get("fused")]


def test_the_two_kernels_differ():
    """Otherwise nothing here would show which one ran."""
    fused = unmanaged(torch.optim.AdamW, {"fused": True})
    with pytest.raises(AssertionError, match="differs"):
        assert_identical(fused, unmanaged(torch.optim.AdamW, {"foreach": False}))


class MyAdamW(torch.optim.AdamW):
    pass


def test_nothing_is_chosen_where_there_is_no_choice():
    def opens(kind, **keywords):
        optimizer = kind([nn.Parameter(torch.zeros(2))], **keywords)
        return is_open(optimizer, optimizer.param_groups[0])

    assert opens(torch.optim.AdamW)
    assert not opens(torch.optim.AdamW, capturable=True)
    assert not opens(torch.optim.AdamW, differentiable=True)
    assert not opens(torch.optim.RMSprop)
    assert not opens(MyAdamW)


def parameter_like(tensor):
    parameter = nn.Parameter(tensor)
    parameter.grad = torch.ones_like(tensor)
    return parameter


def fused(kind, parameter, state=None):
    return takes_fused(kind([parameter]), parameter, parameter.grad, state)


def test_fused_kernels_are_not_chosen_for_what_they_do_not_take():
    plain = parameter_like(torch.randn(6, 4))
    assert fused(torch.optim.SGD, plain)
    assert fused(torch.optim.SGD, parameter_like(torch.randn(6, 4, dtype=torch.float64)))
    assert fused(torch.optim.SGD, parameter_like(torch.randn(4, 6).t()))
    assert fused(torch.optim.AdamW, parameter_like(torch.randn(3).bfloat16()))
    # SGD's leaves them as they are.
    assert not fused(torch.optim.SGD, parameter_like(torch.randn(3).bfloat16()))
    assert not fused(torch.optim.AdamW, parameter_like(torch.randn(3, dtype=torch.complex64)))
    plain.grad = torch.randn(4, 6).t()
    assert not fused(torch.optim.SGD, plain)
    gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])
    gaps.grad = torch.zeros(6, 8)[:, ::2]
    assert not fused(torch.optim.SGD, gaps)
    plain.grad = torch.zeros(6, 4)
    states = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(6, 4), "exp_avg_sq": torch.zeros(6, 4)}
    assert fused(torch.optim.AdamW, plain, states)
    assert not fused(torch.optim.AdamW, plain, {**states, "step": torch.tensor(3.0, dtype=torch.float64)})
    assert not fused(torch.optim.AdamW, plain, {**states, "exp_avg": torch.zeros(6, 4, dtype=torch.float64)})


def test_parameters_of_one_group_keep_their_order_whatever_steps_them():
    parameters = [parameter_like(torch.randn(4, 3)) for _ in range(5)]
    parameters[1].grad = torch.randn(3, 4).t()
    parameters[3].grad = None
    wanted = [p.detach().clone() for p in parameters]
    for value, p in zip(wanted, parameters, strict=True):
        if p.grad is not None:
            value -= 0.5 * p.grad
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    groups, chosen = split(optimizer, optimizer.param_groups, lambda p: True)
    assert [group["fused"] for group in groups] == [True, None, True, None, True]
    assert [p for group in groups for p in group["params"]] == parameters
    assert chosen == [parameters[0], parameters[2], parameters[4]]
    optimizer.param_groups = groups
    optimizer.step()
    # Half of a number is exact.
    assert all(torch.equal(p, value) for p, value in zip(parameters, wanted, strict=True))
    assert list(optimizer.state) == [parameters[i] for i in (0, 1, 2, 4)]


def test_momentum_of_parameters_that_join_later():
    """torch's own fused step fails where only some have momentum; a managed one must not."""

    def loop(target, keywords, manage):
        model = network()
        late = list(model[0].parameters())
        for p in late:
            p.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **keywords)
        manager = hetero.manage(model, optimizer, device=target, device_budget="1MiB") if manage else None
        seen = train(model, optimizer, target, 3)
        for p in late:
            p.requires_grad_(True)
        seen += train(model, optimizer, target, 3)
        if manager is not None:
            manager.close()
        return [model[0].weight.detach().clone(), torch.stack([s.cpu() for s in seen])]

    got = loop(device(), {}, True)
    wanted = loop(torch.device("cpu"), {"foreach": False}, False)
    assert all(
        torch.allclose(a, b) for a, b in zip(got, wanted, strict=True)
    )  # another kernel: not the same bits


def test_a_graph_from_before_a_fused_step_is_refused_as_after_a_loop():
    model, target = network(), device()
    optimizer = torch.optim.AdamW(model.parameters())
    with hetero.manage(model, optimizer, device=target, device_budget="1MiB"):
        for steps_before in (0, 2):  # the first step is taken at once, others are queued
            train(model, optimizer, target, steps_before)
            loss = model(torch.ones(2, 12, device=target)).sum()
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_grad_scaler_with_powers_of_two_gives_the_fused_numbers():
    def loop(target, keywords, manage):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **keywords)
        scaler = torch.amp.GradScaler(target.type, init_scale=2.0**10)
        manager = hetero.manage(model, optimizer, device=target, device_budget="1MiB") if manage else None
        if manager is None:
            model.to(target)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(5, 12, generator=torch.Generator().manual_seed(step)).to(target)
            scaler.scale((model(x) - 1).square().mean() * (float("inf") if step == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        if manager is not None:
            manager.close()
        return on_host(list(model.parameters()))

    assert_identical(loop(device(), {}, True), loop(device(), {"fused": True}, False))


# -- slices ------------------------------------------------------------------------------------------------------------

SLICED = [
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.9), torch.tensor(0.99))}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.ASGD, {"t0": 2, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.Rprop, {}),
]


def one_update(optimizer, parameter):
    shell = make_shell(optimizer)
    group = hyper_parameters(optimizer.param_groups[0])
    entry = optimizer.state[parameter]
    return ParameterUpdate(shell, parameter, parameter.detach(), parameter.grad, group, entry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "keywords"), SLICED)
def test_slices_have_the_bits_of_the_whole(kind, keywords, dtype, monkeypatch):
    monkeypatch.setattr(slicing, "_ELEMENTS", 100)
    used = []
    cut = slicing.slices
    monkeypatch.setattr("hetero.stm.updates.captured.slices", lambda *given: used.append(1) or cut(*given))
    generator = torch.Generator().manual_seed(0)
    for shape, order in (((7, 331), (7, 331)), ((331, 7), (7, 331))):
        start = torch.randn(shape, generator=generator, dtype=dtype)
        whole, ours = (nn.Parameter(start.clone().view(order).view(shape)) for _ in range(2))
        if shape != order:
            whole, ours = nn.Parameter(whole.detach().t()), nn.Parameter(ours.detach().t())
        first, second = (kind([p], **copy.deepcopy(keywords), foreach=False) for p in (whole, ours))
        for step in range(6):
            gradient = torch.randn(whole.shape, generator=generator, dtype=dtype)
            gradient = torch.empty_like(whole).copy_(gradient)
            whole.grad, ours.grad = gradient.clone(), gradient.clone()
            first.step()
            second.step() if step == 0 else one_update(second, ours).run()
        assert torch.equal(whole, ours)
        assert_identical(on_host(dict(second.state[ours])), on_host(dict(first.state[whole])))
    assert len(used) == 10


def test_only_optimizers_of_single_numbers_and_full_precision_are_cut():
    def may(kind, dtype=torch.float32, **keywords):
        parameter = parameter_like(torch.randn(1 << 20, 2).to(dtype))
        optimizer = kind([parameter], **keywords)
        optimizer.step()
        group = hyper_parameters(optimizer.param_groups[0])
        entry = optimizer.state[parameter]
        return slicing.may_slice(make_shell(optimizer), group, parameter.detach(), parameter.grad, entry)

    assert may(torch.optim.RMSprop)
    assert not may(torch.optim.RMSprop, torch.bfloat16)
    assert not may(torch.optim.Adafactor)
    assert not may(torch.optim.AdamW, fused=True)
    assert not may(torch.optim.AdamW, foreach=True)


def test_a_machine_on_which_slices_differ_cuts_nothing(monkeypatch):
    monkeypatch.setattr(slicing, "_trials", {})
    monkeypatch.setattr(slicing, "_try", lambda shell, group, dtype, length: {"": torch.full((1,), length)})
    parameter = parameter_like(torch.randn(1 << 20, 2))
    optimizer = torch.optim.RMSprop([parameter])
    optimizer.step()
    group = hyper_parameters(optimizer.param_groups[0])
    entry = optimizer.state[parameter]
    assert not slicing.may_slice(make_shell(optimizer), group, parameter.detach(), parameter.grad, entry)


# -- together ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_in_one_call_have_the_bits_of_each_alone(kind, keywords):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in ((3,), (17,), (4, 5), ())]
    alone, together = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = [kind(parameters, **KINDS[kind], **keywords) for parameters in (alone, together)]
    for step in range(5):
        for one, other in zip(alone, together, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        optimizers[0].step()
        if step == 0:
            optimizers[1].step()
            continue
        shell = make_shell(optimizers[1])
        group = hyper_parameters(optimizers[1].param_groups[0])
        updates = [
            ParameterUpdate(shell, p, p.detach(), p.grad, group, optimizers[1].state[p]) for p in together
        ]
        assert len({update.batch_key for update in updates}) == 1
        run_together(updates)
    assert_identical(on_host(together), on_host(alone))
    assert_identical(on_host(optimizers[1].state_dict()), on_host(optimizers[0].state_dict()))


def test_a_managed_step_calls_torch_less_often_than_it_has_parameters(monkeypatch):
    calls = []
    run = run_together
    monkeypatch.setattr(
        "hetero.stm.step.jobs.run_together", lambda updates: calls.append(len(updates)) or run(updates)
    )
    got, *_ = managed(torch.optim.AdamW, {})
    assert_identical(got, unmanaged(torch.optim.AdamW, {"fused": True}))
    assert sum(calls) == 4 * 26
    assert len(calls) < 4 * 13


def queued(*keys, nbytes=10):
    """Updates, and a list of what ran together."""
    ran = []

    def update(number, key):
        kin = (
            None
            if key is None
            else Batch(key=key, nbytes=nbytes, run_all=lambda runs: ran.append([r() for r in runs]))
        )
        return Update(lambda: number if kin else ran.append([number]), kin)

    return [update(number, key) for number, key in enumerate(keys)], ran


def drained(updates, *, first=None):
    queue = UpdateQueue()
    with queue._changed:  # the thread waits
        queue._waiting.extend(updates)
        if first is not None:
            queue._waiting.extendleft(reversed(queue._take(queue._waiting.index(first))))
    queue.submit(updates[:0])
    queue._work()
    assert all(update.done for update in updates)
    queue.close()


def test_kin_that_follow_one_another_run_together_in_their_order():
    updates, ran = queued("a", "a", "b", "a", None, "b", "b", "b")
    drained(updates)
    together = [group for group in ran if len(group) > 1]
    assert together == [[0, 1], [5, 6, 7]]


def test_what_is_waited_for_goes_first_with_its_kin_behind_it():
    updates, ran = queued("a", "a", "b", "b", "a", "a")
    drained(updates, first=updates[2])
    assert ran == [[2, 3], [0, 1, 4, 5]]


def test_kin_that_are_large_together_are_not_run_together():
    updates, ran = queued("a", "a", "a", "a", "a", nbytes=Batch.MOST_BYTES // 2)
    drained(updates)
    assert [len(group) for group in ran if len(group) > 1] == [2, 2]


def test_an_error_in_one_of_several_leaves_those_behind_it_as_they_were():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, foreach=False)
    for p in parameters:
        p.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[parameters[1]]["momentum_buffer"] = torch.ones(5)  # of no use
    shell, group = make_shell(optimizer), hyper_parameters(optimizer.param_groups[0])
    before = [p.detach().clone() for p in parameters]
    updates = [
        ParameterUpdate(shell, p, p.detach(), torch.ones(3), group, optimizer.state[p]) for p in parameters
    ]
    with pytest.raises(RuntimeError, match="size"):
        run_together(updates)
    assert not torch.equal(parameters[0], before[0])
    assert torch.equal(parameters[1], before[1])
    assert torch.equal(parameters[2], before[2])
    assert torch.equal(optimizer.state[parameters[2]]["momentum_buffer"], torch.ones(3))
