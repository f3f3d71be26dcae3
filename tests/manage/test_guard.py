"""Iterations that follow no plan, or leave it: the budget holds, and the numbers stay."""

import copy
import functools

import pytest
import torch
from accelerators import GAPS, ON_CUDA, SEGMENTS, set_memory_limit
from loops import square_loss_of_32, train
from random_graphs import Graph, Node, Step, run, twin
from torch import nn
from twins import assert_same, assert_twins, device, plain

import hetero
from hetero.stm.running import guard
from hetero.stm.running.retry import Retry
from hetero.stm.uses import Uses

WIDTH = 64


class Formulas(nn.Module):
    """Operators whose backward ATen computes in two ways (guard: [Note: formulas])."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.fill = nn.Parameter(torch.tensor(0.3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x).sigmoid() + 0.5
        x = x.masked_fill(x > 1.1, self.fill.sigmoid())
        product = x.prod(1, keepdim=True) + x.cumprod(1)[:, -1:] + x.prod()
        return self.last(x) * product


steps = functools.partial(train, loss_of=square_loss_of_32)


class Sorts(nn.Module):
    """An operator that allocates twice: values, then indices of twice their size."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        values, indices = torch.sort(x * self.scale)
        return values[-1] + indices[0]


def test_an_operator_that_fails_at_its_second_allocation_does_not_pass_the_budget():
    target = device()
    x = torch.randn(1 << 22, device=target)
    model = Sorts()
    before = torch.accelerator.memory_allocated()
    # The product and the values fit, or the product and the indices.
    budget = before + (16 << 20) + (40 << 20)
    with hetero.manage(model, device=target, device_budget=budget):
        torch.accelerator.reset_peak_memory_stats()
        with pytest.raises(hetero.BudgetError, match="sort"), torch.no_grad():
            model(x)
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS


@torch.library.custom_op("hetero_tests::engine", mutates_args=())
def engine(x: torch.Tensor, nbytes: int, does_without: bool = False, breaks: bool = False) -> torch.Tensor:
    """As cuDNN's convolutions: whatever the allocator says, the error is another one, or there is none."""
    if breaks:
        raise RuntimeError("no such engine")
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    except torch.OutOfMemoryError:
        if not does_without:
            raise RuntimeError("GET was unable to find an engine to execute this computation") from None
    return x.clone()


@torch.library.custom_op("hetero_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    """As CUDA's attention with dropout: it has drawn when it allocates."""
    drawn = torch.rand(x.shape, device=x.device)
    torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    return x + drawn


class Engine(nn.Module):
    def __init__(self, workspace):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(8)])
        self.workspace = workspace

    def hidden(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x):
        return engine(self.hidden(x), self.workspace)


class Noisy(Engine):
    def forward(self, x):
        return noise(noise(self.hidden(x), self.workspace), 0)


class Broken(Engine):
    """Memory has been short before, and nothing can leave, but this is no matter of memory."""

    def forward(self, x):
        return super().forward(engine(engine(x, self.workspace, does_without=True), 0, breaks=True))


def test_an_error_of_a_library_that_hides_the_allocators_is_answered_like_that():
    target = device()
    x = torch.randn(4, 1024, device=target)
    layers, budget = 8 * (1024 * 1024 * 4), 60 << 20
    torch.manual_seed(0)
    model = Engine(workspace=budget - layers)  # beside which not all layers fit
    reference = Engine(workspace=0)
    reference.load_state_dict(model.state_dict())
    expected = reference.to(target)(x).detach()
    del reference
    before = torch.accelerator.memory_allocated()
    keywords = {"device": target, "device_budget": before + budget, "warmup_budget": 0.9}
    with hetero.manage(model, **keywords) as manager, torch.no_grad():
        assert torch.equal(model(x), expected)
        assert manager._stm.collector.total.evicted_bytes > 0
    model.workspace = budget
    with (
        hetero.manage(model, **keywords),
        torch.no_grad(),
        pytest.raises(hetero.BudgetError, match=r"engine.* more"),
    ):
        model(x)
    broken = Broken(workspace=4 * budget)
    with (
        hetero.manage(broken, **keywords),
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"^no such engine$"),
    ):
        broken(x)


