"""The happens-before detector: what it finds, what it lets pass, and that it agrees with a naive one."""

import mmap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.devices.virtual import (
    check_host_access,
    clear_races,
    host_register,
    host_unregister,
    races,
    virtual_device,
)
from hetero.errors import ConfigError, StreamRaceError

COUNT = 2**20


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def ordered_stream(device: torch.device) -> torch.Stream:
    """A side stream that comes after everything so far."""
    stream = torch.Stream(device)
    stream.wait_stream(current())
    return stream


def test_reading_a_pending_upload_raises_and_names_tensor_and_streams(slow_device, expect_race) -> None:
    host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
    up = ordered_stream(slow_device)
    with up:
        x.copy_(host, non_blocking=True)
    with expect_race(
        rf"stream 0 reads tensor Float\[{COUNT}\] .*4194304 bytes.* stream {up.stream_id} writes"
    ):
        x.sum()
    current().wait_stream(up)
    assert torch.equal(x.cpu(), host)


def test_uploading_into_a_fresh_tensor_without_waiting_for_its_allocation_raises(
    slow_device, expect_race
) -> None:
    host = torch.randn(COUNT, pin_memory=True)
    x, up = torch.empty(COUNT, device=slow_device), torch.Stream(slow_device)
    with expect_race("which stream 0 allocated"), up:
        x.copy_(host, non_blocking=True)


def test_overwriting_the_source_of_a_pending_download_raises(slow_device, expect_race) -> None:
    host, x = torch.empty(COUNT, pin_memory=True), torch.randn(COUNT, device=slow_device)
    down = ordered_stream(slow_device)
    with down:
        host.copy_(x, non_blocking=True)
    assert x.sum().isfinite()  # two reads do not conflict
    with expect_race("stream 0 writes tensor .* reads"):
        x.zero_()
    current().wait_stream(down)


def test_freeing_under_a_pending_copy_raises_at_the_next_operation_and_the_copy_is_whole(
    slow_device, expect_race
) -> None:
    host, x = torch.empty(COUNT, pin_memory=True), torch.randn(COUNT, device=slow_device)
    want, down = x.cpu(), ordered_stream(slow_device)
    with down:
        host.copy_(x, non_blocking=True)
    del x
    with expect_race("allocated on stream 0, was freed while stream"):
        torch.ones(1, device=slow_device)
    down.synchronize()
    assert torch.equal(host, want)


def test_synchronize_raises_a_race_found_in_a_free_and_races_reports_it_instead(
    slow_device, expect_race
) -> None:
    for report_first in (False, True):
        host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
        up = ordered_stream(slow_device)
        with up:
            x.copy_(host, non_blocking=True)
        del x
        if report_first:
            assert len(races()) == 1
            torch.accelerator.synchronize()
            clear_races()
        else:
            with expect_race("was freed while"):
                torch.accelerator.synchronize()


def test_pinned_memory_may_be_freed_under_a_pending_copy(slow_device) -> None:
    host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
    want, up = host.clone(), ordered_stream(slow_device)
    with up:
        x.copy_(host, non_blocking=True)
    del host
    current().wait_stream(up)
    assert torch.equal(x.cpu(), want)


def test_the_host_must_wait_before_it_reads_a_download(slow_device, expect_race) -> None:
    host, x = torch.empty(COUNT, pin_memory=True), torch.randn(COUNT, device=slow_device)
    down = ordered_stream(slow_device)
    with down:
        host.copy_(x, non_blocking=True)
    with expect_race("the host reads pinned tensor"):
        check_host_access(host)
    current().wait_stream(down)
    with expect_race("the host reads pinned tensor"):
        check_host_access(host)  # stream 0 has waited, the host has not
    down.synchronize()
    check_host_access(host, write=True)
    assert torch.equal(host, x.cpu())


def test_the_host_may_read_but_not_write_the_source_of_an_upload_until_a_query_says_so(
    slow_device, expect_race
) -> None:
    host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
    up = ordered_stream(slow_device)
    with up:
        x.copy_(host, non_blocking=True)
        done = torch.Event(slow_device)
        done.record()
    check_host_access(host)
    with expect_race("the host writes pinned tensor"):
        check_host_access(host, write=True)
    while not done.query():
        pass
    check_host_access(host, write=True)
    current().wait_stream(up)


