"""Models with compiled blocks train as the same compiled blocks do unmanaged, bit for bit."""

import contextlib
import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerators import GAPS, libraries_bytes, races
from equality import assert_identical, device, fresh_memory, peak_memory, values_of
from torch import nn

import hetero

pytestmark = [
    # Dynamo looks at the gradients of its inputs, be they leaves or not, managed or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

WIDTH = 64
STEPS = 4


class Block(nn.Module):
    """A transformer's block without the attention: norm, two products, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def _compile_in_place(model: Model, backend: str) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


def _compile_into_wrappers(model: Model, backend: str) -> None:
    for place, layer in enumerate(model.layers):
        model.layers[place] = torch.compile(layer, backend=backend)


def _compile_whole(model: Model, backend: str) -> None:
    model.compile(backend=backend)


COMPILERS = {
    "in_place": _compile_in_place,
    "wrappers": _compile_into_wrappers,
    "whole": _compile_whole,
}


def _train(
    compile_blocks: Callable[[Model, str], None],
    backend: str,
    target: torch.device,
    budget: int | None,
    *,
    after: int | None = None,
    kind: type[Model] = Model,
) -> tuple[dict[str, torch.Tensor], Model]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    if budget is None:
        model.to(target)
    if after is None:
        compile_blocks(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    manager = None if budget is None else hetero.manage(model, optimizer, device=target, device_budget=budget)
    found = {}
    for step in range(STEPS):
        if step == after:
            compile_blocks(model, backend)
        x = torch.randn(4, 16, device=target)
        loss = (model(x) ** 2).mean()
        loss.backward()
        found[f"loss {step}"] = loss.detach().cpu()
        found |= {f"{step} {name}": value for name, value in values_of(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                found["eval"] = model.eval()(x).cpu()
            model.train()
    if manager is not None:
        manager.close()
    return found | values_of(model), model


@functools.cache
def _unmanaged(
    how: str, backend: str, after: int | None = None, kind: type[Model] = Model
) -> tuple[dict[str, torch.Tensor], int]:
    """What training gives on the device, once for all budgets, and the bytes of the parameters."""
    found, model = _train(COMPILERS[how], backend, device(), None, after=after, kind=kind)
    return found, sum(p.nbytes for p in model.parameters())


class Checkpointed(Model):
    """In each of the blocks, with a checkpoint that computes it again within backward: what records it is compiled
    there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        return self.last(x)


@torch.library.custom_op("hetero_tests::average", mutates_args=("average",))
def average(average: torch.Tensor, x: torch.Tensor) -> None:
    average.lerp_(x.detach().mean(0), 0.1)


@average.register_fake
def _(average: torch.Tensor, x: torch.Tensor) -> None:
    return None


class Averaging(Model):
    """An operator of its own writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        average(self.seen, self.first(x))
        return super().forward(x)


# Inductor generates code for devices it knows; the virtual one is none of them.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["in_place", "wrappers"])
def test_compiled_blocks_train_to_the_same_bits_under_a_budget(how: str, backend: str) -> None:
    target = device()
    unmanaged, parameter_bytes = _unmanaged(how, backend)
    torch._dynamo.reset()
    fresh_memory()
    # Activations take about 64 KiB; of the four blocks about two fit.
    budget = libraries_bytes() + 64 * 1024 + parameter_bytes * 5 // 8
    managed, model = _train(COMPILERS[how], backend, target, budget)
    assert_identical(managed, unmanaged)
    assert peak_memory() <= budget + GAPS
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert races() == []


@pytest.mark.parametrize("share", [0.75, 4.0])
@pytest.mark.parametrize(
    ("kind", "how"), [(Checkpointed, "in_place"), (Averaging, "in_place"), (Averaging, "whole")]
)
def test_what_a_compiler_differentiates_is_none_of_the_models_backwards(
    kind: type[Model], how: str, share: float
) -> None:
    target = device()
    unmanaged, parameter_bytes = _unmanaged(how, "aot_eager", kind=kind)
    fresh_memory()
    region = parameter_bytes if how == "whole" else 0
    budget = libraries_bytes() + 64 * 1024 + region + int(parameter_bytes * share)
    managed, _ = _train(COMPILERS[how], "aot_eager", target, budget, kind=kind)
    assert_identical(managed, unmanaged)
    assert peak_memory() <= budget + GAPS
    assert races() == []


def test_compiled_autograd_is_refused_and_nothing_is_lost() -> None:
    from torch._dynamo import compiled_autograd

    target = device()
    torch.manual_seed(0)
    model, other = Model(), nn.Linear(16, 16).to(target)
    twin = copy.deepcopy(model).to(target)
    x = torch.randn(4, 16, device=target)
    twin(x).square().mean().backward()
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        loss = model(x).square().mean()
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(hetero.ManageError, match="compiled autograd"),
        ):
            loss.backward()
        loss.backward()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            other(x).sum().backward()  # is nobody's business
        for parameter, same in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.grad, same.grad.cpu())


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("budget", ["blocks", "everything"])
@pytest.mark.parametrize("how", COMPILERS)
def test_what_is_compiled_while_managed_trains_to_the_same_bits(how: str, budget: str, after: int) -> None:
    target = device()
    unmanaged, parameter_bytes = _unmanaged(how, "aot_eager", after)
    fresh_memory()
    blocks = libraries_bytes() + 64 * 1024 + parameter_bytes * (10 if how == "whole" else 5) // 8
    nbytes = blocks if budget == "blocks" else 4 << 20
    managed, model = _train(COMPILERS[how], "aot_eager", target, nbytes, after=after)
    assert_identical(managed, unmanaged)
    assert peak_memory() <= nbytes + GAPS
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert races() == []


def test_a_managed_model_within_a_compiled_function_is_refused() -> None:
    target = device()
    model = Model()
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        outer = torch.compile(model, backend="eager")
        with pytest.raises(hetero.ManageError, match=r"block\.compile\(\)"):
            outer(torch.randn(2, 16, device=target))
        model(torch.randn(2, 16, device=target)).sum().backward()


@pytest.mark.parametrize("way", ["beside", "in a function"])
def test_a_part_within_a_compiled_function_is_refused(way: str) -> None:
    target = device()
    model = Parts()
    x = torch.randn(2, WIDTH, device=target)
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        torch._dynamo.reset()
        part = model.encoder
        outer = torch.compile(part if way == "beside" else lambda x: part(x), backend="aot_eager")
        with pytest.raises(hetero.ManageError, match=r"encoder\.compile\(\)"):
            outer(x)
        model.encoder(x).sum().backward()


@pytest.mark.parametrize("budget", ["1MiB", "64MiB"])  # everything fits the larger
@pytest.mark.parametrize("way", ["method", "in a function"])
def test_a_step_within_a_compiled_function_is_refused_and_nothing_is_lost(way: str, budget: str) -> None:
    target = device()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with hetero.manage(model, optimizer, device=target, device_budget=budget):
        torch._dynamo.reset()
        step = torch.compile(optimizer.step if way == "method" else lambda: optimizer.step(), backend="eager")
        for _ in range(6):
            model(torch.randn(2, 16, device=target)).sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(hetero.ManageError, match=r"outside of what torch\.compile compiles"):
                step()
            assert all(map(torch.equal, model.parameters(), before))
            optimizer.step()
            optimizer.zero_grad()
            assert not any(map(torch.equal, model.parameters(), before))
    model(torch.randn(2, 16)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    step()
    assert not any(map(torch.equal, model.parameters(), before))


def _train_by(
    backward: Callable[[Any, int], torch.Tensor],
    build: Callable[[], nn.Module],
    budget: int | None,
    *,
    steps: int,
) -> dict[str, torch.Tensor]:
    """Losses and values of a run, unmanaged without ``budget``; ``backward(model, step)`` gives the loss."""
    torch._dynamo.reset()
    fresh_memory()
    torch.manual_seed(0)
    model = build()
    if budget is None:
        model.to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    manager = (
        None if budget is None else hetero.manage(model, optimizer, device=device(), device_budget=budget)
    )
    found = {}
    for step in range(steps):
        found[f"loss {step}"] = backward(model, step).detach().cpu()
        optimizer.step()
        optimizer.zero_grad()
    if manager is not None:
        manager.close()
        assert budget is not None
        assert peak_memory() <= budget + GAPS
    return found | values_of(model)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(), Block()


def _compile_part(model: Parts, way: str) -> None:
    if way == "in place":
        model.encoder.compile(backend="aot_eager")
    elif way == "wrapper":
        model.encoder = torch.compile(model.encoder, backend="aot_eager")
    else:
        model.encoder.up = torch.compile(model.encoder.up, backend="aot_eager")


def _train_parts(way: str, budget: int | None, after: int) -> dict[str, torch.Tensor]:
    """The model itself is never called. It has 200 KiB of weights."""

    def backward(model: Parts, step: int) -> torch.Tensor:
        if step == after:
            _compile_part(model, way)
        loss = model.decoder(model.encoder(torch.randn(4, WIDTH, device=device()))).square().mean()
        loss.backward()
        return loss

    return _train_by(backward, Parts, budget, steps=8)


@functools.cache
def _unmanaged_parts(way: str, after: int) -> dict[str, torch.Tensor]:
    return _train_parts(way, None, after)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("budget", [240 << 10, 4 << 20])
@pytest.mark.parametrize("way", ["in place", "wrapper", "nested"])
def test_parts_that_are_compiled_while_managed_train_to_the_same_bits(
    way: str, budget: int, after: int
) -> None:
    expected = _unmanaged_parts(way, after)
    assert_identical(_train_parts(way, libraries_bytes() + budget, after), expected)
    assert races() == []


def test_a_forward_that_is_replaced_by_a_whole_compiled_function_says_what_to_call() -> None:
    target = device()
    model = Model()
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        torch._dynamo.reset()
        model(torch.randn(2, 16, device=target)).sum().backward()
        model.last.forward = torch.compile(model.last.forward, backend="aot_eager", fullgraph=True)
        with pytest.raises(hetero.ManageError, match=r"last\.compile\(\)"):
            model(torch.randn(2, 16, device=target))


class ByClass(nn.Module):
    """Its class's forward is compiled; so are the method and the function of those below."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.nn.functional.gelu(self.up(x))


class ByMethod(ByClass):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)

    @torch.compile(backend="aot_eager")
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.nn.functional.gelu(self.up(x))


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