def test_formulas_that_depend_on_the_mode_give_the_same_bits():
    assert_twins(Formulas, steps, share=0.9)


def test_without_stepping_aside_those_formulas_give_other_bits(monkeypatch):
    # So that the test above cannot pass by chance: torch still chooses by the mode.
    x = torch.rand(32, WIDTH, dtype=torch.float32).add_(0.5).requires_grad_()
    (expected,) = torch.autograd.grad(x.prod(1).sum(), x)
    with guard.guarded(Retry(lambda unless_free: 0), at_once=True):
        loss = x.prod(1).sum()
        (other,) = torch.autograd.grad(loss, x)
        with guard.formulas_kept([loss := x.prod(1).sum()]):
            (kept,) = torch.autograd.grad(loss, x)
    assert not torch.equal(other, expected)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("of_all", [torch.max, torch.min, torch.median, torch.nanmedian])
def test_infinite_gradients_of_an_extreme_are_zero_elsewhere(of_all):
    x = torch.randn(WIDTH, requires_grad=True)
    infinite = torch.tensor(torch.inf)
    (expected,) = torch.autograd.grad(of_all(x), x, infinite)
    with guard.guarded(Retry(lambda unless_free: 0), at_once=True):
        (other,) = torch.autograd.grad(of_all(x), x, infinite)
        with guard.formulas_kept([value := of_all(x)]):
            (kept,) = torch.autograd.grad(value, x, infinite)
    assert other.isnan().any(), "torch does not choose by the mode any more"
    assert torch.equal(kept, expected)


def test_a_determinant_that_is_differentiated_twice_has_the_same_derivatives():
    def derivatives(matrix):
        loss = torch.linalg.det(matrix).sum()
        with guard.formulas_kept([loss]):
            (first,) = torch.autograd.grad(loss, matrix, create_graph=True)
        second = first.square().sum()
        with guard.formulas_kept([second]):
            return first.detach(), *torch.autograd.grad(second, matrix)

    matrices = torch.randn(5, 8, 8, requires_grad=True)
    expected = derivatives(matrices)
    with guard.guarded(Retry(lambda unless_free: 0), at_once=True):
        kept = derivatives(matrices)
    assert all(map(torch.equal, kept, expected))


# Each of a complex matrix, of whose vectors the phases are arbitrary.
PHASES = {
    "eig": lambda matrix: torch.linalg.eig(matrix)[1],
    "eigh": lambda matrix: torch.linalg.eigh(matrix + matrix.mH)[1],
}


@pytest.mark.parametrize("name", PHASES)
def test_a_loss_of_an_arbitrary_phase_is_an_error_when_guarded_as_well(name):
    matrix = torch.randn(8, 8, dtype=torch.complex64, requires_grad=True)
    with guard.guarded(Retry(lambda unless_free: 0), at_once=True):
        loss = PHASES[name](matrix).real.sum()
        with guard.formulas_kept([loss]), pytest.raises(RuntimeError, match="ill-defined"):
            loss.backward()


def reduced(w, index, ones, lists):
    w.scatter_reduce_(0, index, ones, "mean")


def reduced_by_index(w, index, ones, lists):
    w.index_reduce_(0, index, ones, "mean")


def added_in_lists(w, index, ones, lists):
    torch._foreach_add_([w, lists[0]], [ones.half(), lists[1]])


@pytest.mark.skipif(ON_CUDA or SEGMENTS, reason="memory is refused to the byte")
@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
@pytest.mark.parametrize("room", [0, 512, 1024, 1536])
@pytest.mark.parametrize("write", [reduced, reduced_by_index, added_in_lists])
def test_an_operator_that_has_written_when_it_allocates_is_not_applied_twice(write, room):
    """Each of its allocations fails in one of these."""
    target = device()
    w, index = torch.ones(64, device=target), torch.zeros(64, dtype=torch.long, device=target)
    lists = torch.ones(4096, device=target), torch.ones(4096, dtype=torch.float16, device=target)
    expected = w.clone()
    write(expected, index, torch.ones_like(w), lists)
    ones, given = torch.ones_like(w), []

    def relieve(unless_free=None):
        set_memory_limit(256 << 20)
        given.append(None)
        return int(len(given) == 1)

    with guard.guarded(Retry(relieve), at_once=True):
        set_memory_limit(torch.accelerator.memory_allocated() + room)
        write(w, index, ones, lists)
    assert given
    assert_same(plain(w), plain(expected), "written")


