"""Saving, loading and resuming: checkpoints are plain PyTorch, and what goes on from one is what would have been."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import checkpoint_jobs
import pytest
import torch
from accelerators import ON_CUDA, clear_races, device, races
from checkpoint_jobs import Job, Net, adamw, plain_steps
from lateness import pending, stopped
from torch import nn
from twins import assert_same

import hetero
from hetero.stm import Kind, Tier

BUDGET = 160 << 10  # the unmanaged peak is 300 KiB


def managed_job(*, seed=0):
    target = device()
    clear_races()
    gc.collect()
    job = Job(target, seed=seed)
    base = torch.accelerator.memory_allocated()
    job.manager = hetero.manage(job.model, job.optimizer, device=target, device_budget=base + BUDGET)
    torch.manual_seed(1)
    return job


def unmanaged_job(*, seed=0):
    job = Job(device(), seed=seed)
    job.model.to(job.device)
    torch.manual_seed(1)
    return job


def queued(job):
    """Context: one more step, none of whose updates has run."""
    job.manager._stm.home_access.wait_all()  # or the forward would wait, which opens the gate
    context = stopped(job.manager)
    context.__enter__()
    job.step()
    assert len(pending(job.manager)) > 5
    return context


def nested(value):
    """Mappings as lists, for `assert_same`, with every tensor on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return [[str(key), nested(item)] for key, item in value.items()]
    return [nested(item) for item in value] if isinstance(value, list | tuple) else value


