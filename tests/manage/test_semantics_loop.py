"""What users do between steps, at any point, while their model is managed."""

import copy
import gc
import io
import pickle

import pytest
import torch
from accelerators import ON_CUDA, STEPS_AT_HOME
from loops import batch, mlp, train
from torch import nn
from torch.nn.utils import parametrizations
from twins import adamw, assert_same, assert_twins, device, managed, plain, unmanaged

import hetero


def test_state_dict_save_and_load_between_steps(tmp_path):
    def loop(model, optimizer, target):
        seen = [train(model, optimizer, target, 2)]
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt"
        )
        seen.append(train(model, optimizer, target, 2))
        saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        seen.append([train(model, optimizer, target, 2), list(saved["model"].values())])
        return seen

    assert_twins(mlp, loop)


def test_a_checkpoint_holds_plain_tensors_of_their_own_size():
    target = device()
    model = mlp()
    with hetero.manage(model, None, device=target, device_budget="2MiB"):
        model(batch(target))
        buffer = io.BytesIO()
        torch.save({"one": model[0].weight, "state": model[0].state_dict()}, buffer)
        nbytes = model[0].weight.nbytes + model[0].bias.nbytes
        assert len(buffer.getvalue()) < nbytes + 8192  # not the slab with all the others
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert type(loaded["one"]) is nn.Parameter
        assert torch.equal(loaded["one"], model[0].weight)


def test_deepcopy_and_pickle_of_a_managed_model_are_plain_models():
    def loop(model, optimizer, target):
        seen = [train(model, optimizer, target, 2)]
        twin = copy.deepcopy(model)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert "_compiled_call_impl" not in twin.__dict__
        pickled = io.BytesIO()
        torch.save(model, pickled)
        pickled.seek(0)
        loaded = torch.load(pickled, weights_only=False)
        assert all(type(p) is nn.Parameter for p in loaded.parameters())
        x = batch(target).cpu()
        seen.append([twin.cpu()(x), loaded.cpu()(x), list(twin.parameters())])
        seen.append(train(model, optimizer, target, 2))
        return seen

    assert_twins(mlp, loop, share=0.9)


class CopiesAll(nn.Linear):
    def __deepcopy__(self, memo):
        twin = self.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


COPYING_ALL = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
    "its own": lambda: CopiesAll(64, 64),
    "a part": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64)), *mlp(depth=3)),
}


@pytest.mark.parametrize("kind", COPYING_ALL)
def test_a_copy_of_a_module_that_copies_all_it_has_computes_with_its_own_parameters(kind):
    """As `torch.nn.utils.parametrize` makes them: torch's modules leave the call that we replace out of copies."""

    def loop(model, optimizer, target):
        seen = [train(model, optimizer, target, 2)]
        twin = copy.deepcopy(model)
        seen.append(train(model, optimizer, target, 2))
        torch.manual_seed(1)
        x = torch.randn(8, 64)
        twin.cpu()(x).square().mean().backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in model.parameters())
        seen.append([twin(x), [p.grad for p in twin.parameters()]])
        return seen

    assert_twins(COPYING_ALL[kind], loop, share=0.9)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_buffers_where_the_model_has_and_computes_wherever_it_is_moved(copied):
    target = device()
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), *(nn.Linear(64, 64) for _ in range(6)))
    gc.collect()
    budget = torch.accelerator.memory_allocated() + (64 << 10)
    with hetero.manage(model, None, device=target, device_budget=budget):
        x = torch.randn(4, 64)
        model(x.to(target))
        model.eval()
        expected = model(x.to(target)).detach().cpu()
        twin = copied(model)
        assert {p.device.type for p in twin.parameters()} == {"cpu"}
        assert {b.device.type for b in twin.buffers()} == {target.type}
    assert_same(twin.to(target)(x.to(target)).detach().cpu(), expected, "on the device")
    torch.testing.assert_close(twin.cpu()(x).detach(), expected)  # its kernels may round otherwise


def test_moving_averages_at_home():
    def loop(model, optimizer, target):
        average = copy.deepcopy(model)
        seen = []
        for _ in range(3):
            seen.append(train(model, optimizer, target, 1))
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.mul_(0.9).add_(p * 0.1)  # ``lerp_`` rounds otherwise on another device
        return [seen, list(average.parameters())]

    assert_twins(mlp, loop, share=0.9)