def test_an_operator_that_is_tried_again_draws_the_same_numbers():
    target = device()
    x = torch.randn(4, 1024, device=target)
    budget = 60 << 20
    model = Noisy(workspace=budget - 8 * (1024 * 1024 * 4))  # beside which not all layers fit
    twin = copy.deepcopy(model).to(target)
    torch.manual_seed(1)
    expected = twin(x).detach()
    del twin
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(1)
    with hetero.manage(model, device=target, device_budget=before + budget, warmup_budget=0.9) as manager:
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        assert manager._stm.collector.total.evicted_bytes > 0, "it was not tried again"


class Branching(nn.Module):
    """The same input shapes, another path: with ``wide`` much more is alive at once."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(12)])
        self.side = nn.Linear(WIDTH, WIDTH)
        self.wide = False

    def forward(self, x):
        for index, layer in enumerate(self.trunk):
            x = layer(x).tanh()
            if self.wide and index == 2:
                y = self.side(x.repeat(6, 1))
                x = x + (y.sin() * y.cos()).view(6, *x.shape).sum(0)
        return x


# All weights fit beside the activations of the narrow path, not beside those of the wide one.
BUDGET = 400 << 10


def test_an_iteration_that_leaves_its_plan_keeps_to_the_budget():
    def loop(model, optimizer, target):
        seen = []
        for step in range(9):
            model.wide = step in (3, 5, 6)
            seen += steps(model, optimizer, target, 1)
        return seen

    assert_twins(Branching, loop, budget=BUDGET)


def test_a_branch_taken_for_good_is_measured_and_planned():
    def loop(model, optimizer, target):
        model.wide = False
        seen = steps(model, optimizer, target, 3)
        model.wide = True
        return seen + steps(model, optimizer, target, 5)

    manager = assert_twins(Branching, loop, budget=BUDGET)
    operators = [period.operator for period in manager.stats.periods]
    assert any("side" in operator for operator in operators)


def test_relief_in_the_middle_of_an_operator_is_needed_again_when_planned():
    # One weight used twice, and a budget that holds two of its gradients only once its copy has left.
    graph = Graph((Node("linear", 0, 0), Node("linear", 0, 0)), weights=2, frozen=frozenset())
    loop = [Step(4, 1, False, None), Step(4, 2, False, None), Step(4, 1, False, None)]
    target = device()
    torch.accelerator.reset_peak_memory_stats()
    base = torch.accelerator.memory_allocated()
    model, optimizer = twin(graph, target)
    expected = run(model, optimizer, loop, target)
    peak = torch.accelerator.max_memory_allocated() - base
    del model, optimizer
    model, optimizer = twin(graph)
    torch.accelerator.reset_peak_memory_stats()
    budget = torch.accelerator.memory_allocated() + int(0.375 * peak)
    with hetero.manage(model, optimizer, device=target, device_budget=budget) as manager:
        got = run(model, optimizer, loop, target)
        assert torch.accelerator.max_memory_allocated() <= budget + GAPS
        assert manager.stats.periods
    assert_same(plain(got), plain(expected), "relieved")


def test_what_the_model_hoards_in_a_planned_forward_makes_copies_leave():
    class Hoarding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(16)])
            self.hoards = False

        def forward(self, x):
            kept = []
            for layer in self.layers:
                x = layer(x).tanh()
                if self.hoards:
                    kept.append(x.clone())
            return x

    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            model.hoards = step >= 3
            seen += steps(model, optimizer, target, 1)
        return seen

    # Half of the weights beside the activations; what is hoarded takes as much again.
    assert_twins(Hoarding, loop, budget=16 * (8 << 10) + 8 * (17 << 10) + (64 << 10))


def activations():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def test_a_graph_that_is_dropped_without_a_backward_is_freed():
    target = device()
    model = activations()
    with hetero.manage(model, device=target, device_budget="8MiB") as manager:
        used = []
        for _ in range(3):
            out = model(torch.randn(64, WIDTH, device=target))
            del out
            manager._stm.relief.relieve()
            used.append(torch.accelerator.memory_allocated())
        assert len(set(used)) == 1


def test_after_an_interrupt_between_the_begin_of_an_operator_and_its_end_no_operator_runs(monkeypatch):
    # An interrupt may come at any bytecode, so also where nobody knows yet that an operator has begun.
    target = device()
    model = activations()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    begin = Uses.begin_operator
    with hetero.manage(model, optimizer, device=target, device_budget="8MiB") as manager:
        steps(model, optimizer, target, 2)

        def interrupted(self, operands, name):
            begin(self, operands, name)
            raise KeyboardInterrupt

        monkeypatch.setattr(Uses, "begin_operator", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, WIDTH, device=target))
        monkeypatch.undo()
        assert not any(tensor.users for tensor in manager._stm.tensors)
        steps(model, optimizer, target, 2)


class Gathering(nn.Module):
    """With ``hoards``, the planned forward keeps so much that it drifts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(16)])
        self.kept = []
        self.hoards = 0

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number < self.hoards:
                self.kept.append(x.detach().clone())
        return x


