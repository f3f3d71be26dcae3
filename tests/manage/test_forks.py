"""Forked children and exported programs, with a step queued."""

import copy
import gc
import io
import os
import signal
import weakref

import pytest
import torch
from accelerators import ON_CUDA
from checkpoint_jobs import VOCABULARY, WIDTH
from lateness import pending, stopped
from test_checkpoints import managed_job, queued, unmanaged_job

import hetero


def in_child(action):
    """What ``action`` returns in a forked child, or the name and text of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that waits for its parent's threads waits for ever
        try:
            answer = repr(action())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with {status}: {answer}"
    return answer


def checksum(job):
    state = [value for entry in job.optimizer.state_dict()["state"].values() for value in entry.values()]
    return sum(value.double().sum().item() for value in (*job.model.parameters(), *state)).hex()


def backward(job):
    tokens = torch.randint(VOCABULARY, (4, 8)).to(job.device)
    job.model(tokens).square().mean().backward()


def test_a_child_reads_parameters_gradients_and_states_as_they_are_after_the_queued_step():
    job = managed_job()
    with job.manager:
        job.steps(2)
        backward(job)
        norms = in_child(lambda: [p.grad.norm().item() for p in job.model.layers.parameters()])
        assert norms == repr([p.grad.norm().item() for p in job.model.layers.parameters()])
        job.optimizer.zero_grad()
        context = queued(job)
        seen = in_child(lambda: checksum(job))
        context.__exit__(None, None, None)
        assert seen == repr(checksum(job))
        assert in_child(lambda: len(copy.deepcopy(job.model.layers))) == "4"
        assert in_child(lambda: job.model.embedding.weight.data[0].tolist()) == repr(
            job.model.embedding.weight.data[0].tolist()
        )


def _write(job):
    with torch.no_grad():
        job.model.layers[0].bias.zero_()


def _set(job):
    job.model.layers[0].bias.data = torch.zeros(WIDTH)


REFUSED = {
    "step": lambda job: job.optimizer.step(),
    "another optimizer's step": lambda job: torch.optim.SGD(job.model.parameters(), lr=0.1).step(),
    "forward": lambda job: job.model(torch.zeros(1, 2, dtype=torch.long)),
    "operator on the device": lambda job: job.model.layers[0](job.on_device),
    "write": _write,
    "write by assignment": _set,
    "load": lambda job: job.model.load_state_dict(job.saved),
}


@pytest.mark.parametrize("late", [False, True], ids=["settled", "queued"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_child_is_refused_what_would_need_the_device_or_write_its_parents_memory(name, late):
    """Homes are memory that a child shares; the parent trains on as if there had been none."""
    twin = unmanaged_job()
    expected = twin.steps(5)
    del twin
    job = managed_job()
    with job.manager:
        job.on_device = torch.zeros(2, WIDTH).to(job.device)
        losses = job.steps(2)
        job.saved = {key: torch.zeros_like(value) for key, value in job.model.state_dict().items()}
        context = queued(job) if late else None
        if context is None:
            job.step()
        backward_state = torch.get_rng_state()
        answer = in_child(lambda: REFUSED[name](job))
        torch.set_rng_state(backward_state)
        if context is not None:
            context.__exit__(None, None, None)
        assert "forked" in answer
        assert answer.startswith(("ManageError", "RuntimeError"))
        losses += [expected[2], *job.steps(2)]
        assert losses == expected


def test_a_child_may_drop_the_model_and_the_parent_goes_on():
    job = managed_job()
    jobs = [job]
    manager = job.manager
    del job

    def drop():
        nonlocal manager
        jobs.clear()
        manager = None
        gc.collect()
        return "dropped"

    jobs[0].steps(2)
    assert in_child(drop) == "'dropped'"
    with jobs[0].manager:
        jobs[0].steps(2)


def test_a_child_collects_nothing_that_may_have_something_of_the_device():
    # Its event, say: torch ends a process that destroys one and has no device.
    gc.collect()
    job = managed_job()
    job.steps(2)
    job.manager.close()
    inner = weakref.ref(job.manager._stm)
    gc.disable()
    try:
        job.itself = job  # who waits for the collector
        del job

        def collect():
            gc.collect()
            return inner() is None

        assert in_child(collect) == "False"
    finally:
        gc.enable()
    gc.collect()
    assert inner() is None


def test_an_error_in_the_queue_outlives_a_fork():
    job = managed_job()
    with job.manager:
        job.steps(2)
        backward(job)
        with stopped(job.manager):
            job.optimizer.step()
            tensor = next(t for t in job.manager._stm.tensors if t.pending is not None)
            job.manager._stm.updates._note_failure(ValueError("half-way"))
            assert in_child(lambda: 1) == "1"
            assert tensor.pending is None
            with pytest.raises(ValueError, match="half-way"):
                job.model.embedding.weight.sum()


def test_exporting_the_managed_model_says_what_to_do_instead():
    job = managed_job()
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with job.manager:
        job.steps(2)
        context = queued(job)
        for place in ("cpu", job.device):
            with pytest.raises(hetero.ManageError, match="deepcopy"):
                torch.export.export(job.model, (tokens.to(place),))
        program = torch.export.export(copy.deepcopy(job.model).cpu().eval(), (tokens,))
        context.__exit__(None, None, None)
        assert not pending(job.manager)
        job.model.eval()
        place = torch.device("cpu") if ON_CUDA else job.device  # a device's kernels round otherwise
        model = copy.deepcopy(job.model).cpu() if ON_CUDA else job.model
        assert torch.equal(program.module()(tokens), model(tokens.to(place)).cpu())
        job.model.train()
        assert all(torch.isfinite(torch.tensor(job.steps(2))))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_tracing_the_managed_model_or_a_part_says_what_to_do_instead():
    job = managed_job()
    tokens, x = (torch.zeros(2, 4, dtype=torch.long), torch.randn(2, WIDTH))
    with job.manager:
        job.steps(2)
        for module, given in ((job.model, tokens), (job.model.layers[0], x)):
            with pytest.raises(hetero.ManageError, match=r"torch\.jit\.trace.*deepcopy"):
                torch.jit.trace(module, (given.to(job.device),))
        traced = torch.jit.trace(copy.deepcopy(job.model).cpu().eval(), (tokens,))
        assert torch.equal(traced(tokens), copy.deepcopy(job.model).cpu().eval()(tokens))
        assert all(torch.isfinite(torch.tensor(job.steps(2))))


# ``torch.export.load`` itself, in torch 2.11.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_exporting_a_submodule_while_a_step_is_queued_sees_that_step():
    job = managed_job()
    x = torch.randn(2, WIDTH)
    with job.manager:
        job.steps(2)
        context = queued(job)
        program = torch.export.export(job.model.layers[0], (x,))
        exported = program.module()(x)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        context.__exit__(None, None, None)
        assert torch.equal(exported, job.model.layers[0](x))
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    assert {type(p) for p in loaded.parameters()} == {torch.nn.Parameter}
    assert torch.equal(loaded(x), exported)
