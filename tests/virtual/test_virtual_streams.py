"""Streams, events, the device module, and what torch.accelerator makes of them."""

import threading

import psutil
import pytest
import torch

from hetero.devices.virtual import is_built, keep_busy, virtual_device
from hetero.errors import ConfigError

COUNT = 2**20


def test_the_accelerator_api_knows_the_device(device: torch.device) -> None:
    assert is_built()
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    assert torch.accelerator.device_count() == torch.virtual.device_count() == 1
    assert torch.accelerator.current_device_index() == torch.virtual.current_device() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == torch.virtual.memory_allocated()
    assert torch.accelerator.max_memory_reserved() >= torch.accelerator.memory_reserved()
    with pytest.raises((ValueError, RuntimeError), match="one virtual accelerator"):
        torch.ones(1, device="virtual:1")


@pytest.fixture
def slowest_device(device: torch.device) -> torch.device:
    """A copy of 4 MiB takes a second: no machine is so busy that its host sees it complete without a wait."""
    return virtual_device("512MiB", bandwidth="4MiB/s", latency="0us")


def test_uploads_and_downloads_are_asynchronous(slowest_device: torch.device) -> None:
    up, down = torch.virtual.Stream(), torch.virtual.Stream()
    source, target = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, pin_memory=True)
    x, y = torch.randn(COUNT, device=slowest_device), torch.empty(COUNT, device=slowest_device)
    before = torch.accelerator.current_stream()
    for stream in (up, down):
        stream.wait_stream(before)
    with torch.virtual.stream(up):
        y.copy_(source, non_blocking=True)
        uploaded = up.record_event()
    with down:
        target.copy_(x, non_blocking=True)
    # Had they run on this thread, they would be complete.
    assert not uploaded.query()
    assert not down.query()
    assert torch.accelerator.current_stream() == before
    before.wait_event(uploaded)
    assert torch.equal(y.cpu(), source)
    down.synchronize()
    assert down.query()
    assert torch.equal(target, x.cpu())
    before.wait_stream(down)


def test_copies_move_late_so_that_a_missing_wait_reads_poison(slowest_device: torch.device) -> None:
    host, x = torch.ones(COUNT, pin_memory=True), torch.empty(COUNT, device=slowest_device)
    down, target = torch.Stream(slowest_device), torch.zeros(COUNT, pin_memory=True)
    x.copy_(host)
    down.wait_stream(torch.accelerator.current_stream())
    with down:
        target.copy_(x, non_blocking=True)
    assert target.sum() == 0  # undeclared host reads are not watched: they see what is there
    down.synchronize()
    assert target.sum() == COUNT
    torch.accelerator.current_stream().wait_stream(down)


def test_events_measure_the_link(device: torch.device) -> None:
    virtual_device("512MiB", bandwidth="100MiB/s", latency="0us")
    x, host = torch.empty(COUNT, device=device), torch.ones(COUNT, pin_memory=True)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream())
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record(stream)
    with stream:
        x.copy_(host, non_blocking=True)
    end.record(stream)
    with pytest.raises(RuntimeError, match="must be complete"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) >= 40.0  # ms for 4 MiB: the link is never faster than it was set
    torch.accelerator.current_stream().wait_event(end)


