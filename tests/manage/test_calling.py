"""`hetero.devices.calling`: what operators call within themselves counts below a mode as without one."""

import contextlib

import pytest
import torch
from accelerators import device
from bits import same_bits
from loops import batch, square_loss
from torch import nn
from torch.nn import functional as F
from twins import assert_twins

from hetero.devices.calling import call
from hetero.stm.running.guard import guarded
from hetero.stm.running.retry import Retry

WIDTH = 64


def _given(dtype, device):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 8, 8, dtype=dtype, generator=made).to(device) for _ in range(2)]


COMPLEX = {
    "pinv": lambda a, b: torch.linalg.pinv(a),
    "hermitian pinv": lambda a, b: torch.linalg.pinv(a @ a.mH, hermitian=True),
    "solution": lambda a, b: torch.linalg.lstsq(a, b).solution,
    "residuals": lambda a, b: torch.linalg.lstsq(a[..., :4], b, driver="gels").residuals,
    "vecdot": lambda a, b: torch.linalg.vecdot(a, b),
    "hfft": lambda a, b: torch.fft.hfft(a),
    "ihfft2": lambda a, b: torch.fft.ihfft2(a.real),
    "inner": lambda a, b: torch.inner(a[0], b[0].conj()),
    "einsum": lambda a, b: torch.einsum("bij,bkj->bik", a, b.conj()),
    "parts": lambda a, b: torch.linalg.multi_dot([a.conj().imag[0], b.conj().imag[0], a.conj().imag[1]]),
}
REAL = {
    "pinv": lambda a, b: torch.linalg.pinv(a),
    "einsum": lambda a, b: torch.einsum("bij,bkj->bik", a, b),
    "inner": lambda a, b: torch.inner(a, b),
    "multi_dot": lambda a, b: torch.linalg.multi_dot([a[0], b[0], a[1]]),
    "matrix_power": lambda a, b: torch.linalg.matrix_power(a, 3),
    "cov": lambda a, b: torch.cov(a[0]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.stack([*a, *b])),
    "padding": lambda a, b: F.conv1d(a, b.view(4, 8, 4)[..., :3], padding="same"),
    "RNN": lambda a, b: torch.rnn_tanh(a, b[:1, :2], [*a, *b[0, :2]], True, 1, 0.0, False, False, True)[0],
    # Cast as a whole, and as they are within.
    "cdist": lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"),
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a, is_causal=True),
    "norm": lambda a, b: F.layer_norm(a, (8,)),
}
MODES = {"recorded": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "name", "casts"),
    [
        *((torch.complex64, name, False) for name in COMPLEX),
        *((torch.float32, name, casts) for casts in (False, True) for name in REAL),
    ],
)
def test_an_operator_of_others_gives_the_same_bits_and_type(mode, dtype, name, casts):
    target = device()
    function = (COMPLEX if dtype.is_complex else REAL)[name]
    given = _given(dtype, target)

    def run():
        with MODES[mode](), torch.autocast(target.type, torch.bfloat16, enabled=casts):
            return function(*given).detach().resolve_conj().resolve_neg()

    expected = run()
    with guarded(Retry(lambda unless_free=None: 0), at_once=True):
        assert same_bits(run(), expected)


def test_casts_of_one_device_are_none_of_another():
    matrices = _given(torch.float32, torch.device("cpu"))
    with (
        torch.inference_mode(),
        torch.autocast(device().type, torch.bfloat16),
        guarded(Retry(lambda unless_free=None: 0), at_once=True),
    ):
        assert torch.linalg.multi_dot([*matrices[0], *matrices[1]]).dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_what_the_dispatcher_does_not_know_is_called_as_it_is(mode):
    with MODES[mode]():
        assert call(torch.ops.prim.device.default, (torch.ones(1),), {}) == torch.device("cpu")


@pytest.fixture
def library():
    with torch.library._scoped_library("hetero_test", "FRAGMENT") as library:
        yield library


KINDS = ["CompositeExplicitAutograd", "CompositeImplicitAutograd", "cast by autocast"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_within_an_operator_of_the_users_is_cast_what_is_unmanaged(library, kind, mode):
    library.define("product(Tensor a, Tensor b) -> Tensor")
    composite = "CompositeExplicitAutograd" if kind == "cast by autocast" else kind
    library.impl("product", lambda a, b: a @ b, composite)
    product = torch.ops.hetero_test.product
    target = device()
    if kind == "cast by autocast":
        torch.library.register_autocast("hetero_test::product", target.type, torch.float32, lib=library)
    a, b = _given(torch.float32, target)
    with MODES[mode](), torch.autocast(target.type, torch.bfloat16):
        expected = product(a, b)
        with guarded(Retry(lambda unless_free=None: 0), at_once=True):
            got = product(a, b)
    assert got.dtype == expected.dtype == (torch.float32 if kind == "cast by autocast" else torch.bfloat16)
    assert same_bits(got.detach(), expected.detach())


class Inverse(nn.Module):
    """A complex weight by its inverse, and what it makes of the input by sums over named dimensions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        inverse = torch.view_as_real(torch.linalg.pinv(self.weight))
        x = torch.einsum("bij,jk->bik", self.first(x).view(-1, 8, 8), inverse[..., 0])
        return self.last(x.reshape(-1, WIDTH)) + inverse[..., 1].sum()


@pytest.mark.parametrize("casts", [False, True])
def test_training_and_evaluating_show_the_numbers_of_the_unmanaged_run(casts):
    def loop(model, optimizer, target):
        seen = []
        autocast = torch.autocast(target.type, torch.bfloat16) if casts else contextlib.nullcontext()
        for _ in range(3):
            with autocast:
                loss = square_loss(model, target)
            loss.backward()
            seen.append([loss, *[p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode(), autocast:
                seen.append([model(batch(target, rows)) for rows in (8, 9)])
        return seen

    assert_twins(Inverse, loop, share=0.8)
