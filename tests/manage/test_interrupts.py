"""Ctrl-C at any moment: training goes on afterwards, and nothing of the interrupted iteration stays."""

import copy
import gc
import random
import signal
import sys
import threading
import time

import pytest
import torch
from accelerators import ON_CUDA, ON_HOST, clear_races, races
from torch import nn
from twins import adamw, device

import hetero

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="POSIX signals")


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """A process that a shell started in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupter:
    """Sends one SIGINT to the main thread, a random time after each `arm`."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._armed = threading.Event()
        self._met = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def arm(self):
        self._met.clear()
        self._armed.set()

    def met(self):
        self._met.set()

    def _run(self):
        while True:
            self._armed.wait()
            if self._ended:
                return
            time.sleep(self._random.uniform(1e-4, 0.03))
            self._armed.clear()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            # Python swallows what is raised in some callbacks; then somebody presses again.
            while not self._met.wait(20.0) and not self._ended:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def end(self):
        self._ended = True
        self._met.set()
        self._armed.set()
        self._thread.join()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(128, 128), nn.Tanh(), nn.LayerNorm(128))))


def iteration(model, optimizer, target):
    loss = model(torch.ones(16, 128, device=target)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    optimizer.zero_grad()


def stepped_once():
    """Who is interrupted while torch makes an optimizer's states has half of them, managed or not."""
    model = layers()
    optimizer = adamw(model)
    iteration(model, optimizer, torch.device("cpu"))
    return model, optimizer


def train_until_pressed(model, optimizer, target):
    while True:
        iteration(model, optimizer, target)


@pytest.mark.parametrize("seed", [1, 2])
def test_training_goes_on_after_interrupts_at_random_moments(seed):
    # Without `hetero.stm.interception.interrupts`, a few dozen of them leave a lock, a queue or a state half changed.
    target = device()
    gc.collect()
    clear_races()
    model, optimizer = stepped_once()
    before = torch.accelerator.memory_allocated()
    interrupter = Interrupter(seed)
    met = 0
    try:
        with hetero.manage(model, optimizer, device=target, device_budget="192KiB"):
            for _ in range(150):
                try:
                    interrupter.arm()
                    until = time.monotonic() + 60.0
                    while time.monotonic() < until:
                        iteration(model, optimizer, target)
                    pytest.fail("no interrupt arrives")
                except KeyboardInterrupt:
                    interrupter.met()
                    met += 1
                optimizer.zero_grad()
                iteration(model, optimizer, target)
    finally:
        interrupter.end()
    assert met == 150
    assert not races()
    assert torch.accelerator.memory_allocated() == before
    iteration(model, optimizer, torch.device("cpu"))


# A library's code that ours has called, in the middle of something that we rely on: by its module and its name.
ON_OUR_BEHALF = [
    ("concurrent.futures.thread", "submit"),  # the queue's job would never be run, and waited for
    ("torch.optim.optimizer", "register_step_pre_hook"),  # the hook would stay, and later steps do nothing
    ("torch.utils.hooks", "remove"),
    ("torch.utils._python_dispatch", "_push_mode"),
    ("hetero.stm.homeaccess", "__init__"),  # a dataclass's: generated code has no file
]


# What ends that gradients are off around the user's clipping and step: by who calls it, its module and its name.
TAKING_BACK = [
    ("_no_grad_wrapper", "torch.autograd.grad_mode", "__exit__"),
    ("_use_grad", "torch.autograd.grad_mode", "__init__"),
    ("_use_grad", "torch._dynamo.decorators", "graph_break"),
]


@pytest.mark.skipif(ON_CUDA, reason=ON_HOST)
@pytest.mark.parametrize("place", ON_OUR_BEHALF, ids=".".join)
def test_an_interrupt_in_a_library_that_we_have_called_is_put_off(place):
    target = device()
    model, optimizer = stepped_once()

    def press(frame, event, arg):
        if event == "call" and (frame.f_globals["__name__"], frame.f_code.co_name) == place:
            sys.setprofile(None)
            signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)

    with hetero.manage(model, optimizer, device=target, device_budget="192KiB"):
        sys.setprofile(press)
        try:
            with pytest.raises(KeyboardInterrupt) as caught:
                train_until_pressed(model, optimizer, target)
        finally:
            sys.setprofile(None)
        assert place not in [(e.frame.f_globals["__name__"], e.name) for e in caught.traceback]
        del caught  # what its frames hold of the device is missing in a budget that is this tight
        assert not optimizer._optimizer_step_pre_hooks
        optimizer.zero_grad()
        twin = layers()
        twin.load_state_dict(model.state_dict())
        its = adamw(twin)
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            iteration(model, optimizer, target)
            iteration(twin, its, torch.device("cpu"))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("place", TAKING_BACK, ids=".".join)
def test_no_interrupt_leaves_gradients_off(place):
    target = device()
    model, optimizer = stepped_once()
    left = 0

    def press(frame, event, arg):
        nonlocal left
        if event != "call" or frame.f_back is None:
            return
        if (frame.f_back.f_code.co_name, frame.f_globals["__name__"], frame.f_code.co_name) == place:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)

    with hetero.manage(model, optimizer, device=target, device_budget="192KiB"):
        for left in range(1, 5):  # one or the other of these begins it
            sys.setprofile(press)
            try:
                train_until_pressed(model, optimizer, target)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            assert left == 0
            assert torch.is_grad_enabled()
            optimizer.zero_grad()


def test_an_interrupt_in_the_users_code_is_raised_there():
    class Pressed(nn.Module):
        def forward(self, x):
            signal.raise_signal(signal.SIGINT)
            return x

    model = nn.Sequential(nn.Linear(4, 4), Pressed())
    target = device()
    with hetero.manage(model, device=target), pytest.raises(KeyboardInterrupt) as caught:
        model(torch.ones(2, 4, device=target))
    assert caught.traceback[-2].name == "forward"


def test_the_users_own_handler_decides_and_is_theirs_again_afterwards():
    pressed = []
    ours = signal.getsignal(signal.SIGINT)
    mine = lambda number, frame: pressed.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, mine)
    try:
        first = hetero.manage(nn.Linear(4, 4), device=device())
        second = hetero.manage(nn.Linear(4, 4), device=device())
        signal.raise_signal(signal.SIGINT)
        first.close()
        assert signal.getsignal(signal.SIGINT) is not mine
        second.close()
        assert signal.getsignal(signal.SIGINT) is mine
        with hetero.manage(nn.Linear(4, 4), device=device()):
            signal.signal(signal.SIGINT, ours)
        assert signal.getsignal(signal.SIGINT) is ours  # set in between: not ours to change
    finally:
        signal.signal(signal.SIGINT, ours)
    assert pressed == [signal.SIGINT]


def test_an_interrupt_at_the_very_end_of_management_leaves_nothing_of_it():
    """From there on nothing is put off."""
    model = layers()
    manager = hetero.manage(model, device=device())

    def press(frame, event, arg):
        if event == "call" and (frame.f_globals["__name__"], frame.f_code.co_name) == ("signal", "signal"):
            sys.setprofile(None)
            signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)

    loading = nn.Module.load_state_dict
    sys.setprofile(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    finally:
        sys.setprofile(None)
    manager.close()
    assert nn.Module.load_state_dict is not loading
    with hetero.manage(model, device=device()):
        assert nn.Module.load_state_dict is loading
    assert nn.Module.load_state_dict is not loading