def test_copies_follow_one_another_without_a_gap(slowest_device: torch.device) -> None:
    """However late the stream's thread wakes up after each; so do pauses. The first copy takes a second, in which all
    others are ordered."""
    compute, up = torch.accelerator.current_stream(), torch.Stream(slowest_device)
    counts = [COUNT, *[COUNT // 64] * 8]
    pieces = [(torch.empty(n, device=slowest_device), torch.ones(n, pin_memory=True)) for n in counts]
    uploaded, paused = ([torch.Event(slowest_device, enable_timing=True) for _ in counts] for _ in range(2))
    up.wait_stream(compute)
    for (x, host), event in zip(pieces, uploaded, strict=True):
        with up:
            x.copy_(host, non_blocking=True)
        event.record(up)
    compute.wait_stream(up)
    for event in paused:
        keep_busy(0.01)
        event.record(compute)
    compute.synchronize()
    # ms, as the doubles and floats on the way have them: 64 KiB at 4 MiB/s, and 10.
    assert uploaded[0].elapsed_time(uploaded[-1]) == pytest.approx(8 * 15.625, abs=1e-4)
    assert paused[0].elapsed_time(paused[-1]) == pytest.approx(80.0, abs=1e-4)
    assert uploaded[-1].elapsed_time(paused[0]) == pytest.approx(10.0, abs=1e-4)
    assert [x.sum().item() for x, _ in pieces] == counts


def test_an_event_waits_for_the_version_it_had_when_waited_for(slow_device: torch.device) -> None:
    stream, event = torch.Stream(slow_device), torch.Event(slow_device)
    x, host = torch.empty(COUNT, device=slow_device), torch.ones(COUNT, pin_memory=True)
    assert event.query()  # never recorded
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        x.copy_(host, non_blocking=True)
    event.record(stream)
    torch.accelerator.current_stream().wait_event(event)
    event.record(torch.accelerator.current_stream())
    assert x.sum().item() == COUNT


def test_a_device_kept_busy_holds_up_compute_and_not_the_caller(device: torch.device) -> None:
    compute = torch.accelerator.current_stream()
    begin, middle, end = (torch.Event(device, enable_timing=True) for _ in range(3))
    x = torch.ones(4, device=device)
    begin.record(compute)
    keep_busy(0.5)
    keep_busy(0.5)
    middle.record(compute)
    view = x[1:]  # nothing is computed
    assert not middle.query()  # no machine is so busy that it comes here a second late
    y = view + 1
    assert middle.query()
    end.record(compute)
    assert begin.elapsed_time(middle) >= 1000.0  # ms: they follow one another
    assert middle.elapsed_time(end) >= 0.0
    assert torch.equal(y.cpu(), torch.full((3,), 2.0))


def test_a_busy_device_was_not_busy_before_what_it_waited_for_had_ended(slowest_device: torch.device) -> None:
    compute, up = torch.accelerator.current_stream(), torch.Stream(slowest_device)
    x, host = torch.empty(COUNT // 4, device=slowest_device), torch.ones(COUNT // 4, pin_memory=True)
    copied, after = (torch.Event(slowest_device, enable_timing=True) for _ in range(2))
    up.wait_stream(compute)
    with up:
        x.copy_(host, non_blocking=True)
    copied.record(up)
    compute.wait_event(copied)
    keep_busy(0.1)
    after.record(compute)
    compute.synchronize()
    assert copied.elapsed_time(after) >= 100.0  # ms: it began after the copy, whenever it was called
    assert torch.equal(x.cpu(), host)


def test_a_duration_is_a_number_of_seconds(device: torch.device) -> None:
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="no duration"):
            keep_busy(wrong)


def test_operators_of_several_threads_take_turns(device: torch.device) -> None:
    failures = []

    def work(seed: int) -> None:
        x = torch.full((64, 64), float(seed), device=device)
        for _ in range(30):
            if (x @ x).sum().item() != 64.0**3 * seed * seed:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_streams_are_reused_from_a_pool(device: torch.device) -> None:
    ids = {torch.Stream(device).stream_id for _ in range(200)}
    assert len(ids) == 32
    threads = psutil.Process().num_threads()  # those of C++ too
    assert {torch.Stream(device).stream_id for _ in range(200)} == ids
    assert psutil.Process().num_threads() <= threads  # those joined a moment ago may be on their way out


def test_the_device_module_has_the_functions_of_torch_cuda(device: torch.device) -> None:
    virtual = torch.virtual
    stream, event = virtual.Stream(), virtual.Event(enable_timing=True)
    assert isinstance(stream, torch.Stream)
    assert isinstance(event, torch.Event)
    with virtual.device(0), virtual.stream(stream):
        assert virtual.current_stream() == stream
        event.record()
    assert virtual.current_stream() == virtual.default_stream()
    event.synchronize()
    stream.wait_event(event)
    virtual.synchronize("virtual:0")
    virtual.reset_peak_memory_stats()
    assert virtual.max_memory_allocated() == virtual.memory_allocated() == virtual.memory_reserved()
    assert virtual.is_available()
    assert virtual.is_initialized()
    assert not virtual._is_in_bad_fork()
    assert torch.bfloat16 in virtual.get_amp_supported_dtype()
    with pytest.raises(ValueError, match="there is one virtual accelerator"):
        virtual.set_device(1)
