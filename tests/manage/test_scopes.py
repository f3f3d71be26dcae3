"""Where operators on managed parameters run, and what code sees that asks: in a forward, in backward, outside."""

import pytest
import torch
from accelerators import GAPS, libraries_bytes
from equality import assert_identical, device, fresh_memory, on_host, peak_memory, values_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero


class Asking(nn.Module):
    """Converts its weight, and makes new tensors where its weight is, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.seen: list[torch.device] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.device)
        y = x.to(torch.bfloat16) @ self.weight.to(torch.bfloat16)
        return (y + torch.ones(8, device=self.bias.device)).float() + self.bias.to(x.device)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = Asking(), Asking()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_backward_runs_on_the_device(reentrant: bool) -> None:
    target = device()

    def run(manage: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Checkpointed(reentrant=reentrant)
        if manage:
            hetero.manage(model, device=target, device_budget="64KiB")
        else:
            model.to(target)
        x = torch.randn(4, 8, device=target, requires_grad=True)
        model(x).sum().backward()
        assert set(model.first.seen) == {target}
        assert len(model.first.seen) == 2
        return values_of(model)

    assert_identical(run(True), run(False))


def test_a_parameter_is_on_the_device_in_forward_and_at_home_outside() -> None:
    target = device()
    model = Asking()
    with hetero.manage(model, device=target, device_budget="64KiB"):
        model(torch.randn(2, 8, device=target))
        assert model.seen == [target]
        assert model.weight.device == torch.device("cpu")
        assert (model.weight * 2).device == torch.device("cpu")


def test_products_take_the_same_path_without_grad_mode() -> None:
    # matmul folds a batch into one product if its weight requires grad, else it computes batch by batch.
    target = device()
    torch.manual_seed(0)
    model = nn.Linear(64, 256, bias=False)
    x = torch.randn(2, 8, 64, device=target)
    with hetero.manage(model, device=target, device_budget="1MiB"):
        with torch.no_grad():
            managed = model(x).cpu()
        with torch.inference_mode():
            inferred = model(x).cpu()
    model.to(target)
    with torch.no_grad():
        assert torch.equal(managed, model(x).cpu())
        assert torch.equal(inferred, managed)


def test_training_goes_on_after_inference_mode_fetched_the_parameters() -> None:
    target = device()

    def run(manage: bool) -> dict[str, torch.Tensor]:
        fresh_memory()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        if not manage:
            model.to(target)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        if manage:
            hetero.manage(model, optimizer, device=target, device_budget="64KiB")
        found = {}
        for step in range(3):
            x = torch.randn(4, 8, device=target)
            with torch.inference_mode():
                found |= on_host({f"{step}": model(x)})
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return found | values_of(model)

    assert_identical(run(True), run(False))


def test_autocast_keeps_no_parameter_on_the_device_in_evaluation() -> None:
    target = device()
    fresh_memory()
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    budget = libraries_bytes() + 80 * 1024  # 128 KiB of parameters, 64 KiB of their casts
    with hetero.manage(model, device=target, device_budget=budget):
        for _ in range(3):
            with torch.no_grad(), torch.autocast(target.type, dtype=torch.bfloat16):
                model(torch.randn(4, 64, device=target))
    assert peak_memory() <= budget + GAPS


def test_a_parameter_without_elements_is_managed_like_any_other() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.cat([x, self.empty * 2]))

    target = device()
    model = Model()
    with hetero.manage(model, device=target, device_budget="64KiB"):
        model(torch.randn(3, 8, device=target)).sum().backward()
        assert model.empty.grad is not None
        assert model.empty.grad.shape == (0, 8)


def test_measuring_the_links_keeps_to_the_budget() -> None:
    target = device()
    in_use = torch.empty(40 * 1024, dtype=torch.uint8, device=target)
    in_use_bytes = fresh_memory()
    with hetero.manage(nn.Linear(8, 8), device=target, device_budget=in_use_bytes + 8 * 1024):
        assert peak_memory() <= in_use_bytes + 8 * 1024 + GAPS
    del in_use  # it counted until here
