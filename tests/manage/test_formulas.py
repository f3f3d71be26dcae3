"""Forward formulas that ATen chooses by whether a dispatch mode is on: the bits are those without one."""

import functools
import pickle
import warnings

import pytest
import torch
from loops import batch, square_loss_of_32, train
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from twins import assert_twins, device

import hetero
from hetero.stm.interception import constructors, formulas
from hetero.stm.running.guard import guarded, unguarded
from hetero.stm.running.retry import Retry

WIDTH = 64


steps = functools.partial(train, loss_of=square_loss_of_32)


class Smoothed(nn.Module):
    """A loss whose forward ATen computes in two ways by the mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 20)
        # Where only the order of a sum differs, one may come to the same.
        self.losses = nn.ModuleList(
            nn.CrossEntropyLoss(torch.linspace(0.1, most, 10), label_smoothing=0.1)
            for most in (0.3, 0.5, 0.7, 0.9)
        )

    def forward(self, x):
        logits = self.last(self.first(x)).view(-1, 10)
        classes = torch.arange(len(logits), device=x.device)
        targets = (classes % 10).masked_fill(classes % 3 == 1, -100)
        return torch.stack([loss(logits, targets) for loss in self.losses])


def test_a_forward_formula_that_depends_on_the_mode_gives_the_same_bits():
    assert_twins(Smoothed, steps, share=0.9)


def test_without_stepping_aside_that_formula_gives_other_bits():
    x, model = torch.randn(32, WIDTH), Smoothed()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with guarded(Retry(lambda unless_free: 0), at_once=True):
        other = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert not all(torch.equal(*pair) for pair in zip(other, expected, strict=True))


@pytest.fixture
def smoothed():
    """Cross entropy of that formula, as long as a manager is there."""
    logits, targets, weights = torch.randn(8, 10), torch.arange(8), torch.rand(10)
    model = nn.Linear(WIDTH, WIDTH)
    with hetero.manage(model, device=device(), device_budget="64MiB"):
        yield lambda: nn.functional.cross_entropy(logits, targets, weights, label_smoothing=0.1)


def test_that_formula_takes_memory_by_values(smoothed):
    noted = []
    with guarded(Retry(lambda unless_free: 0, note_values=lambda: noted.append(None)), at_once=True):
        smoothed()
    assert noted


def test_what_that_formula_finds_no_memory_for_is_explained(smoothed, monkeypatch):
    def refuse(*given):
        raise torch.OutOfMemoryError("2 MiB")

    def explain(operator, error):
        return hetero.BudgetError(f"{operator}: {error}")

    monkeypatch.setattr(formulas, "_cross_entropy", functools.wraps(formulas._cross_entropy)(refuse))
    with guarded(Retry(lambda unless_free: 0, explain=explain), at_once=True):
        with pytest.raises(hetero.BudgetError, match="cross_entropy_loss: 2 MiB"):
            smoothed()
        assert len(_get_current_dispatch_mode_stack()) == 1


def test_modes_stay_where_they_are_if_no_room_can_be_made(smoothed):
    def relieve(unless_free):
        raise KeyboardInterrupt

    with guarded(Retry(relieve), at_once=True):
        with pytest.raises(KeyboardInterrupt):
            smoothed()
        assert len(_get_current_dispatch_mode_stack()) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_that_formula_can_be_scripted(smoothed):
    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor, targets: torch.Tensor):
            return nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)

    given = torch.randn(8, 10), torch.arange(8)
    assert torch.equal(torch.jit.script(Loss())(*given), Loss()(*given))


class Spelled(nn.Module):
    """Speech: frames by batches by letters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x)).view(8, 4, WIDTH).log_softmax(-1)


# Where targets and lengths are; "numbers": as a list.
LENGTHS = [("cpu", "cpu"), ("cpu", "device"), ("device", "cpu"), ("device", "device"), ("device", "numbers")]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("targets_at", "lengths_at"), LENGTHS)
def test_lengths_of_ctcs_loss_may_be_anywhere(targets_at, lengths_at, reduction):
    def loss_of(model, target):
        places = {"cpu": torch.device("cpu"), "device": target}
        targets = (torch.arange(12).view(4, 3) % 7 + 1).to(places[targets_at])
        lengths = [torch.tensor([8, 7, 6, 8]), torch.tensor([3, 2, 3, 1])]
        lengths = [
            each.tolist() if lengths_at == "numbers" else each.to(places[lengths_at]) for each in lengths
        ]
        return nn.functional.ctc_loss(
            model(batch(target, 32)), targets, *lengths, reduction=reduction, zero_infinity=True
        ).sum()

    assert_twins(Spelled, functools.partial(train, loss_of=loss_of), share=0.9)


