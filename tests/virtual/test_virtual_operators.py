"""Operators outside modules: views, in-place, out=, indices, mixed devices, random numbers, copies."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def test_views_share_memory_and_version(device: torch.device) -> None:
    x = torch.zeros(4, 4, device=device)
    views = [x.view(16), x.t(), x[1], x.diagonal(), x.unfold(0, 2, 1), x.detach(), x.reshape(2, 8)]
    for view in views:
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert view._version == x._version
    views[0].fill_(1)
    assert all((view.cpu() == 1).all() for view in views)
    assert all(view._version == x._version == 1 for view in views[:5])


VIEWS = {
    "view": lambda x, z: x.view(16),
    "view as another type": lambda x, z: x.view(torch.int32),
    "slices": lambda x, z: x.split(2)[1],
    "unfold": lambda x, z: x.unfold(0, 2, 1),
    "as complex": lambda x, z: torch.view_as_complex(x.view(8, 2)),
    "as real": lambda x, z: torch.view_as_real(z),
    "real part": lambda x, z: z.real,
    "of a conjugate": lambda x, z: z.conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_made_in_inference_mode_is_for_inference_if_what_it_views_is(
    device: torch.device, name: str
) -> None:
    def views(target: torch.device) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            x = torch.arange(16.0).view(4, 4).to(target)
            z = torch.complex(x, -x)
        with torch.inference_mode():
            return [VIEWS[name](x, z), VIEWS[name](x.clone(), z.clone())]

    for got, expected in zip(views(device), views(torch.device("cpu")), strict=True):
        assert got.is_inference() == expected.is_inference()
        assert torch.equal(got.cpu(), expected)


def test_in_place_operators_return_the_same_tensor(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    address = x.data_ptr()
    assert x.add_(1).mul_(2) is x
    assert x.data_ptr() == address
    torch._foreach_add_([x, x[:1]], 1.0)
    assert x.tolist() == [6.0, 5.0, 5.0]


def test_long_lists_may_name_a_tensor_twice_and_views_of_one_memory(device: torch.device) -> None:
    def add(target: torch.device) -> torch.Tensor:
        memory = torch.zeros(40, device=target)
        parts = [*memory.split(2), memory[:2], memory[1:3], memory[39:]]
        others = [torch.full((len(part),), float(n), device=target) for n, part in enumerate(parts)]
        torch._foreach_add_([*parts, parts[0], others[3]], [*others, others[1], others[3]])
        return torch.cat([memory, others[3], *torch._foreach_mul(parts, [*others[:-1], parts[-1]])]).cpu()

    assert torch.equal(add(device), add(torch.device("cpu")))


def test_out_operators_resize_their_target(device: torch.device) -> None:
    x = torch.randn(64, 64, device=device)
    out = torch.empty(0, device=device)
    assert torch.mm(x, x, out=out) is out
    assert torch.equal(out.cpu(), x.cpu() @ x.cpu())
    wrong = torch.empty(3, device=device)
    with pytest.warns(UserWarning, match="was resized"):
        torch.add(x, x, out=wrong)
    assert torch.equal(wrong.cpu(), x.cpu() * 2)
    part = torch.empty(64, 128, device=device)
    torch.add(x, x, out=part[:, ::2])
    assert torch.equal(part[:, ::2].cpu(), x.cpu() * 2)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.sort()[1],
        lambda x: x.unique(),
        lambda x: x.nonzero(),
        lambda x: torch.linalg.svd(x)[1],
        lambda x: torch.linalg.inv(x + 10 * torch.eye(4, device=x.device)),
        lambda x: torch.fft.fft(x).abs(),
        lambda x: torch.complex(x, x).conj() + 1,
        lambda x: torch.view_as_real(torch.complex(x, x).conj().resolve_conj()),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.cdist(x, x),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[x > 0],
        lambda x: x.to(torch.bfloat16) @ x.to(torch.bfloat16),
        lambda x: torch.stack([x, x]).flip(0),
        lambda x: x.cumsum(0).topk(2).values,
        lambda x: x + torch.tensor(2.0),
        lambda x: torch.tensor(2.0) - x[0, 0],
        lambda x: x.index_put((torch.tensor([1]),), torch.tensor(5.0)),
        lambda x: torch.arange(5, device=x.device) + torch.linspace(0, 1, 5, device=x.device),
        lambda x: torch.tril_indices(3, 3, device=x.device),
        lambda x: torch.func.vmap(lambda v: v.sum())(x) + torch.func.grad(lambda v: (v**2).sum())(x)[0],
    ],
)
def test_an_operator_computes_what_the_cpu_computes(device: torch.device, operate: object) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    got = operate(x.to(device))  # type: ignore[operator]
    assert got.device == device
    assert torch.equal(got.cpu(), operate(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    "operate",
    [
        lambda x, c: x + c,
        lambda x, c: c + x,
        lambda x, c: c.add_(x),
        lambda x, c: torch.cat([x, c]),
        lambda x, c: torch.mm(c, x),
        lambda x, c: torch.add(x, x, out=c),
        lambda x, c: torch.nn.functional.linear(x, c),
        lambda x, c: torch.nn.functional.embedding(torch.tensor([1]), x),
        lambda x, c: torch.nn.functional.layer_norm(x, (4,), c[0]),
        lambda x, c: c[0, 0].add_(x[0, 0]),
    ],
)
def test_tensors_of_two_devices_do_not_mix(device: torch.device, operate: object) -> None:
    with pytest.raises(
        RuntimeError, match=r"Expected all tensors to be on the same device.*virtual:0 and cpu"
    ):
        operate(torch.ones(4, 4, device=device), torch.ones(4, 4))  # type: ignore[operator]


def test_random_numbers_are_those_of_the_cpu_with_the_same_seed(device: torch.device) -> None:
    def draw(where: object) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(100, device=where)
        return [x, torch.nn.functional.dropout(x, 0.3), torch.randperm(9, device=where), x.clone().uniform_()]

    assert all(torch.equal(a, b.cpu()) for a, b in zip(draw("cpu"), draw(device), strict=True))
    mine, cpu = torch.Generator(device).manual_seed(7), torch.Generator().manual_seed(7)
    state = mine.get_state()
    first = torch.rand(5, device=device, generator=mine)
    assert torch.equal(first.cpu(), torch.rand(5, generator=cpu))
    mine.set_state(state)
    assert torch.equal(first.cpu(), torch.rand(5, device=device, generator=mine).cpu())
    saved = torch.virtual.get_rng_state()
    again = torch.rand(3, device=device)
    torch.virtual.set_rng_state(saved)
    assert torch.equal(again.cpu(), torch.rand(3, device=device).cpu())


def test_a_tensor_survives_copying_pickling_and_saving(device: torch.device) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    file = io.BytesIO()
    torch.save({"whole": x, "part": x.detach()[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), loaded["whole"], x.clone()):
        assert other.device == device
        assert other.requires_grad
        assert other.data_ptr() != x.data_ptr()
        assert torch.equal(other.cpu(), x.cpu())
    file.seek(0)
    assert torch.load(file, map_location="cpu")["part"].device.type == "cpu"
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    assert torch.load(file, map_location=device).device == device
    assert "virtual:0" in repr(x)


def test_numpy_is_refused_as_on_cuda(device: torch.device) -> None:
    with pytest.raises(TypeError, match="can't convert virtual:0 device type tensor to numpy"):
        torch.ones(3, device=device).numpy()


def test_data_can_move_between_cpu_and_device_in_place(device: torch.device) -> None:
    p = torch.nn.Parameter(torch.randn(3))
    p.data = p.data.to(device)
    (p * 2).sum().backward()
    assert type(p) is torch.nn.Parameter
    assert p.device == p.grad.device == device
    p.grad = None
    p.data = p.data.cpu()
    (p * 2).sum().backward()
    assert p.grad.device.type == "cpu"


def test_a_data_loader_pins_its_batches_and_its_workers_survive(device: torch.device) -> None:
    data = TensorDataset(torch.randn(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own about fork with threads
        for (batch,) in DataLoader(data, batch_size=4, num_workers=1, pin_memory=True):
            assert batch.is_pinned()
            assert batch.to(device, non_blocking=True).device == device


def test_a_custom_operator_runs_on_the_device(device: torch.device) -> None:
    @torch.library.custom_op("hetero_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(twice(torch.ones(3, device=device)).cpu(), torch.full((3,), 2.0))