class ByFunction(ByClass):
    whole = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.compile(_scaled, backend="aot_eager", fullgraph=self.whole)
        return self.up(scaled(x, self.scale))


class Late(ByClass):
    """Its own forward is replaced after the second iteration."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.up(x)


def _train_within(kind: type[ByClass], budget: int | None) -> dict[str, torch.Tensor]:
    """Gradients of two backwards are added up: a compiler that looks at a parameter finds one."""

    def backward(model: nn.Sequential, step: int) -> torch.Tensor:
        if kind is Late and step == 2:
            model[1].forward = torch.compile(model[1].forward, backend="aot_eager")
        for _ in range(2):
            loss = model(torch.randn(4, WIDTH, device=device())).square().mean()
            loss.backward()
        return loss

    return _train_by(backward, lambda: nn.Sequential(kind(), kind(), kind()), budget, steps=6)


@functools.cache
def _unmanaged_within(kind: type[ByClass]) -> dict[str, torch.Tensor]:
    return _train_within(kind, None)


@pytest.mark.parametrize("budget", [48 << 10, 4 << 20])
@pytest.mark.parametrize("kind", [ByClass, ByMethod, ByFunction, Late])
def test_compiled_functions_within_a_model_train_to_the_same_bits(kind: type[ByClass], budget: int) -> None:
    expected = _unmanaged_within(kind)
    assert_identical(_train_within(kind, libraries_bytes() + budget), expected)
    assert races() == []


class Multiplying(nn.Module):
    """Of functions that are replaced while operators are intercepted (`hetero.stm.interception.formulas`)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("fixed", torch.randn(1, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(self.layer(x).view(-1, 2, WIDTH), self.fixed)
        with torch.no_grad():
            size = torch.linalg.matrix_norm(y[:, 0], 2) + torch.linalg.svdvals(y[0]).amax()
        return ((y @ self.fixed) / size).view(-1, WIDTH)


@pytest.mark.parametrize("budget", [112 << 10, 4 << 20])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_that_are_replaced_break_no_graph_and_are_compiled_as_torchs_own(
    backend: str, budget: int
) -> None:
    def run(target: torch.device, budget: int | None) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Multiplying() for _ in range(3)))
        for block in model:
            block.compile(backend=backend, fullgraph=True)
        found = {}
        with contextlib.ExitStack() as stack:
            if budget is None:
                model.to(target)
            else:
                stack.enter_context(hetero.manage(model, device=target, device_budget=budget))
            for step in range(4):
                loss = model(torch.randn(32, WIDTH, device=target)).square().sum()
                loss.backward()
                found[f"loss {step}"] = loss.detach().cpu()
        return found | values_of(model)

    expected = run(device(), None)
    assert_identical(run(device(), libraries_bytes() + fresh_memory() + budget), expected)