def test_a_length_of_one_sequence_may_have_no_dimension():
    def loss_of(model, target):
        frames = model(batch(target, 32))[:, 0]
        return nn.functional.ctc_loss(frames, torch.arange(1, 4), torch.tensor(8), torch.tensor(3))

    assert_twins(Spelled, functools.partial(train, loss_of=loss_of), share=0.9)


def _nuclear(matrix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.nuclear_norm(matrix)


# What asks for singular values or eigenvalues alone. Looked up when it is called, as functions are replaced.
SPECTRA = {
    "svdvals": lambda matrix: torch.linalg.svdvals(matrix),
    "svd": lambda matrix: torch.svd(matrix, compute_uv=False).S,
    "method svd": lambda matrix: matrix.svd(compute_uv=False)[1],
    "eigvalsh": lambda matrix: torch.linalg.eigvalsh(matrix + matrix.t()),
    "eigvals": lambda matrix: torch.linalg.eigvals(matrix).abs(),
    "cond": lambda matrix: torch.linalg.cond(matrix),
    "cond by name": lambda matrix: torch.linalg.cond(input=matrix, p=-2),
    "matrix_norm": lambda matrix: torch.linalg.matrix_norm(matrix, 2),
    "norm": lambda matrix: torch.linalg.norm(matrix, "nuc"),
    "norm of dimensions": lambda matrix: torch.linalg.norm(matrix[None], ord=2, dim=(1, 2)),
    "old norm": lambda matrix: torch.norm(matrix, "nuc"),
    "method norm": lambda matrix: matrix.norm("nuc"),
    "nuclear_norm": _nuclear,
    "matrix_rank": lambda matrix: torch.linalg.matrix_rank(matrix).to(matrix.dtype),
}


class Normalized(nn.Module):
    """Weights and activations divided by something of their spectra, of which nothing is recorded."""

    def __init__(self, spectrum):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 8 for _ in range(4))
        self.spectrum = spectrum

    def forward(self, x):
        for weight in self.weights:
            with torch.no_grad():
                squares = x.t() @ x + torch.eye(WIDTH, device=x.device)
                size = (self.spectrum(weight) + self.spectrum(squares)).amax()
            x = torch.tanh(x @ (weight / size))
        return x


@pytest.mark.parametrize("share", [0.7, 1.5])
@pytest.mark.parametrize("named", SPECTRA)
def test_spectra_of_which_nothing_is_recorded_are_those_without_a_mode(named, share):
    assert_twins(lambda: Normalized(SPECTRA[named]), steps, share=share)


@pytest.mark.parametrize("named", ["svdvals", "eigvalsh", "matrix_norm", "norm", "old norm", "cond", "svd"])
def test_without_stepping_aside_spectra_are_others(named):
    # So that the test above cannot pass by chance: torch still chooses by the mode.
    torch.manual_seed(0)
    matrices = torch.randn(8, WIDTH, WIDTH)  # a sum may come to the same
    expected = [SPECTRA[named](matrix) for matrix in matrices]
    with guarded(Retry(lambda unless_free: 0), at_once=True):
        seen = [SPECTRA[named](matrix) for matrix in matrices]
    assert not all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))


def test_spectra_of_ordinary_norms_are_tried_again():
    """No mode steps aside for what does not depend on it."""
    seen = []

    class Counted(Retry):
        def make_room(self, nbytes):
            seen.append(nbytes)

    matrix = torch.randn(WIDTH, WIDTH)
    model = nn.Linear(WIDTH, WIDTH)
    with (
        hetero.manage(model, device=device(), device_budget="64MiB"),
        guarded(Counted(lambda unless_free: 0), at_once=True),
    ):
        torch.linalg.norm(matrix)
        torch.linalg.norm(matrix, 2, dim=-1)
        torch.linalg.norm(matrix, 2, -1)
        torch.linalg.norm(matrix[0], 2)
        torch.linalg.matrix_norm(matrix)
        torch.norm(matrix)
        torch.svd(matrix)
        torch.linalg.svdvals(matrix.clone().requires_grad_())
        assert not seen
        torch.linalg.svdvals(matrix)
        assert seen