def test_host_access_of_ordinary_memory_cannot_be_checked(device) -> None:
    with pytest.raises(ConfigError, match="pinned or registered"):
        check_host_access(torch.ones(3))
    with pytest.raises(ConfigError, match="pinned or registered"):
        check_host_access(torch.ones(3, device=device))


def test_an_event_orders_only_what_came_before_it(slow_device, expect_race) -> None:
    host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
    up = ordered_stream(slow_device)
    with up:
        x.copy_(host, non_blocking=True)
        first = up.record_event()
        x.copy_(host, non_blocking=True)
    first.synchronize()
    current().wait_event(first)
    with expect_race("stream 0 reads"):
        x.sum()
    current().wait_stream(up)


def test_parts_of_one_block_do_not_race_with_each_other(slow_device, expect_race) -> None:
    half = COUNT // 2
    host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
    up = ordered_stream(slow_device)
    with up:
        x[:half].copy_(host[:half], non_blocking=True)
    x[half:].fill_(1)
    check_host_access(host[half:], write=True)
    with expect_race("stream 0 reads"):
        x[half - 1 :].sum()
    current().wait_stream(up)
    assert torch.equal(x[:half].cpu(), host[:half])


def test_registered_slabs_are_watched_byte_range_by_byte_range(slow_device, expect_race) -> None:
    slab = torch.frombuffer(mmap.mmap(-1, 2 * COUNT), dtype=torch.float32)
    host_register(slab.data_ptr(), 2 * COUNT)
    x, down = torch.randn(COUNT // 4, device=slow_device), torch.Stream(slow_device)
    down.wait_stream(current())
    with down:
        slab[: COUNT // 4].copy_(x, non_blocking=True)
    check_host_access(slab[COUNT // 4 :], write=True)
    with expect_race("host reads"):
        check_host_access(slab[COUNT // 4 - 1 : COUNT // 4 + 1])
    with expect_race("was unregistered while"):
        host_unregister(slab.data_ptr())
    torch.accelerator.synchronize()
    assert torch.equal(slab[: COUNT // 4], x.cpu())
    host_unregister(slab.data_ptr())


def test_operators_on_a_side_stream_need_waits_too(device, expect_race) -> None:
    x, side = torch.randn(100, device=device), torch.Stream(device)
    side.wait_stream(current())
    with side:
        y = x * 2
    with expect_race("stream 0 reads"):
        y.sum()
    current().wait_stream(side)
    assert torch.equal(y.cpu(), x.cpu() * 2)


def test_a_race_in_backward_is_raised_by_backward(slow_device, expect_race) -> None:
    weight = torch.randn(COUNT, device=slow_device, requires_grad=True)
    loss = (weight * weight).sum()
    up = ordered_stream(slow_device)
    with up:
        weight.data.copy_(torch.randn(COUNT, pin_memory=True), non_blocking=True)
    with expect_race("stream 0 reads"):
        loss.backward()
    current().wait_stream(up)


def test_blocking_copies_and_numbers_order_the_host(slow_device) -> None:
    x = torch.randn(COUNT, device=slow_device)
    host = torch.empty(COUNT, pin_memory=True)
    host.copy_(x, non_blocking=True)  # on stream 0
    x.sum().item()
    check_host_access(host, write=True)


# Programs: (what, stream or event, begin, end) on one device tensor and one pinned tensor of eight parts.
PARTS, STREAMS = 8, 3
_part = st.tuples(st.integers(0, PARTS - 1), st.integers(1, PARTS)).filter(lambda r: r[0] < r[1])
_step = st.one_of(
    st.tuples(st.sampled_from(["up", "down"]), st.integers(1, STREAMS), _part),
    st.tuples(st.sampled_from(["read", "write"]), st.just(0), _part),
    st.tuples(st.sampled_from(["host_read", "host_write"]), st.none(), _part),
    st.tuples(st.just("wait"), st.integers(0, STREAMS), st.integers(0, STREAMS)),
    st.tuples(st.just("record"), st.integers(0, STREAMS), st.integers(0, 1)),
    st.tuples(st.just("wait_event"), st.integers(0, STREAMS), st.integers(0, 1)),
    st.tuples(st.sampled_from(["synchronize", "host_wait_event"]), st.integers(0, 1), st.none()),
)


class NaiveDetector:
    """Happens-before as a graph of all nodes, searched anew for every pair of accesses."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.last: dict[object, int] = {}  # of each stream, event and the host
        self.accesses: list[tuple[int, str, int, bool]] = []

    def node(self, *actors: object) -> int:
        """A new node after the last one of every actor; the first actor moves on to it."""
        self.before.append({self.last[a] for a in actors if a in self.last})
        self.last[actors[0]] = len(self.before) - 1
        return len(self.before) - 1

    def races(self, node: int, touched: list[tuple[str, int, int, bool]]) -> bool:
        reachable, todo = set(), [node]
        while todo:
            for earlier in self.before[todo.pop()] - reachable:
                reachable.add(earlier)
                todo.append(earlier)
        new = [(node, memory, part, write) for memory, a, b, write in touched for part in range(a, b)]
        racing = any(
            m == memory and p == part and (w or write) and earlier not in reachable
            for _, memory, part, write in new
            for earlier, m, p, w in self.accesses
        )
        if node >= 0:
            self.accesses += new
        return racing


def naive_step(naive: NaiveDetector, what: str, actor: object, detail: object) -> bool:
    if what in ("up", "down", "read", "write"):
        a, b = detail  # type: ignore[misc]
        touched = {
            "up": [("host", a, b, False), ("device", a, b, True)],
            "down": [("device", a, b, False), ("host", a, b, True)],
            "read": [("device", a, b, False)],
            "write": [("device", a, b, True)],
        }[what]
        return naive.races(naive.node(f"stream{actor}", "host"), touched)
    if what in ("host_read", "host_write"):
        a, b = detail  # type: ignore[misc]
        return naive.races(naive.node("host"), [("host", a, b, what == "host_write")])
    if what == "wait":
        naive.node(f"stream{actor}", f"stream{detail}", "host")
    elif what == "record":
        naive.node(f"event{detail}", f"stream{actor}", "host")
    elif what == "wait_event":
        naive.node(f"stream{actor}", f"event{detail}", "host")
    elif what == "host_wait_event":
        naive.node("host", f"event{actor}")
    else:
        naive.node("host", *(f"stream{s}" for s in range(STREAMS + 1)))
    return False


def real_step(actors, x, host, what: str, actor, detail) -> None:
    streams, events = actors
    if what in ("up", "down"):
        source, target = (host, x) if what == "up" else (x, host)
        with streams[actor]:
            target[detail[0] : detail[1]].copy_(source[detail[0] : detail[1]], non_blocking=True)
    elif what == "read":
        x[detail[0] : detail[1]].neg()
    elif what == "write":
        x[detail[0] : detail[1]].fill_(1)
    elif what in ("host_read", "host_write"):
        check_host_access(host[detail[0] : detail[1]], write=what == "host_write")
    elif what == "wait":
        if actor != detail:
            streams[actor].wait_stream(streams[detail])
    elif what == "record":
        events[detail].record(streams[actor])
    elif what == "wait_event":
        streams[actor].wait_event(events[detail])
    elif what == "host_wait_event":
        events[actor].synchronize()
    else:
        torch.accelerator.synchronize()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the fixture only clears races, which the test does itself
@given(program=st.lists(_step, max_size=25))
def test_the_detector_agrees_with_a_search_of_the_whole_graph(device, program) -> None:
    streams = [current()] + [torch.Stream(device) for _ in range(STREAMS)]
    events = [torch.Event(device) for _ in range(2)]
    x, host = torch.zeros(PARTS, device=device), torch.zeros(PARTS, pin_memory=True)
    torch.accelerator.synchronize()
    naive = NaiveDetector()
    try:
        for what, actor, detail in program:
            expected = naive_step(naive, what, actor, detail)
            try:
                real_step((streams, events), x, host, what, actor, detail)
                found = False
            except StreamRaceError:
                found = True
            assert found == expected, (what, actor, detail)
            if found:
                return
    finally:
        torch.accelerator.synchronize()
        clear_races()


def test_the_virtual_link_can_be_changed_while_a_copy_is_on_its_way(slow_device) -> None:
    host, x = torch.randn(COUNT, pin_memory=True), torch.empty(COUNT, device=slow_device)
    up = ordered_stream(slow_device)
    with up:
        x.copy_(host, non_blocking=True)
    assert virtual_device("512MiB", bandwidth="1GiB/s", latency="5us") == slow_device
    current().wait_stream(up)
    assert torch.equal(x.cpu(), host)
