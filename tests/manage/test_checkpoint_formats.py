"""Other ways of writing a model down while it is managed: each gives what it would give without hetero."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerators import clear_races, device, races
from checkpoint_jobs import VOCABULARY, Job, Net, adamw, plain_steps
from test_checkpoints import managed_job, nested, queued, unmanaged_job
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from twins import assert_same

import hetero

pytestmark = [
    # torch's own advice, given whenever there is no process group.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def named(job):
    """By names instead of numbers, as `torch.distributed.checkpoint` wants it."""
    return {
        "model": get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer),
    }


def plain(job):
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}


def load_named(job, path):
    state = named(job)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_model_state_dict(job.model, state["model"])
    set_optimizer_state_dict(job.model, job.optimizer, state["optimizer"])


def load_in_place(job, path):
    """Into the tensors of the model and optimizer themselves, and then as well by ``load_state_dict``."""
    state = plain(job)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])


FORMS = {"named": (named, load_named), "plain": (plain, load_in_place)}
MAKERS = {"managed": managed_job, "unmanaged": unmanaged_job}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("first", "second"), [("managed", "managed"), ("managed", "unmanaged"), ("unmanaged", "managed")]
)
def test_distributed_checkpoints_load_with_and_without_hetero(first, second, form, tmp_path):
    write, read = FORMS[form]
    job = MAKERS[first]()
    job.steps(2)
    context = queued(job) if first == "managed" else None
    if context is None:
        job.step()
    dcp.save(write(job), checkpoint_id=tmp_path, no_dist=True)
    if context is not None:
        context.__exit__(None, None, None)
    rest = {key: copy.deepcopy(value) for key, value in job.checkpoint().items() if key not in plain(job)}
    expected = [job.steps(3), nested(plain(job))]
    close(job)
    del job
    other = MAKERS[second](seed=5)
    other.steps(3)
    read(other, tmp_path)
    other.load({**plain(other), **rest})
    assert_same([other.steps(3), nested(plain(other))], expected, "resumed")
    close(other)
    assert races() == []


def close(job):
    if hasattr(job, "manager"):
        job.manager.close()


OPTIONS = {
    "none": {},
    "on the host": {"cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "without what is frozen": {"ignore_frozen_params": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dicts_by_name_are_those_of_the_unmanaged_pair(name):
    options = StateDictOptions(**OPTIONS[name], strict=False)

    def loop(job):
        job.steps(2)
        state = copy.deepcopy(get_state_dict(job.model, job.optimizer, options=options))
        job.steps(2)
        set_state_dict(
            job.model,
            job.optimizer,
            model_state_dict=state[0],
            optim_state_dict=copy.deepcopy(state[1]),
            options=options,
        )
        return [nested(list(state)), job.steps(3), nested(plain(job))]

    expected = loop(unmanaged_job())
    job = managed_job()
    with job.manager:
        got = loop(job)
    assert_same(got, expected, name)


def test_full_state_dicts_by_name_where_there_are_no_buffers():
    """With buffers, which live on the device, torch refuses: it wants all of a full state dict on one device."""
    options = StateDictOptions(full_state_dict=True)

    def run(make):
        target = device()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        optimizer = adamw(model)
        manager = make(model, optimizer, target)
        losses = []
        for number in range(6):
            loss = model(torch.randn(4, 64).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if number == 2:
                state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
            if number == 3:
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state[0],
                    optim_state_dict=state[1],
                    options=options,
                )
        if manager is not None:
            manager.close()
        return losses

    expected = run(_move)
    got = run(lambda m, o, target: hetero.manage(m, o, device=target, device_budget="200KiB"))
    assert got == expected
    assert races() == []


def _move(model, optimizer, target):
    model.to(target)


def test_an_optimizer_that_has_not_stepped_can_be_loaded_by_name(tmp_path):
    """torch steps it once, with zero gradients and a learning rate of zero, to make its states."""
    twin = unmanaged_job()
    twin.steps(2)
    dcp.save(named(twin), checkpoint_id=tmp_path, no_dist=True)
    expected = nested(plain(twin))
    del twin
    job = managed_job(seed=5)
    with job.manager:
        load_named(job, tmp_path)
        assert_same(nested(plain(job)), expected, "loaded")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_asynchronous_save_holds_what_was_when_it_was_asked_for(tmp_path):
    job = managed_job()
    with job.manager:
        job.steps(2)
        context = queued(job)
        saving = dcp.async_save(plain(job), checkpoint_id=tmp_path, no_dist=True)
        context.__exit__(None, None, None)
        expected = nested(copy.deepcopy(plain(job)))
        job.steps(3)
        saving.result()
        job.steps(1)
    job = unmanaged_job(seed=5)
    job.step()
    state = plain(job)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert_same(nested(state), expected, "saved")
    assert races() == []


# -- safetensors and Hugging Face --------------------------------------------------------------------------------------


def test_safetensors_of_a_managed_model_are_byte_for_byte_those_of_the_unmanaged_one(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def loop(job, name):
        job.steps(2)
        context = queued(job) if hasattr(job, "manager") else None
        if context is None:
            job.step()
        safetensors.save_model(job.model, tmp_path / f"{name}.model")
        if context is not None:
            context.__exit__(None, None, None)
        state = {key: value for key, value in job.model.state_dict().items() if key != "head.weight"}
        safetensors.save_file(state, tmp_path / f"{name}.file")
        with pytest.raises(RuntimeError, match="share memory"):  # tied weights, seen by their address
            safetensors.save_file(job.model.state_dict(), tmp_path / "tied")
        losses = job.steps(2)
        assert safetensors.load_model(job.model, tmp_path / f"{name}.model") == (set(), [])
        return [losses, job.steps(2), nested(plain(job))]

    expected = loop(unmanaged_job(), "unmanaged")
    job = managed_job()
    with job.manager:
        got = loop(job, "managed")
    assert_same(got, expected, "after")
    for kind in ("model", "file"):
        assert (tmp_path / f"managed.{kind}").read_bytes() == (tmp_path / f"unmanaged.{kind}").read_bytes()
    fresh = Net()
    safetensors.load_model(fresh, tmp_path / "managed.model")
    assert fresh.head.weight is fresh.embedding.weight


def test_save_pretrained_and_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0
    )

    def loop(model, optimizer, target, save_to, manager=None):
        for _ in range(3):
            step(model, optimizer, target)
        job = type("Job", (), {"step": lambda self: step(model, optimizer, target), "manager": manager})()
        context = queued(job) if manager is not None else None
        if context is None:
            job.step()
        model.save_pretrained(save_to)
        if context is not None:
            context.__exit__(None, None, None)
        torch.save(optimizer.state_dict(), save_to / "optimizer.pt")
        rng = torch.get_rng_state(), torch.get_device_module(target).get_rng_state()
        return [step(model, optimizer, target) for _ in range(3)], rng

    def step(model, optimizer, target):
        tokens = torch.randint(VOCABULARY, (2, 12)).to(target)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def fresh(target, path=None):
        torch.manual_seed(0)
        kind = transformers.GPT2LMHeadModel
        model = kind(config) if path is None else kind.from_pretrained(path)
        model.train()
        return model, adamw(model)

    target = device()
    clear_races()
    model, optimizer = fresh(target)
    model.to(target)
    torch.manual_seed(1)
    expected, _ = loop(model, optimizer, target, tmp_path / "unmanaged")
    del model, optimizer
    gc.collect()
    model, optimizer = fresh(target)
    with hetero.manage(model, optimizer, device=target, device_budget="400KiB") as manager:
        torch.manual_seed(1)
        got, rng = loop(model, optimizer, target, tmp_path / "managed", manager)
    assert got == expected
    one, other = (tmp_path / name / "model.safetensors" for name in ("managed", "unmanaged"))
    assert one.read_bytes() == other.read_bytes()
    model, optimizer = fresh(target, tmp_path / "managed")
    assert model.lm_head.weight is model.transformer.wte.weight
    with hetero.manage(model, optimizer, device=target, device_budget="400KiB"):
        optimizer.load_state_dict(torch.load(tmp_path / "managed" / "optimizer.pt"))
        torch.set_rng_state(rng[0])
        torch.get_device_module(target).set_rng_state(rng[1])
        assert [step(model, optimizer, target) for _ in range(3)] == expected
    assert races() == []


# -- copies of the model itself ----------------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: _through_file(value),
}


def _through_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_taken_while_a_step_is_queued_is_a_plain_model_after_that_step(name):
    twin = unmanaged_job()
    twin.steps(3)
    expected = plain_steps(copy.deepcopy({"model": cpu(twin.model), **optimizer_of(twin)}))
    job = managed_job()
    with job.manager:
        job.steps(2)
        context = queued(job)
        model, optimizer = COPIES[name]((job.model, job.optimizer))
        context.__exit__(None, None, None)
        job.steps(2)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert model.head.weight is model.embedding.weight
        assert {id(p) for p in optimizer.param_groups[0]["params"]} <= {id(p) for p in model.parameters()}
        assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])
        assert plain_steps({"model": cpu(model), "optimizer": optimizer.state_dict()}) == expected
        if name == "deepcopy":  # the pair itself trains, too
            model.cpu()
            tokens = torch.randint(VOCABULARY, (4, 8))
            model(tokens).sum().backward()
            optimizer.step()
    assert races() == []


def cpu(model):
    return {key: value.cpu() for key, value in model.state_dict().items()}


def optimizer_of(job):
    return {"optimizer": job.optimizer.state_dict()}


def test_a_copy_can_be_managed_beside_its_original():
    expected = unmanaged_job()
    losses = expected.steps(6)
    job = managed_job()
    with job.manager:
        assert job.steps(3) == losses[:3]
        rng = torch.get_rng_state(), torch.get_device_module(job.device).get_rng_state()
        other = Job(job.device)
        other.model, other.optimizer = copy.deepcopy((job.model, job.optimizer))
        other.scheduler, other.scaler = job.scheduler, job.scaler
        other.scheduler.optimizer = other.optimizer
        torch.set_rng_state(rng[0])
        torch.get_device_module(job.device).set_rng_state(rng[1])
        budget = torch.accelerator.memory_allocated() + (400 << 10)
        with hetero.manage(other.model, other.optimizer, device=job.device, device_budget=budget):
            assert other.steps(3) == losses[3:]
    assert races() == []


def test_an_averaged_model_follows_steps_that_are_queued():
    def loop(job, late):
        # One kernel a parameter and the same on host and device; the default takes another there.
        average = AveragedModel(job.model, avg_fn=lambda a, p, n: a + (p - a) / (n + 1), use_buffers=True)
        moving = AveragedModel(job.model, avg_fn=get_ema_avg_fn(0.75))
        seen = []
        for _ in range(3):
            context = queued(job) if late and _ else None
            if context is None:
                job.step()
            average.update_parameters(job.model)
            moving.update_parameters(job.model)
            if context is not None:
                context.__exit__(None, None, None)
            seen += [nested(copy.deepcopy(m.state_dict())) for m in (average, moving)]
        return seen, average

    expected, _ = loop(unmanaged_job(), late=False)
    job = managed_job()
    with job.manager:
        got, average = loop(job, late=True)
        # It can stand in for the model where that is saved, and be loaded from the file.
        job.model.load_state_dict(average.module.state_dict())
        assert_same(nested(cpu(job.model)), nested(cpu(average.module)), "loaded")
    assert_same(got, expected, "averages")
    assert races() == []