def test_they_are_torchs_own_functions_again_afterwards():
    before = [getattr(place, name) for place, name, _ in formulas.REPLACEMENTS]
    method = torch.randn(2, 2).matmul
    with hetero.manage(nn.Linear(WIDTH, WIDTH), device=device(), device_budget="64MiB"):
        assert torch.linalg.svdvals not in before
        assert type(torch.randn(2, 2).matmul) is not type(method)
    assert [getattr(place, name) for place, name, _ in formulas.REPLACEMENTS] == before
    assert type(torch.randn(2, 2).matmul) is type(method)


def test_what_a_class_of_the_users_is_told_of_are_torchs_own_functions():
    told = []

    class Listening(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    def tell():
        told.clear()
        x = torch.randn(4, 4).as_subclass(Listening)
        torch.randn(4, 4) @ x @ torch.randn(4, 4)
        x.matmul(x), torch.matmul(x, x), torch.linalg.svdvals(x), x.svd(), torch.svd(x)
        return list(told)

    before = tell()
    with hetero.manage(nn.Linear(WIDTH, WIDTH), device=device(), device_budget="64MiB"):
        assert tell() == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_spectra_can_be_scripted(smoothed):
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor):
            return torch.linalg.svdvals(x) + torch.linalg.matrix_norm(x, 2)

    matrix = torch.randn(8, 8)
    assert torch.equal(torch.jit.script(Spectrum())(matrix), Spectrum()(matrix))


# Of one matrix that has no gradient with each of several.
PRODUCTS = {
    "matmul": lambda x, one: torch.matmul(x, one),
    "by name": lambda x, one: torch.matmul(input=x, other=one),
    "by name, the other way round": lambda x, one: torch.matmul(other=one, input=x),
    "of linalg": lambda x, one: torch.linalg.matmul(x, one),
    "method": lambda x, one: x.matmul(one),
    "method by name": lambda x, one: x.matmul(other=one),
    "operator": lambda x, one: x @ one,
    "the one first": lambda x, one: (one @ x.mT).mT,
    "reflected": lambda x, one: one.__rmatmul__(x),
}


class Projecting(nn.Module):
    """Activations times a fixed matrix, a frozen one, and, not recorded, one of their own."""

    def __init__(self, multiply):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("fixed", torch.randn(1, WIDTH, WIDTH) / 8)
        self.frozen = nn.Parameter(torch.randn(1, WIDTH, WIDTH) / 8, requires_grad=False)
        self.multiply = multiply

    def forward(self, x):
        x = x.view(-1, 2, WIDTH)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = self.multiply(x, self.fixed) + self.multiply(x, self.frozen)
            with torch.no_grad():
                scale = self.multiply(x, x[:1].mT @ x[:1]).abs().amax()
            x = x / scale
        return x


def trained_and_evaluated(model, optimizer, target):
    seen = steps(model, optimizer, target)
    with torch.no_grad():
        seen += [model(torch.randn(32, WIDTH).to(target)) for _ in range(2)]
    return [*seen, steps(model, optimizer, target)]


@pytest.mark.parametrize("share", [0.7, 1.5])
@pytest.mark.parametrize("named", PRODUCTS)
def test_products_of_one_matrix_with_each_of_several_are_those_without_a_mode(named, share):
    assert_twins(lambda: Projecting(PRODUCTS[named]), trained_and_evaluated, share=share)


def test_without_replacing_them_products_are_others():
    # So that the test above cannot pass by chance: torch still chooses by the mode. Which widths tell, depends on the
    # processor.
    pairs = [(torch.randn(16, 2, width), torch.randn(1, width, width)) for width in (8, WIDTH, 300)]
    expected = [several @ one for several, one in pairs]
    with guarded(Retry(lambda unless_free: 0), at_once=True):
        found = [several @ one for several, one in pairs]
    assert not all(map(torch.equal, found, expected))


@pytest.fixture
def guarding():
    """A guard that is on, beside a manager."""
    with (
        hetero.manage(nn.Linear(WIDTH, WIDTH), device=device(), device_budget="64MiB"),
        guarded(Retry(lambda unless_free: 0), at_once=True),
    ):
        yield