def on_host(saved):
    return {**saved, "model": {k: v.cpu() for k, v in saved["model"].items()}}


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_taken_while_a_step_is_queued_goes_on_in_a_process_without_hetero(tmp_path):
    twin = unmanaged_job()
    twin.steps(3)
    expected = copy.deepcopy(on_host(twin.checkpoint()))
    job = managed_job()
    with job.manager:
        job.steps(2)
        context = queued(job)
        torch.save(job.checkpoint(), tmp_path / "checkpoint.pt")
        assert not pending(job.manager)
        context.__exit__(None, None, None)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True, map_location="cpu")
    assert_same(nested(saved), nested(expected), "checkpoint")
    for tensors in (saved["model"], *saved["optimizer"]["state"].values()):
        assert {type(value) for value in tensors.values()} == {torch.Tensor}
    other = subprocess.run(
        [sys.executable, checkpoint_jobs.__file__, tmp_path / "checkpoint.pt"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == str([loss.hex() for loss in plain_steps(expected)])
    assert races() == []


def test_the_dicts_of_a_managed_pair_are_like_those_of_an_unmanaged_one():
    twin = unmanaged_job()
    twin.steps(2)
    job = managed_job()
    with job.manager:
        job.steps(2)
        for got, expected in zip(_dicts(job), _dicts(twin), strict=True):
            assert type(got) is type(expected)
            assert list(got) == list(expected)
        kept = job.model.state_dict(keep_vars=True)
        assert all(kept[name] is p for name, p in job.model.named_parameters())
        assert job.optimizer.state_dict()["param_groups"] == twin.optimizer.state_dict()["param_groups"]
        assert job.model.state_dict()._metadata == twin.model.state_dict()._metadata


def _dicts(job):
    optimizer = job.optimizer.state_dict()
    return [job.model.state_dict(), optimizer, optimizer["state"], *optimizer["state"].values()]


# -- loading in mid-training -------------------------------------------------------------------------------------------


def loaded_in_mid_training(job, load, *, late=False):
    """Losses before and after, and the final checkpoint. ``load(job, saved)`` loads that of the second step."""
    losses = job.steps(2)
    saved = copy.deepcopy(job.checkpoint())
    losses += job.steps(2)
    context = queued(job) if late else None
    if context is None:
        job.step()
    load(job, saved)
    if context is not None:
        context.__exit__(None, None, None)
    losses += job.steps(3)
    return [losses, nested(job.checkpoint())]


def seen_alike(load):
    """What ``load`` left in ``job.seen``, which is the same unmanaged and managed, as are all numbers."""
    twin = unmanaged_job()
    expected = loaded_in_mid_training(twin, load)
    job = managed_job()
    with job.manager:
        got = loaded_in_mid_training(job, load, late=True)
    assert job.seen == twin.seen
    assert_same(got, expected, "after")
    return twin.seen


def moved(saved, target):
    def move(value):
        if isinstance(value, torch.Tensor):
            return value.to(target)
        return {key: move(item) for key, item in value.items()} if isinstance(value, dict) else value

    return move(saved)


LOADS = {
    "model": lambda job, saved: job.model.load_state_dict(saved["model"]),
    "optimizer": lambda job, saved: job.optimizer.load_state_dict(saved["optimizer"]),
    "both": lambda job, saved: (
        job.model.load_state_dict(saved["model"]),
        job.optimizer.load_state_dict(saved["optimizer"]),
    ),
    "part of it": lambda job, saved: job.model.layers.load_state_dict(
        {"0.weight": saved["model"]["layers.0.weight"], "9.weight": torch.ones(3)}, strict=False
    ),
    "one parameter": lambda job, saved: job.model.head.load_state_dict(
        {"weight": saved["model"]["head.weight"]}
    ),
}


@pytest.mark.parametrize("late", [False, True], ids=["settled", "queued"])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("name", LOADS)
def test_loading_in_mid_training_gives_the_unmanaged_numbers_and_takes_no_device_memory(name, place, late):
    twin = unmanaged_job()
    expected = loaded_in_mid_training(twin, LOADS[name])
    spikes = []

    def load(job, saved):
        if place == "device":  # as torch.load(map_location=device) gives it
            saved = moved(saved, job.device)
        homes = [p.data_ptr() for p in job.model.parameters()]
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        LOADS[name](job, saved)
        spikes.append(torch.accelerator.max_memory_allocated() - before)
        assert [p.data_ptr() for p in job.model.parameters()] == homes
        assert_states_are_at_home(job)

    job = managed_job()
    with job.manager:
        got = loaded_in_mid_training(job, load, late=late)
        assert job.manager.stats.peak_device_bytes <= job.manager.config.device_budget or place == "device"
        assert job.manager._host_step.queued > 10
        assert_states_are_at_home(job)
    assert_same(got, expected, name)
    assert spikes == [0]
    assert races() == []


def assert_states_are_at_home(job):
    states = [value for entry in job.optimizer.state_dict()["state"].values() for value in entry.values()]
    assert {value.device.type for value in states} == {"cpu"}
    ledger = job.manager._stm.ledger
    assert ledger.nbytes(Tier.HOST, Kind.OPTIMIZER_STATE) == sum(value.nbytes for value in states)
    assert ledger.nbytes(Tier.DEVICE, Kind.OPTIMIZER_STATE) == 0


def raises_alike(job, load):
    try:
        load()
    except (RuntimeError, ValueError, KeyError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing"]


def test_missing_unexpected_and_misshapen_keys_are_told_and_loaded_as_without_hetero():
    def load(job, saved):
        model, seen = job.model, []
        less = {k: v for k, v in saved["model"].items() if k != "layers.1.bias"}
        more = {**saved["model"], "nobody.weight": torch.ones(2)}
        odd = {**saved["model"], "layers.2.weight": torch.ones(5, 5)}
        for state in (less, more, odd):
            seen.append(raises_alike(job, lambda state=state: model.load_state_dict(state)))
            job.step()
        for state in (less, more):
            told = model.load_state_dict(state, strict=False)
            seen.append([told.missing_keys, told.unexpected_keys])
        job.seen = seen

    assert [kind for kind, _ in seen_alike(load)[:3]] == ["RuntimeError"] * 3


def test_param_groups_that_differ_are_loaded_or_refused_as_without_hetero():
    def load(job, saved):
        saved["optimizer"]["param_groups"][0].update(lr=3e-3, betas=(0.8, 0.9), weight_decay=0.3)
        job.optimizer.load_state_dict(saved["optimizer"])
        job.step()
        job.model.scale.requires_grad_(True)
        job.optimizer.add_param_group({"params": [job.model.scale], "lr": 1e-3, "max_lr": 0.0, "min_lr": 0.0})
        job.scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)
        job.step()
        job.seen = raises_alike(job, lambda: job.optimizer.load_state_dict(saved["optimizer"]))
        job.step()
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))

    assert seen_alike(load)[0] == "ValueError"