@pytest.mark.parametrize("hoards", [4, 8])
@pytest.mark.parametrize("drifts", [(3, 4, 5), (3, 5), (3, 6, 7)])
@pytest.mark.parametrize("wide", [2, 3, 4])  # backward's first operators need too much; so does the loss
def test_where_model_and_loss_grow_at_once_the_budget_holds_then_and_afterwards(wide, drifts, hoards):
    def loop(model, optimizer, target):
        seen = []
        for step in range(8):
            model.hoards = hoards if step in drifts else 0
            model.kept.clear()
            out = model(torch.randn(32, WIDTH).to(target))
            loss = out.repeat(wide, 1).square().mean() if step in drifts else out.square().mean()
            loss.backward()
            seen.append([loss, [p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Gathering, loop, budget=16 * (8 << 10) + 8 * (17 << 10) + (128 << 10))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.resident = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            index = torch.zeros_like(x, dtype=torch.long)
            x = x + torch.zeros_like(x).scatter_reduce_(0, index, x, "mean")
            self.resident.append(layer.weight._hetero.is_resident)
        return x


def test_an_operator_that_runs_once_takes_only_the_room_that_it_may_need():
    model = Counting()
    with hetero.manage(model, device=device(), device_budget="16MiB", activations=False):
        model(torch.randn(4, WIDTH).to(device())).sum().backward()  # unplanned, and so guarded
        assert all(model.resident)


class Hoarder(nn.Module):
    """Begins to keep what it makes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.kept = []
        self.keeps = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            if self.keeps:
                self.kept.append(x.detach().clone())
        return x


@pytest.mark.skipif(GAPS > 0, reason="the cap is on segments there")
def test_a_backward_that_is_guarded_because_forward_was_is_capped_as_well():
    """Where more is there than was measured, and what the guard could answer would pass the budget otherwise."""
    target = device()
    torch.manual_seed(0)
    model = Hoarder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    budget = torch.accelerator.memory_allocated() + (88 << 10)
    shares = []
    share = torch.get_device_module(target).get_per_process_memory_fraction
    with hetero.manage(model, optimizer, device=target, device_budget=budget, device_homes=False) as manager:
        for step in range(8):
            model.keeps = step == 7
            x = torch.randn(8, WIDTH).to(target).requires_grad_()
            x.register_hook(lambda gradient: shares.append(share()))
            loss = model(x).square().mean()
            guarded = manager._stm.executor.is_guarded
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guarded
    assert shares[-2] == 1
    assert shares[-1] < 1


class Transposed(nn.Module):
    """Of a layer without a bias, which is given what does not lie in order (`hetero.devices.calling`: [Note: keys])."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        halves = self.last.weight.t().chunk(2, dim=1)
        return self.last(self.conv(x).transpose(1, 2)), [x.transpose(1, 2) @ half for half in halves]


def test_products_in_inference_mode_are_folded_as_without_a_guard():
    def loop(model, optimizer, target):
        with torch.inference_mode():
            return [model(torch.randn(rows, WIDTH, 3).to(target)) for rows in (9, 9, 5)]

    assert_twins(Transposed, loop, share=2.0)
