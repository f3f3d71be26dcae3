"""Training on the device: moving, optimizers, checkpointing, autocast, scaling, fake tensors, compiling."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: object) -> list[torch.Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [p.detach().cpu() for p in model.parameters()]


def test_moving_a_module_keeps_parameters_ties_and_the_optimizer(device: torch.device) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameter, before = model[0].weight, model[0].weight.detach().clone()
    model.to(device)
    assert model[0].weight is model[1].weight is parameter is optimizer.param_groups[0]["params"][0]
    assert parameter.device == device
    model(torch.tensor([1, 2], device=device)).sum().backward()
    optimizer.step()
    assert not torch.equal(parameter.detach().cpu(), before)
    model.cpu()
    assert model[0].weight is parameter
    assert parameter.grad.device.type == "cpu"


OPTIMIZERS = {
    torch.optim.AdamW: ("loop", "foreach", "fused"),
    torch.optim.Adam: ("loop", "foreach", "fused"),
    torch.optim.SGD: ("loop", "foreach", "fused"),
    torch.optim.Adagrad: ("loop", "foreach", "fused"),
    torch.optim.NAdam: ("loop", "foreach"),
    torch.optim.RMSprop: ("loop", "foreach"),
    torch.optim.Adafactor: ("loop", "foreach"),
    torch.optim.Adadelta: ("loop", "foreach"),
    torch.optim.LBFGS: ("only",),
}
CHOICES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "only": {}}


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind, ways in OPTIMIZERS.items() for how in ways])
def test_an_optimizer_gives_the_same_parameters_as_on_the_cpu(
    device: torch.device, kind: type[torch.optim.Optimizer], how: str
) -> None:
    results = []
    for where in ("cpu", device):
        model = small_model().to(where)
        results.append(train(model, kind(model.parameters(), lr=0.01, **CHOICES[how]), where))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_sparse_gradients_train_as_on_the_cpu(device: torch.device) -> None:
    results = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        one = nn.Embedding(10, 4, sparse=True).to(where)
        bag = nn.EmbeddingBag(10, 4, sparse=True).to(where)
        optimizers = [
            torch.optim.SGD(one.parameters(), 0.1),
            torch.optim.SparseAdam(list(bag.parameters()), 0.1),
        ]
        index = torch.tensor([[1, 2, 1], [3, 3, 9]], device=where)
        for _ in range(2):
            (one(index).pow(2).sum() + bag(index).pow(2).sum()).backward()
            assert one.weight.grad.is_sparse
            assert one.weight.grad.device == one.weight.device
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append((one.weight.detach().cpu(), bag.weight.detach().cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_redraws_the_same_dropout(device: torch.device, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    results = []
    for where in ("cpu", device):
        module = copy.deepcopy(model).to(where)
        x = torch.ones(4, 8).to(where).requires_grad_()
        torch.manual_seed(1)
        y = checkpoint(module, x, use_reentrant=reentrant)
        y.sum().backward()
        results.append([y.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_follows_cudas_lists(device: torch.device) -> None:
    x = torch.randn(4, 4, device=device)
    with torch.autocast("virtual", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert nn.functional.linear(x, x).dtype == torch.bfloat16
        assert (x @ x).softmax(0).dtype == torch.float32
        assert nn.functional.layer_norm(x @ x, (4,)).dtype == torch.float32
        assert torch.addcmul(x, x.bfloat16(), x.bfloat16()).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    with torch.autocast("virtual"):
        assert (x @ x).dtype == torch.float16  # CUDA's default


def test_gradient_scaling_steps_and_skips(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("virtual", init_scale=16.0)

    def step(scale: float) -> bool:
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(2, 4, device=device)).sum() * scale).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return not torch.equal(before, model.weight)

    assert step(1.0)
    assert not step(float("inf"))
    assert scaler.get_scale() == 8.0


def test_training_gives_all_memory_back(device: torch.device) -> None:
    gc.collect()  # models of the tests before
    before = torch.accelerator.memory_allocated()
    model = nn.TransformerEncoderLayer(16, 2, 32).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(5, 2, 16, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    assert torch.accelerator.memory_allocated() == before


def test_fake_tensors_carry_the_device(device: torch.device) -> None:
    real = nn.Linear(4, 4).to(device)
    with FakeTensorMode() as mode:
        assert mode.from_tensor(real.weight).device == device
        for module, shape in (
            (nn.TransformerEncoderLayer(16, 2, 32, device=device), (2, 4, 16)),
            (nn.LSTM(16, 5, device=device), (3, 2, 16)),
            (nn.Conv1d(4, 4, 3, device=device), (2, 4, 16)),
        ):
            y = module(torch.randn(shape, device=device))
            y = y[0] if isinstance(y, tuple) else y
            y.sum().backward()
            assert y.device == device
            assert all(p.grad.device == device for p in module.parameters())
            torch.optim.AdamW(module.parameters()).step()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore:.*tracing.*:Warning", "ignore::DeprecationWarning")
def test_a_compiled_module_computes_the_same(device: torch.device, backend: str) -> None:
    torch._dynamo.reset()
    plain = small_model().to(device)
    compiled = torch.compile(copy.deepcopy(plain), backend=backend)
    x = torch.randn(2, 8, device=device)
    for module in (plain, compiled):
        module(x).sum().backward()
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(p.grad.cpu(), q.grad.cpu())


def test_saved_tensor_hooks_see_the_weights_of_a_recurrent_layer(device: torch.device) -> None:
    layer = nn.LSTM(4, 5).to(device)
    storages = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    packed = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = layer(torch.randn(3, 2, 4, device=device))
    assert all(t.device == device for t in packed)
    assert storages <= {t.untyped_storage().data_ptr() for t in packed}
    y.sum().backward()
    assert layer.weight_ih_l0.grad is not None


class Fails(TorchDispatchMode):
    """Matrix products after the first ``allowed`` raise."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.allowed = allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.allowed -= 1
            if self.allowed < 0:
                raise ValueError("no more products")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("allowed", range(9))  # in what is computed again, then in the backward of that
def test_an_error_within_a_recurrent_backward_is_that_backwards_alone(
    device: torch.device, allowed: int
) -> None:
    model = nn.GRU(8, 8, 2, dropout=0.5).to(device)
    loss = model(torch.randn(3, 2, 8, device=device))[0].sum()
    generator = torch.get_rng_state()
    with Fails(allowed), pytest.raises(ValueError, match="no more products"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), generator)
    # The thread of the device has no error left over, which would be taken for the next operator's.
    with Fails(100):
        (torch.ones(2, device=device, requires_grad=True) * 2).sum().backward()


class SendsHome(TorchDispatchMode):
    """Matrix products bring ``x`` to the host first, and note how much more was in use on the device then."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = x
        self.grown: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            before = torch.accelerator.memory_allocated()
            home = self.x.cpu()
            assert torch.equal(home, torch.ones(1024))
            self.grown.append(torch.accelerator.memory_allocated() - before)
        return func(*args, **(kwargs or {}))


def test_what_goes_home_from_within_a_recurrent_layer_takes_no_device_memory(device: torch.device) -> None:
    """There who makes room for one of its operators would find none."""
    x = torch.ones(1024, device=device)
    layer = nn.GRU(8, 8).to(device)
    with SendsHome(x) as mode:
        layer(torch.randn(3, 2, 8, device=device))[0].sum().backward()
    assert len(mode.grown) > 6
    assert not any(mode.grown)