def test_torch_swa_averaged_model():
    def loop(model, optimizer, target):
        # The default averages with another kernel on the device than on the host.
        average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: a + (p - a) / (n + 1))
        for _ in range(3):
            train(model, optimizer, target, 1)
            average.update_parameters(model)
        return list(average.parameters())

    assert_twins(mlp, loop, share=0.9)


def test_clipping_schedulers_and_printing():
    def loop(model, optimizer, target):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
        seen = []
        for _ in range(4):
            loss = model(batch(target)).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert "Parameter" in repr(model[0].weight)
            seen.append(
                # All bits of the weight: a norm of it would be the host's.
                [loss, norm, scheduler.get_last_lr(), model[0].weight.clone(), model[0].weight.max().item()]
            )
        return seen

    assert_twins(mlp, loop)


def test_a_scheduler_made_before_manage():
    def make(model):
        optimizer = adamw(model)
        optimizer.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        return optimizer

    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            seen.append(train(model, optimizer, target, 1))
            optimizer.scheduler.step()
            seen.append(optimizer.scheduler.get_last_lr())
        return seen

    assert_twins(mlp, loop, make_optimizer=make)


def test_gradients_right_after_backward_and_accumulation():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            for _ in range(3):
                (model(batch(target)).square().mean() / 3).backward()
                seen.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seen.append([p.grad for p in model.parameters()])
        return seen

    assert_twins(mlp, loop)


def test_a_gradient_kept_by_the_user_is_not_overwritten():
    def loop(model, optimizer, target):
        kept = []
        for _ in range(3):
            model(batch(target)).square().mean().backward()
            kept.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return kept

    assert_twins(mlp, loop, share=0.9)


