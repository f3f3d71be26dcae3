"""The planned arena: the same numbers as without it, no byte in two living storages, a footprint that holds."""

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import small_transformers
import torch
import torchgen
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT, load
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.errors import ConfigError, PlanError
from hetero.pool import Arena, ArenaStats, planned, smartpool
from hetero.pool.cycle import CyclicLife, cyclic_load, plan_cycle
from hetero.pool.placing import INTO_OUT

# One pass, no time limit: these tests ask where tensors lie, not how good the plan is.
run_planned = partial(planned, planner=smartpool)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: more threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def virtual() -> torch.device:
    return hetero.virtual_device("512MiB", bandwidth="64GiB/s", latency="0us")


@pytest.fixture(params=["cpu", "virtual"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("virtual")


class Disjoint(TorchDispatchMode):
    """Asserts after every operator that no two living storages that it has seen share a byte."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = weakref.ref(storage)
        held = [storage for reference in self.live.values() if (storage := reference()) is not None]
        spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in held if s.nbytes())
        assert all(one[1] <= other[0] for one, other in pairwise(spans)), str(func)
        return out


def mlp() -> tuple[nn.Module, Callable[[], Any], Callable[..., Tensor]]:
    model = nn.Sequential(
        *(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Dropout(0.1)),
        *(nn.Linear(96, 96), nn.ReLU(inplace=True), nn.Linear(96, 10)),
    )
    return model, lambda: (torch.randn(8, 64), torch.randint(10, (8,))), classify


def resnet() -> tuple[nn.Module, Callable[[], Any], Callable[..., Tensor]]:
    cnn = load("examples/cnn.py")
    cnn.RESNET_BLOCKS["tiny"] = ("basic", [1, 1])
    return cnn.resnet("tiny"), lambda: (torch.randn(2, 3, 16, 16), torch.randint(10, (2,))), classify


def gpt2() -> tuple[nn.Module, Callable[[], Any], Callable[..., Tensor]]:
    model = small_transformers.gpt2(width=32, layers=2, heads=2, vocabulary=50, length=16)
    return model, lambda: (torch.randint(50, (2, 16)),), lambda m, ids: m(input_ids=ids, labels=ids)[0]


def classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def train(
    make: Callable[[], Any], device: torch.device, kind: type[torch.optim.Optimizer], *, arena: bool
) -> tuple[list[float], list[Tensor], Arena | None]:
    torch.manual_seed(0)
    model, batch, loss_of = make()
    model.to(device)
    optimizer = kind(model.parameters(), lr=0.01)
    losses: list[float] = []

    def loop() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, *(tensor.to(device) for tensor in batch()))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    used = None
    if arena:
        with run_planned(device=device, optimizer=optimizer) as used, Disjoint():
            loop()
    else:
        loop()
    return losses, [p.detach().cpu() for p in model.parameters()], used


def fallbacks(stats: ArenaStats) -> int:
    """Allocations that the ordinary allocator served since there is a plan."""
    return stats.unplanned + stats.unexpected + stats.busy


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("make", [mlp, resnet, gpt2])
def test_training_in_the_arena_gives_the_same_bits_and_shares_none(
    make: Callable[[], Any], kind: type[torch.optim.Optimizer], device: torch.device
) -> None:
    plain_losses, plain, _ = train(make, device, kind, arena=False)
    losses, parameters, arena = train(make, device, kind, arena=True)
    assert losses == plain_losses
    assert all(torch.equal(one, other) for one, other in zip(plain, parameters, strict=True))
    assert arena is not None
    stats = arena.stats
    assert stats.plans == 1
    assert stats.placed > 3 * fallbacks(stats)
    assert stats.into_out
    assert stats.load_nbytes <= stats.planned_nbytes <= stats.footprint_nbytes


def step_mlp(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()


def test_the_allocator_sees_the_plan_and_nothing_else(virtual: torch.device) -> None:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64, bias=False), nn.GELU())]
    model = nn.Sequential(*layers).to(virtual)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    images = torch.randn(512, 64).to(virtual)
    with run_planned(device=virtual, optimizer=optimizer) as arena:
        for _ in range(3):
            step_mlp(model, optimizer, images)
        optimizer.zero_grad()
        before = torch.virtual.memory_allocated() - arena.stats.planned_nbytes
        torch.accelerator.reset_peak_memory_stats(virtual)
        for _ in range(3):
            step_mlp(model, optimizer, images)
        peak = torch.virtual.max_memory_allocated() - before
    stats = arena.stats
    assert fallbacks(stats) == 0
    assert peak == stats.footprint_nbytes == stats.planned_nbytes


def test_on_the_virtual_accelerator_a_transformer_s_footprint_is_the_plan_s(virtual: torch.device) -> None:
    torch.manual_seed(0)
    model = small_transformers.gpt2(width=128, layers=3, heads=4, vocabulary=500, length=64).to(virtual)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(500, (4, 64)).to(virtual)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # optimizer states are no part of an iteration
    before = torch.virtual.memory_allocated()
    with run_planned(device=virtual, optimizer=optimizer) as arena:
        for _ in range(8):  # where kernels make temporaries before their result is learnt one by one
            step()
        learnt = arena.stats
        torch.accelerator.reset_peak_memory_stats(virtual)
        step()
        stats = arena.stats
    assert fallbacks(stats) == 0
    assert stats.copied_nbytes - learnt.copied_nbytes <= 64  # scalars, which travel with a launch
    assert stats.in_slot > 0
    added = torch.virtual.max_memory_allocated() - before
    # Workspaces within operators stay the allocator's: well below a percent here.
    assert stats.planned_nbytes <= added <= 1.01 * stats.planned_nbytes


def simple(inputs: Tensor) -> Tensor:
    """Views, in-place operators and saved tensors, in one forward and backward."""
    x = (inputs * 2).requires_grad_()
    y = x.exp() + 1
    z = y.view(-1)[3:]
    y.mul_(0.5)
    (gradient,) = torch.autograd.grad((z.square() @ z + y.t().sigmoid().sum()), x)
    return gradient


def test_tensors_and_views_kept_by_the_user_keep_their_values(device: torch.device) -> None:
    inputs = [torch.full((8, 4), 0.1 * i, device=device) for i in range(12)]
    expected = [simple(tensor).cpu() for tensor in inputs]
    kept: list[Tensor] = []
    with run_planned(device=device) as arena, Disjoint():
        for i, tensor in enumerate(inputs):
            result = simple(tensor)
            if i > 4:  # the plan was made while nobody kept anything
                kept.append(result.view(-1)[2:])
            del result
            arena.step()
    assert arena.stats.busy
    for got, want in zip(kept, expected[5:], strict=True):
        assert torch.equal(got.cpu(), want.view(-1)[2:])


def test_tensors_outlive_the_arena(device: torch.device) -> None:
    with run_planned(device=device) as arena:
        for _ in range(5):
            last = None
            last = torch.arange(100.0, device=device) * 2 + 1
            arena.step()
        assert arena.stats.placed
    del arena
    again = [torch.full((100,), 7.0, device=device) for _ in range(50)]
    assert last is not None
    assert torch.equal(last.cpu(), torch.arange(100.0) * 2 + 1)
    assert len(again) == 50


def test_arrays_that_share_memory_keep_their_slot() -> None:
    with run_planned() as arena:
        arrays = []
        for i in range(8):
            arrays.append((torch.ones(64) * i).numpy())
            arrays[:-4] = []
            arena.step()
        assert [array.tolist() for array in arrays] == [[float(i)] * 64 for i in range(4, 8)]


def test_changed_shapes_fall_back_and_a_new_size_is_planned_anew() -> None:
    def iteration(n: int) -> Tensor:
        return simple(torch.full((n, 4), 0.3))

    sizes = [8, 8, 8, 8, 5, 8, 8, 16, 16, 16, 16]
    expected = [iteration(n) for n in sizes]
    with run_planned() as arena, Disjoint():
        for n, want in zip(sizes, expected, strict=True):
            assert torch.equal(iteration(n), want)
            arena.step()
    assert arena.stats.plans == 2
    assert arena.stats.unexpected


def test_an_iteration_that_fails_leaves_the_next_ones_right(device: torch.device) -> None:
    inputs = torch.full((8, 4), 0.1, device=device)
    expected = simple(inputs).cpu()
    with run_planned(device=device) as arena, Disjoint():
        for i in range(10):
            if i in (4, 6):
                with pytest.raises(RuntimeError, match="cannot be multiplied"):
                    torch.mm(simple(inputs) + inputs, torch.zeros(7, 7, device=device))
            assert torch.equal(simple(inputs).cpu(), expected)
            arena.step()
    assert arena.stats.placed


def test_an_exception_leaves_the_context_and_the_tensors_usable() -> None:
    kept = []

    def loop() -> None:
        with run_planned() as arena:
            for i in range(6):
                result = torch.ones(16) * i
                arena.step()
            kept.append(result)
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert torch.equal(kept[0], torch.full((16,), 5.0))
    torch.ones(16).resize_(32)  # the ordinary allocator is back


def test_resizing_and_out_arguments_work_as_without_it() -> None:
    def iteration(i: int, resize: bool) -> list[Tensor]:
        first = torch.ones(32) * i
        second = torch.ones(48) + i
        if resize:
            first.resize_(64)[32:] = 3
            torch.mul(torch.full((96,), 2.0), 2, out=second.resize_(0))
        return [first.clone(), second.clone()]

    resized = [False] * 5 + [True] * 3 + [False] * 2
    expected = [iteration(i, resize) for i, resize in enumerate(resized)]
    with run_planned() as arena:
        for i, resize in enumerate(resized):
            got = iteration(i, resize)
            assert all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True))
            del got
            arena.step()
    assert arena.stats.placed


def test_a_graph_kept_across_iterations_backpropagates_the_same() -> None:
    def losses() -> Iterator[Tensor]:
        weight = torch.linspace(-1, 1, 36).view(6, 6).requires_grad_()
        previous = None
        for i in range(9):
            loss = ((weight @ weight * i).tanh() * weight.exp()).sum()
            if previous is not None:
                (previous + loss).backward(retain_graph=True)
            previous = loss.square() if i % 3 else None
            yield weight.grad.clone() if weight.grad is not None else torch.zeros(0)

    expected = list(losses())
    with run_planned() as arena, Disjoint():
        for got, want in zip(losses(), expected, strict=True):
            assert torch.equal(got, want)
            del got
            arena.step()
    assert arena.stats.iterations == 9


def test_recomputation_takes_slots_too() -> None:
    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    images = torch.randn(4, 16)

    def gradients() -> list[Tensor]:
        out = checkpoint(block, images.requires_grad_(), use_reentrant=False)
        return list(torch.autograd.grad(out.square().sum(), list(block.parameters())))

    expected = gradients()
    with run_planned() as arena, Disjoint():
        for _ in range(6):
            assert all(torch.equal(one, other) for one, other in zip(gradients(), expected, strict=True))
            arena.step()
    assert arena.stats.placed
    assert not arena.stats.unexpected


def test_what_a_loop_makes_within_one_operator_is_left_to_the_allocator() -> None:
    start, rows = torch.zeros((), dtype=torch.long), torch.linspace(-1, 1, 64).view(8, 8)

    def looped() -> Tensor:
        again = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ x.tanh()), (start, rows * 2))[1]
        return (again + rows).exp()

    expected = looped()
    with run_planned() as arena, Disjoint():
        for _ in range(6):
            assert torch.equal(looped(), expected)
            arena.step()
    assert arena.stats.placed


def test_pinned_and_foreign_memory_is_left_alone() -> None:
    with run_planned() as arena:
        for _ in range(5):
            lost = torch.empty(0).set_(torch.ones(4).untyped_storage())
            fakeish = torch.ones(3, device="meta") + 1
            sparse = torch.eye(3).to_sparse()
            assert torch.equal(sparse.to_dense(), torch.eye(3))
            assert fakeish.is_meta
            assert torch.equal(lost, torch.ones(4))
            del lost, fakeish, sparse
            arena.step()
    with pytest.raises(ConfigError, match="meta"), run_planned(device="meta"):
        pass


_UNARY = [torch.exp, torch.neg, torch.Tensor.t, torch.Tensor.contiguous, torch.tanh, torch.clone]
_BINARY = [torch.add, torch.mul, torch.mm, torch.maximum]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 99)] * 4), min_size=3, max_size=25), st.integers(0, 99))
def test_random_programs_compute_the_same(program: list[tuple[int, int, int, int]], keep: int) -> None:
    """Operators over a handful of variables that are overwritten, kept beyond the iteration, or changed."""

    def iteration(variables: list[Tensor], i: int) -> None:
        for op, a, b, target in program:
            if op == keep and i % 2:
                continue  # this iteration differs
            x, y = variables[a % 5], variables[b % 5]
            if op % 3 == 0:
                result = _BINARY[op % 4](x, y)
            elif op % 3 == 1:
                result = _UNARY[op % 6](x)
            else:
                result = x.add_(y.mean() + i) if op % 2 else torch.cat([x, y])[1:4].clamp(-1, 1)
            variables[target % 5] = result if bool(result.isfinite().all()) else torch.ones(3, 3) / 2

    def run(step: Callable[[], None]) -> list[Tensor]:
        variables = [torch.linspace(-1, 1, 9).view(3, 3) * k for k in range(5)]
        seen: list[Tensor] = []
        for i in range(6):
            iteration(variables, i)
            seen += [variable.clone() for variable in variables]
            step()
        return seen

    expected = run(lambda: None)
    with run_planned() as arena, Disjoint():
        got = run(arena.step)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


lives = st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(1, 40)), max_size=25)


@settings(deadline=None)
@given(lives, st.sampled_from([1, 16]))
def test_repeated_iterations_never_overlap(drawn: list[tuple[int, int | None]], granularity: int) -> None:
    births = [CyclicLife(nbytes=nbytes, length=length) for nbytes, length in drawn]
    plan = plan_cycle(births, smartpool, granularity=granularity)
    period = len(births)
    alive: dict[int, set[tuple[int, int]]] = {}
    for iteration in range(3):
        for i, (birth, offset) in enumerate(zip(births, plan.offsets, strict=True)):
            if offset is None:
                assert not birth.nbytes or birth.length is None or birth.length > period
                continue
            assert birth.length is not None
            assert offset + birth.nbytes <= plan.nbytes
            for time in range(iteration * period + i, iteration * period + i + birth.length):
                for begin, end in alive.get(time, ()):
                    assert offset + birth.nbytes <= begin or end <= offset
                alive.setdefault(time, set()).add((offset, offset + birth.nbytes))
    loads = [sum(end - begin for begin, end in alive.get(t, ())) for t in range(period, 2 * period)]
    assert plan.load_nbytes >= max(loads, default=0)
    if granularity == 1:
        assert cyclic_load(births).tolist() == loads


def test_bad_lives_are_refused() -> None:
    with pytest.raises(PlanError, match="-1 bytes"):
        CyclicLife(nbytes=-1, length=1)
    with pytest.raises(PlanError, match="0 allocations"):
        CyclicLife(nbytes=1, length=0)
    with pytest.raises(ConfigError, match="granularity=0"):
        plan_cycle([], smartpool, granularity=0)


def test_operators_that_write_into_their_slot_share_their_kernel_with_the_functional_variant() -> None:
    """torch's own table: structured means both variants are generated around one kernel."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = {entry["func"].split("(")[0]: entry for entry in yaml.load(path.read_text(), loader)}
    for functional_name, into in INTO_OUT.items():
        name = functional_name.removesuffix(".default")
        assert table[name]["structured_delegate"] == f"{name.split('.')[0]}.{into}"


def test_nobody_imports_numba_before_there_is_something_to_compile() -> None:
    program = "import sys, hetero.pool, hetero.simulate, hetero.swap; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_pool_needs_no_torch_until_the_arena_is_asked_for() -> None:
    """hetero itself may import torch, so the pool's files are loaded under a bare package of that name."""
    program = f"""
import sys, types
package = types.ModuleType("hetero")
package.__path__ = [{str(ROOT / "hetero")!r}]
sys.modules["hetero"] = package
import hetero.pool
assert "torch" not in sys.modules
assert hetero.pool.planned.__name__ == "planned"
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
