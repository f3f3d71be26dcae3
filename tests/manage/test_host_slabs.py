"""Page-locked slabs, and copies that two threads start at once."""

import contextlib
import gc
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from equality import device
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.devices import Accelerator, CopyEngine, HostArena


def is_mapped(address):
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_a_slab_is_unlocked_while_its_memory_is_still_there(monkeypatch):
    accelerator = Accelerator(device())
    gc.collect()  # slabs of before
    tensor = HostArena(accelerator, pin=True).empty_strided((1 << 20,), (1,), torch.uint8)
    address = tensor.data_ptr()
    seen = []
    # What comes before the unlocking: a wait for copies, which may be reading the memory.
    monkeypatch.setattr(Accelerator, "synchronize", lambda self: seen.append(is_mapped(address)))
    assert is_mapped(address)
    del tensor
    gc.collect()
    assert seen == [True]
    assert not is_mapped(address)


def test_on_cuda_memory_is_locked_for_the_device_that_is_managed(monkeypatch):
    # Whichever is current: another one would be given a context, which takes memory of it.
    current, calls = [0], []

    @contextlib.contextmanager
    def on(device):
        current[:], before = [device.index], list(current)
        yield
        current[:] = before

    def register(address, nbytes, flags):
        calls.append(("register", nbytes, *current))
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: calls.append(("unregister", *current)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on)
    accelerator = SimpleNamespace(
        device=torch.device("cuda", 1), synchronize=lambda: calls.append(("synchronize",))
    )
    tensor = HostArena(accelerator, pin=True).empty_strided((4096,), (1,), torch.uint8)
    del tensor
    gc.collect()
    assert calls == [("register", 4096, 1), ("synchronize",), ("unregister", 1)]


class Meeting(TorchDispatchMode):
    """Before a copy is made: says that it is about to be, and waits."""

    def __init__(self, here, there):
        super().__init__()
        self.here, self.there = here, there

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.here.set()
            self.there.wait()
        return func(*args, **(kwargs or {}))


def test_threads_that_copy_at_once_go_on_on_their_own_streams():
    target = device()
    engine = CopyEngine(Accelerator(target))
    arena = HostArena(engine.accelerator, pin=True)
    mine, others = (arena.empty_strided((256,), (1,), torch.float32).zero_() for _ in range(2))
    here, there = (torch.empty(256, device=target) for _ in range(2))
    first, second, done = threading.Event(), threading.Event(), threading.Event()
    streams = []

    def upload_others():
        first.wait()
        with Meeting(second, done):
            engine.upload(others, there).synchronize()
        streams.append(torch.accelerator.current_stream())

    thread = threading.Thread(target=upload_others)
    thread.start()
    before, own = torch.accelerator.current_stream(), torch.Stream(device=target)
    own.wait_stream(before)
    try:
        with own:
            with Meeting(first, second):
                engine.upload(mine, here).synchronize()
            streams.append(torch.accelerator.current_stream())
    finally:
        first.set()
        done.set()
        thread.join()
    assert streams == [own, before]