def test_eval_between_steps_and_changing_shapes():
    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            rows = (8, 8, 4, 8, 4, 12)[step]
            loss = model(batch(target, rows)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append([loss, *[model(batch(target, 4)) for _ in range(2)]])
            with torch.inference_mode():
                seen.append(model(batch(target, 2)).clone())
        return seen

    assert_twins(mlp, loop)


def test_frozen_then_thawed_layers_and_parameters_without_gradient():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = mlp(depth=3), mlp(depth=1)

        def forward(self, x):
            return self.used(x)

    def loop(model, optimizer, target):
        seen = [train_partial(model, optimizer, target)]
        model.used[0].requires_grad_(False)
        seen.append(train_partial(model, optimizer, target))
        model.used[0].requires_grad_(True)
        seen.append(train_partial(model, optimizer, target))
        return seen

    def train_partial(model, optimizer, target):
        seen = []
        for _ in range(2):
            loss = model(batch(target)).square().mean()
            loss.backward()
            seen.append([loss, [p.grad is None for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_twins(Partial, loop)


@pytest.mark.skipif(ON_CUDA, reason=STEPS_AT_HOME)
def test_lbfgs_with_a_closure():
    def loop(model, optimizer, target):
        x = batch(target)
        seen = []

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            seen.append(optimizer.step(closure).item())
        return seen

    assert_twins(mlp, loop, make_optimizer=lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3))


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, 64)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def test_buffers_are_written_on_the_device_and_come_back():
    manager = assert_twins(Buffers, train, share=0.9)
    assert manager.stats.by_kind["device"]["buffer"] > 0


def test_close_leaves_nothing_behind():
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    before = {
        "identities": [id(p) for p in model.parameters()],
        "dict": set(model.__dict__),
        "step": "step" in optimizer.__dict__,
        "apply": nn.Module._apply,
        "attributes": [set(p.__dict__) for p in model.parameters()],
    }
    gc.collect()  # models of the tests before
    allocated = torch.accelerator.memory_allocated()
    with hetero.manage(model, optimizer, device=target, device_budget="2MiB"):
        train(model, optimizer, target)
        model(batch(target)).sum().backward()
    assert [id(p) for p in model.parameters()] == before["identities"]
    assert set(model.__dict__) == before["dict"]
    assert ("step" in optimizer.__dict__) == before["step"]
    assert nn.Module._apply is before["apply"]
    assert [set(p.__dict__) for p in model.parameters()] == before["attributes"]
    assert all(
        type(p) is nn.Parameter and p.grad is not None and not p.is_pinned() for p in model.parameters()
    )
    gc.collect()
    assert torch.accelerator.memory_allocated() == allocated
    # Ordinary training goes on, on the host.
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()


def test_a_model_that_was_on_the_device_returns_there():
    target = device()

    def run(manage):
        torch.manual_seed(0)
        model = mlp().to(target)
        optimizer = adamw(model)
        seen = plain(train(model, optimizer, target, 2))
        budget = torch.accelerator.memory_allocated()
        if manage:
            with hetero.manage(model, optimizer, device=target, device_budget=budget):
                assert all(p.device.type == "cpu" for p in model.parameters())
                seen += plain(train(model, optimizer, target, 2))
        else:
            seen += plain(train(model, optimizer, target, 2))
        assert all(p.device == target for p in model.parameters())
        assert all(s["exp_avg"].device == target for s in optimizer.state.values())
        return seen + plain(train(model, optimizer, target, 2))

    expected = run(manage=False)
    gc.collect()
    assert_same(run(manage=True), expected, "seen")


def test_host_budget_counts_gradients_and_optimizer_states():
    model = mlp()
    nbytes = sum(p.nbytes for p in model.parameters())
    for optimizer, times in ((None, 1), (torch.optim.SGD(model.parameters(), lr=1.0), 2), (adamw(model), 4)):
        with pytest.raises(hetero.BudgetError, match="host_budget"):
            hetero.manage(
                model, optimizer, device=device(), device_budget="1MiB", host_budget=times * nbytes - 1
            )
        manager = hetero.manage(
            model, optimizer, device=device(), device_budget="1MiB", host_budget=times * nbytes
        )
        if optimizer is not None:
            train(model, optimizer, device(), 2)
        # A device copy is not in host memory; 'step' counters are: 4 bytes a parameter.
        counters = 4 * len(list(model.parameters()))
        assert manager.stats.host_model_bytes <= times * nbytes + counters
        manager.close()


@pytest.mark.parametrize("policy", ["opt", "cost-opt", "lru", "fifo"])
@pytest.mark.parametrize("keywords", [{}, {"prefetch": False}, {"pin_memory": False}, {"warmup_steps": 2}])
def test_every_policy_and_keyword_trains_the_same(policy, keywords):
    assert_twins(mlp, lambda m, o, d: train(m, o, d, 5), policy=policy, **keywords)


def test_a_policy_of_the_users():
    class Alphabetical:
        name = "alphabetical"

        def victims(self, candidates, nbytes):
            chosen = []
            for candidate in sorted(candidates, key=lambda c: c.tensor):
                if nbytes <= 0:
                    break
                chosen.append(candidate.tensor)
                nbytes -= candidate.nbytes
            return chosen

    assert_twins(mlp, train, policy=Alphabetical())


def test_without_an_optimizer_gradients_are_the_users():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            loss = model(batch(target)).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
            seen.append(loss)
        return seen

    expected, state, peak = unmanaged(mlp, loop)
    got, got_state, _ = managed(mlp, loop, int(0.6 * peak), make_optimizer=lambda m: None)
    assert_same(got, expected, "seen")
    assert_same(got_state, state, "state")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_fused_optimizers_that_move_no_version_counter(fused, known):
    """A fused kernel writes parameters unseen; ``known``: the optimizer was handed to manage."""

    def run(managed):
        target = device()
        torch.manual_seed(0)
        model = mlp(depth=2)
        model = model if managed else model.to(target)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=False)
        manager = None
        if managed:  # everything stays resident, so that a stale copy would be used
            budget = torch.accelerator.memory_allocated() + (4 << 20)
            manager = hetero.manage(
                model, optimizer if known else None, device=target, device_budget=budget, warmup_budget=1.0
            )
        torch.manual_seed(1)
        seen = plain(train(model, optimizer, target, 5))
        if manager is not None:
            manager.close()
        return seen

    expected = run(managed=False)
    gc.collect()
    assert_same(run(managed=True), expected, "seen")