def test_a_function_that_is_compiled_without_breaks_says_what_to_do() -> None:
    target = device()
    model = nn.Sequential(ByFunction(), ByFunction())
    torch._dynamo.reset()
    with hetero.manage(model, None, device=target, device_budget="48KiB"):
        ByFunction.whole = True
        try:
            with pytest.raises(torch._dynamo.exc.TorchDynamoException) as error:
                model(torch.randn(2, WIDTH, device=target))
        finally:
            ByFunction.whole = False
        assert any("fullgraph" in note for note in error.value.__notes__)
        model(torch.randn(2, WIDTH, device=target)).sum().backward()


@pytest.mark.parametrize("budget", ["64KiB", "128KiB", "1MiB"])
def test_a_compiled_average_of_parameters_is_the_same(budget: str) -> None:
    """It is given parameters after each step, wherever they live then."""

    def train(budget: str | None) -> list[torch.Tensor]:
        target = device()
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        if budget is None:
            model.to(target)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        manager = budget and hetero.manage(model, optimizer, device=target, device_budget=budget)
        updated = torch.compile(lambda a, b: a * 0.9 + b.detach() * 0.1, backend="eager")
        averages = [p.detach().cpu().clone() for p in model.parameters()]
        for _ in range(8):
            model(torch.randn(8, WIDTH, device=target)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averages = [updated(a.to(p.device), p) for a, p in zip(averages, model.parameters(), strict=True)]
        if manager:
            manager.close()
        return [average.cpu() for average in averages]

    assert all(map(torch.equal, train(budget), train(None)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_compiler_keeps_is_nobody_who_looks(backend: str) -> None:
    """Of a norm of gradients of several shapes: tensors without values, whose sizes are no numbers."""
    target = device()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    norm = torch.compile(lambda gradient: gradient.square().sum().sqrt(), backend=backend)
    with hetero.manage(model, optimizer, device=target, device_budget="1MiB") as manager:
        # Where somebody holds a gradient for a moment, it is tried again some forwards later.
        for _ in range(24):
            model(torch.randn(8, 64, device=target)).square().mean().backward()
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    assert parameter.grad is not None
                    assert torch.equal(norm(parameter.grad), parameter.grad.square().sum().sqrt())
            optimizer.step()
            optimizer.zero_grad()
        assert manager.stats.settled_forwards > 0


def test_model_compiled_as_a_whole_trains_to_the_same_bits() -> None:
    target = device()
    unmanaged, _ = _unmanaged("whole", "aot_eager")
    managed, _ = _train(_compile_whole, "aot_eager", target, 4 << 20)
    assert_identical(managed, unmanaged)


def test_what_does_not_fit_into_a_compiled_region_is_explained() -> None:
    target = device()
    model = Model()
    _compile_whole(model, "aot_eager")
    torch._dynamo.reset()
    fresh_memory()
    with hetero.manage(model, None, device=target, device_budget="1MiB"), torch.no_grad():
        with pytest.raises(
            hetero.BudgetError, match=r"compiled Model needs .* raise device_budget"
        ) as caught:
            model(torch.randn(2048, 16, device=target))
        assert "compile blocks" in caught.value.__notes__[0]
        assert isinstance(caught.value, torch.OutOfMemoryError)
    del caught  # whose frames hold what did fit
    fresh_memory()


@pytest.mark.parametrize("how", COMPILERS)
def test_closing_gives_the_compiled_calls_back(how: str) -> None:
    target = device()
    model = Model()
    COMPILERS[how](model, "eager")
    before = [dict(module.__dict__).get("_compiled_call_impl") for module in model.modules()]
    manager = hetero.manage(model, None, device=target, device_budget="1MiB")
    model(torch.randn(2, 16, device=target)).sum().backward()
    manager.close()
    assert [dict(module.__dict__).get("_compiled_call_impl") for module in model.modules()] == before


def test_an_exception_in_a_compiled_block_leaves_the_parameters_in_their_places() -> None:
    target = device()
    model = Model()
    _compile_in_place(model, "eager")
    own = dict(model.named_parameters())
    with hetero.manage(model, None, device=target, device_budget="1MiB"):
        with pytest.raises(RuntimeError):
            model.layers[0](torch.randn(2, WIDTH + 1, device=target))
        assert all(parameter is own[name] for name, parameter in model.named_parameters())
        model(torch.randn(2, 16, device=target)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_blocks_are_not_compiled_again_at_every_step() -> None:
    compiled = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    target = device()
    torch._dynamo.reset()
    torch.manual_seed(0)
    fresh_memory()
    model = Model()
    for layer in model.layers:
        layer.compile(backend=counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hetero.manage(model, optimizer, device=target, device_budget="192KiB"):
        counts = []
        for _ in range(6):
            model(torch.randn(4, 16, device=target)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(compiled))
    assert counts == [1] * 6  # the four blocks share one code


class Apart(nn.Module):
    """Its forward is kept from compilers, which is no compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    @torch.compiler.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Unnamed(nn.Module):
    """It cannot be called."""

    @property
    def forward(self) -> None:
        raise AttributeError("none")


def test_a_forward_that_is_kept_from_compilers_needs_one_parameter_at_a_time() -> None:
    model = Apart()
    model.unnamed = Unnamed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = device()
    with hetero.manage(model, optimizer, device=target, device_budget="64KiB"):  # of 97
        for _ in range(3):
            model(torch.randn(2, WIDTH, device=target)).sum().backward()
            optimizer.step()


_FIRST_USE = """
import sys, torch, hetero
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.compiled = nn.Linear(64, 64), None

    def forward(self, x):
        if self.compiled is None:
            self.compiled = torch.compile(lambda x, w: x * w, backend="eager")
        return self.compiled(self.up(x), self.up.bias)

device = hetero.virtual_device(memory="64MiB")
model = Model()
x = torch.randn(2, 64)
with torch.no_grad(), hetero.manage(model, None, device=device, device_budget="32KiB"):
    assert "torch._dynamo" not in sys.modules
    if sys.argv[1] == "within":
        found = model(x.to(device)).cpu()
    else:
        product = torch.compile(lambda x, w: x * w, backend="eager")
        found = product(model.up(x), model.up.bias)
assert torch.equal(found, model.up(x) * model.up.bias)
"""


@pytest.mark.parametrize("place", ["within", "beside"])
def test_a_compiler_that_is_loaded_late_is_kept_out_as_well(place: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FIRST_USE, place]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the virtual device is what it uses
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=hidden)
    assert result.returncode == 0, result.stderr