SHAPES = [
    *(((1, 4, 6), (3, 6, 5)), ((3, 4, 6), (1, 6, 5)), ((1, 4, 6), (1, 6, 5)), ((3, 4, 6), (3, 6, 5))),
    *(
        ((0, 4, 6), (1, 6, 5)),
        ((1, 4, 0), (3, 0, 5)),
        ((3, 4, 6), (6, 5)),
        ((6,), (1, 6, 5)),
        ((2, 1, 4, 6), (1, 6, 5)),
    ),
]


@pytest.mark.parametrize(("first", "second"), SHAPES)
@pytest.mark.parametrize("trains", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_all_shapes_and_their_gradients(first, second, trains, guarding):
    torch.manual_seed(0)
    operands = [
        torch.randn(shape, requires_grad=is_trained)
        for shape, is_trained in zip((first, second), trains, strict=True)
    ]
    trained = [operand for operand in operands if operand.requires_grad]

    def compute():
        product = torch.matmul(*operands)
        gradients = torch.autograd.grad(product.square().sum(), trained) if trained else ()
        return [product, *gradients]

    seen = compute()
    with unguarded():
        expected = compute()
    assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))


def test_what_matmul_refuses_it_refuses(guarding):
    for first, second in (((1, 4, 6), (3, 5, 6)), ((2, 4, 6), (3, 6, 5))):
        with pytest.raises(RuntimeError, match=r"must match|Expected size"):
            torch.matmul(torch.randn(first), torch.randn(second))
    with pytest.raises(TypeError, match="matmul"):
        torch.matmul(torch.randn(1, 4, 6))
    with pytest.raises(RuntimeError, match="type"):
        torch.matmul(torch.randn(1, 4, 6), torch.randn(3, 6, 5).double())


class Experts(nn.Module):
    """Weights of several, used twice for the same input, and a plain leaf likewise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(16, WIDTH, WIDTH) / 8)
        self.leaf = [torch.randn(16, WIDTH, WIDTH)]

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            leaf = self.leaf[0].to(x.device).detach().requires_grad_()
            x = x[None, :2].detach()
            y = x @ self.weights + x @ self.weights + x @ leaf
            y = y + torch.matmul(x * 2, self.weights) + torch.matmul(x * 2, leaf)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), leaf, retain_graph=True)
        return self.first(y.float()) + gradient.mean()


@pytest.mark.parametrize("share", [0.9, 4.0])
def test_products_with_one_keep_autocasts_casts_of_the_others(share):
    assert_twins(Experts, steps, share=share)


def test_whoever_is_told_of_products_is_told_of_these(guarding):
    told = []

    class Only(torch.Tensor):
        """Knows one function."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            told.append(func)
            assert func.__name__ == "matmul"
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            told.append(func)
            return func(*args, **(kwargs or {}))

    several, one = torch.randn(3, 4, 6), torch.randn(1, 6, 5)
    torch.matmul(several.as_subclass(Only), one)
    assert len(told) == 1
    with Noting():
        torch.matmul(several, one)
    assert len(told) == 2


def test_a_context_of_a_device_is_nobody_who_is_told(guarding):
    several, one = torch.randn(16, 2, WIDTH), torch.randn(1, WIDTH, WIDTH)
    with unguarded():
        expected = several @ one
    with torch.device("cpu"):
        assert torch.equal(several @ one, expected)


def test_functions_can_be_pickled(guarding):
    for place, name, _ in (*formulas.REPLACEMENTS, *constructors.REPLACEMENTS):
        if place not in (torch.Tensor, torch._VF, torch._C._nn):
            function = getattr(place, name)
            assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_factors_and_those_on_the_meta_device_are_torchs_own_matter(guarding):
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(2, 3)])
    products = torch.matmul(nested, nested.transpose(1, 2)).unbind()
    with unguarded():
        expected = torch.matmul(nested, nested.transpose(1, 2)).unbind()
    assert all(map(torch.equal, products, expected))
    assert torch.matmul(torch.randn(3, 4, 6, device="meta"), torch.randn(1, 6, 5, device="meta")).shape == (
        3,
        4,
        5,
    )


def test_products_within_a_transform_or_another_mode_are_computed_as_these_do(guarding):
    several, one = torch.randn(2, 3, 4, 6), torch.randn(1, 6, 5)
    seen = torch.func.vmap(lambda x: x @ one)(several)
    calls = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Noting():
        several[0] @ one
    assert torch.ops.aten.mm.default in calls
    with unguarded(), Noting():  # torch chooses by whether there is a mode, within a transform as well
        assert torch.equal(seen, torch.func.vmap(lambda x: x @ one)(several))