def test_states_that_a_queued_step_made_do_not_replace_those_that_are_loaded():
    """Momentum switched on: its buffers are made by the queue, and a checkpoint with others comes right after."""

    def run(job):
        optimizer = torch.optim.SGD(job.model.layers.parameters(), lr=1e-2, foreach=False)
        manager = None
        if hasattr(job, "manager"):
            job.manager.close()
            base = torch.accelerator.memory_allocated()
            manager = hetero.manage(job.model, optimizer, device=job.device, device_budget=base + BUDGET)

        def step():
            x = torch.randn(8, checkpoint_jobs.WIDTH).to(job.device)
            for layer in job.model.layers:
                x = layer(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        torch.manual_seed(3)
        step()
        step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["momentum"] = 0.9
        saved["state"] = {i: {"momentum_buffer": torch.full_like(p, 0.5)} for i, p in _held(optimizer)}
        optimizer.param_groups[0]["momentum"] = 0.9
        step()
        optimizer.load_state_dict(saved)
        step()
        step()
        result = nested([optimizer.state_dict(), dict(job.model.named_parameters())])
        if manager is not None:
            assert manager._host_step.queued > 0
            manager.close()
        return result

    assert_same(run(managed_job()), run(unmanaged_job()), "after")


def _held(optimizer):
    return list(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def test_states_that_were_replaced_are_let_go():
    job = unmanaged_job()
    job.steps(2)  # they are on the device when management begins
    replaced = [weakref.ref(value) for entry in job.optimizer.state.values() for value in entry.values()]
    saved = copy.deepcopy(job.optimizer.state_dict())
    with hetero.manage(job.model, job.optimizer, device=job.device, device_budget="1MiB"):
        job.step()
        job.optimizer.load_state_dict(saved)
        job.step()
        gc.collect()
        assert replaced
        assert not [ref for ref in replaced if ref() is not None]


@pytest.mark.parametrize("way", ["assign", "swap"])
def test_a_load_that_would_replace_parameters_is_refused_and_has_changed_nothing(way):
    expected = unmanaged_job()
    losses = expected.steps(4)
    job = managed_job()
    with job.manager:
        got = job.steps(2)
        saved = {key: torch.zeros_like(value) for key, value in job.model.state_dict().items()}
        torch.__future__.set_swap_module_params_on_conversion(way == "swap")
        try:
            with pytest.raises(hetero.ManageError, match=r"close\(\)"):
                job.model.load_state_dict(saved, assign=way == "assign")
            with pytest.raises(hetero.ManageError, match=r"close\(\)"):
                job.model.layers[0].load_state_dict({}, strict=False, assign=way == "assign")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        got += job.steps(2)
    assert got == losses
    # Others may, meanwhile and afterwards.
    other = nn.Linear(2, 2)
    replacement = nn.Linear(2, 2).state_dict()
    other.load_state_dict(replacement, assign=True)
    assert other.weight.data_ptr() == replacement["weight"].data_ptr()
    job.model.load_state_dict(saved, assign=True)
    assert not job.model.embedding.weight.any()


# -- resuming ----------------------------------------------------------------------------------------------------------

MAKERS = {"managed": managed_job, "unmanaged": unmanaged_job}


@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(first, second, tmp_path):
    """Scheduler, loss scale and dropout's random numbers included."""
    job = MAKERS[first]()
    before = job.steps(3)
    torch.save(job.checkpoint(), tmp_path / "checkpoint.pt")
    expected = [job.steps(3), nested(job.checkpoint())]
    close(job)
    resumed = MAKERS[second](seed=5)
    places = {"unmanaged": resumed.device, "managed": None}
    # Random states are the host's, whatever the place of the rest.
    saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
    saved.update(moved({"model": saved["model"]}, places[second] or "cpu"))
    resumed.load(saved)
    assert_same([resumed.steps(3), nested(resumed.checkpoint())], expected, "resumed")
    assert before != expected[0]
    close(resumed)
    assert races() == []


def close(job):
    if hasattr(job, "manager"):
        job.manager.close()


RESUME = """
import sys, torch
import test_checkpoints as t
job = t.managed_job(seed=9)
job.load(torch.load(sys.argv[1], map_location="cpu"))
print([loss.hex() for loss in job.steps(3)])
job.manager.close()
"""


@pytest.mark.skipif(ON_CUDA, reason="the other process would share the device's memory with this one")
def test_a_run_resumed_in_another_process_goes_on_as_if_it_had_not_stopped(tmp_path):
    job = managed_job()
    with job.manager:
        job.steps(2)
        context = queued(job)
        torch.save(job.checkpoint(), tmp_path / "checkpoint.pt")
        context.__exit__(None, None, None)
        expected = [loss.hex() for loss in job.steps(3)]
    root = Path(__file__).parent
    paths = [str(root), str(root.parent), str(root.parent.parent), os.environ.get("PYTHONPATH", "")]
    other = subprocess.run(
        [sys.executable, "-c", RESUME, tmp_path / "checkpoint.pt"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == str(expected)


def test_managing_after_loading_is_the_same_as_loading_after_managing(tmp_path):
    twin = unmanaged_job()
    twin.steps(3)
    saved = copy.deepcopy(twin.checkpoint())
    expected = twin.steps(3)
    job = Job(device(), seed=5)
    job.model.to(job.device)
    job.load(moved(saved, job.device) | {"rng": saved["rng"], "device_rng": saved["device_rng"]})
    with hetero.manage(job.model, job.optimizer, device=job.device, device_budget="1MiB"):
        torch.set_rng_state(saved["rng"])
        assert job.steps(3) == expected


def test_the_net_holds_what_checkpoints_trip_over():
    model = Net()
    assert model.head.weight is model.embedding.weight
    assert "shift" not in model.state_dict()
    assert len(adamw(model).param_groups[0]["params"]) == len(list(model.parameters())) - 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_keeps_its_manager_is_a_plain_one_without(copied):
    model, target = nn.Sequential(nn.Linear(8, 8)), device()
    model.manager = hetero.manage(model[0], device=target, device_budget="16MiB")
    with model.manager:
        twin = copied(model)
        assert twin.manager is None
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert_same(twin[0].weight.detach(), model[0].weight.detach(), "weight")
