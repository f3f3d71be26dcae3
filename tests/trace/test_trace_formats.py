"""Traces as files: what is written is read back, what is damaged is refused, nothing is left half-written."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import PlanError
from hetero.trace import (
    KINDS,
    PHASES,
    Operator,
    StepTrace,
    Storage,
    from_json,
    from_snapshot,
    read_csv,
    read_json,
    read_snapshot,
    read_trace,
    to_json,
    write_csv,
    write_json,
)

DATA = Path(__file__).parents[3] / "shared" / "data" / "dsa"


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    span = draw(st.integers(1, 8))
    names = st.text(max_size=6)
    storages = []
    for number in range(draw(st.integers(0, 8))):
        begin = draw(st.integers(0, span - 1))
        storages.append(
            Storage(
                id=number,
                begin=begin,
                end=draw(st.integers(begin + 1, span)),
                nbytes=draw(st.integers(0, 2**45)),
                kind=draw(st.sampled_from(KINDS)),
                name=draw(names),
                device=draw(st.sampled_from(["cpu", "cuda:0"])),
            )
        )
    operators = []
    for index in range(span):
        alive = [s.id for s in storages if s.begin <= index < s.end]
        touched = st.lists(st.sampled_from(alive), max_size=3).map(tuple) if alive else st.just(())
        operators.append(
            Operator(
                name=draw(names),
                phase=draw(st.sampled_from(PHASES)),
                module=draw(names),
                reads=draw(touched),
                writes=draw(touched),
            )
        )
    return StepTrace(
        operators=tuple(operators),
        storages=tuple(storages),
        span=span,
        device="cpu",
        source=draw(st.sampled_from(["real", "fake"])),
        measured_peak_nbytes=draw(st.none() | st.integers(0, 2**40)),
    )


SMALL = StepTrace(
    operators=(
        Operator(name="aten.mm", phase="forward", module="layer", reads=(0,), writes=(1,)),
        Operator(name="aten.sum", phase="backward", module="", reads=(1,), writes=(2,)),
    ),
    storages=(
        Storage(id=0, begin=0, end=2, nbytes=64, kind="parameter", name="w", device="cpu"),
        Storage(id=1, begin=0, end=2, nbytes=128, kind="activation", name="x", device="cpu"),
        Storage(id=2, begin=1, end=2, nbytes=4, kind="temporary", name="s", device="cpu"),
    ),
    span=2,
    device="cpu",
    source="real",
)


@given(traces())
def test_json_round_trips(trace: StepTrace) -> None:
    assert from_json(to_json(trace)) == trace


@settings(max_examples=50)
@given(traces())
def test_csv_round_trips_the_problem(tmp_path_factory: pytest.TempPathFactory, trace: StepTrace) -> None:
    if not trace.to_problem().buffers:
        return
    path = tmp_path_factory.mktemp("csv") / "trace.csv"
    write_csv(trace, path)
    shift = min(b.begin for b in trace.to_problem().buffers)
    want = [(b.begin - shift, b.end - shift, b.nbytes) for b in trace.to_problem().buffers]
    assert [(s.begin, s.end, s.nbytes) for s in read_csv(path).storages] == want


def test_files_are_told_by_their_ending(tmp_path: Path) -> None:
    write_json(SMALL, tmp_path / "t.json")
    write_csv(SMALL, tmp_path / "t.csv")
    assert read_trace(tmp_path / "t.json") == SMALL
    assert read_trace(tmp_path / "t.csv").peak_nbytes() == SMALL.peak_nbytes()
    with pytest.raises(PlanError, match="cannot tell"):
        read_trace(tmp_path / "t.txt")


def test_a_json_trace_cut_anywhere_is_refused() -> None:
    text = to_json(SMALL)
    for length in range(len(text.rstrip())):
        with pytest.raises(PlanError, match="cut short"):
            from_json(text[:length])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hetero step trace"', '"other"', "not a step trace"),
        ('"version": 1', '"version": 2', "reads version 1"),
        ('"span": 2', '"span": 3', "2 operators, its span says 3"),
        ('"span": 2', '"span": "2"', "expected a whole number"),
        ("128", "-128", "is negative"),
        ("[2, 1, 2, 4", "[1, 1, 2, 4", "ids are repeated"),
        ("[2, 1, 2, 4", "[2, 2, 2, 4", "is empty"),
        ("[2, 1, 2, 4", "[2, 1, 3, 4", "beyond the step"),
        ("[0], [1]", "[2], [1]", "touches storage 2, alive in"),
        ("[0], [1]", "[7], [1]", "touches storage 7, unknown"),
        ('"forward"', '"sideways"', "not one of"),
        ('"activation"', '"secret"', "not one of"),
        ('"operators"', '"operatives"', "malformed: KeyError"),
        ("64, ", "", "malformed: ValueError"),
    ],
)
def test_a_trace_that_is_not_valid_is_refused(old: str, new: str, message: str) -> None:
    text = to_json(SMALL)
    assert old in text
    with pytest.raises(PlanError, match=message):
        from_json(text.replace(old, new, 1))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not UTF-8"):
        read_json(tmp_path / "t.json")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(SMALL, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_cut_row_of_a_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_csv(SMALL, path)
    path.write_text(path.read_text().rstrip().rpartition(",")[0])
    with pytest.raises(PlanError, match=r"t\.csv, line 4"):
        read_csv(path)
    path.write_text("id,lower,upper,size\n")
    with pytest.raises(PlanError, match="no buffers"):
        read_csv(path)


@pytest.mark.skipif(not DATA.is_dir(), reason="the published instances are not here")
def test_published_minimalloc_files_are_read() -> None:
    trace = read_trace(DATA / "minimalloc_A.csv")
    rows = (DATA / "minimalloc_A.csv").read_text().split()[1:]
    assert len(trace.storages) == len(rows)
    assert sum(s.nbytes for s in trace.storages) == sum(int(row.split(",")[3]) for row in rows)


# --- CUDA snapshots: the shape that torch.cuda.memory._snapshot returns ---


def event(action: str, addr: int, size: int, line: int = 0) -> dict[str, Any]:
    frames = [
        {"filename": "??", "line": 0, "name": "torch::unwind"},
        {"filename": "/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"},
        {"filename": "/home/me/train.py", "line": line, "name": "step"},
    ]
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, "frames": frames}


def block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def segment(device: int, address: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "stream": 0,
        "segment_type": "small",
        "allocated_size": 0,
        "active_size": 0,
        "blocks": list(blocks),
    }


SNAPSHOT: dict[str, Any] = {
    "segments": [
        segment(
            0,
            1000,
            block(1000, 512, 500, "active_allocated"),  # there before, and still
            block(1512, 512, 400, "active_allocated"),  # b
            block(2024, 512, 300, "inactive"),
        ),
        segment(1, 9000, block(9000, 512, 77, "active_allocated")),
    ],
    "device_traces": [
        [
            event("segment_alloc", 1000, 2048),
            event("alloc", 1512, 100, line=10),  # a
            event("free_requested", 5000, 700),
            event("free_completed", 5000, 700),  # there before, gone from here
            event("alloc", 2024, 300, line=11),  # c
            event("free_requested", 1512, 100),
            event("free_completed", 1512, 100),  # a
            event("alloc", 1512, 400, line=12),  # b, where a was
            event("free_requested", 2024, 300),
            event("free_completed", 2024, 300),  # c
            event("snapshot", 0, 0),
        ],
        [],
    ],
    "allocator_settings": {},
    "external_annotations": [],
}


def test_a_snapshot_gives_the_lives_of_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    trace = read_snapshot(path)
    lives = {(s.begin, s.end, s.nbytes, s.kind) for s in trace.storages}
    assert lives == {
        (0, 2, 100, "temporary"),
        (0, 1, 700, "input"),
        (1, 3, 300, "temporary"),
        (2, 3, 400, "temporary"),
        (0, 3, 500, "input"),
    }
    assert [o.module for o in trace.operators] == ["train.py:10 step", "train.py:11 step", "train.py:12 step"]
    assert trace.load_curve().tolist() == [1300, 900, 1200]
    assert (trace.device, trace.source) == ("cuda:0", "snapshot")
    assert read_trace(path) == trace
    assert from_json(to_json(trace)) == trace


def test_a_snapshot_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(SNAPSHOT)
    path = tmp_path / "cut.pickle"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanError, match=r"cut\.pickle"):
            read_snapshot(path)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"device_traces": Evil()}))
    with pytest.raises(PlanError, match="plain values only"):
        read_snapshot(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("other", [[], {}, {"device_traces": None}, {"device_traces": [[{"size": 1}]]}])
def test_what_is_not_a_snapshot_is_refused(other: Any) -> None:
    with pytest.raises(PlanError, match="is not a CUDA memory snapshot"):
        from_snapshot(other)


def test_a_device_that_a_snapshot_does_not_have_has_no_allocation() -> None:
    for device in (-1, 1):
        with pytest.raises(PlanError, match=f"no allocation on device {device}"):
            from_snapshot(SNAPSHOT, device=device)


def test_a_csv_whose_times_are_no_numbers_of_events_says_so(tmp_path: Path) -> None:
    path = tmp_path / "nanoseconds.csv"
    path.write_text("id,lower,upper,size\n1,0,2000000000000,5\n")
    with pytest.raises(PlanError, match="number events instead"):
        read_csv(path)


def test_a_snapshot_without_history_says_how_to_record_it() -> None:
    with pytest.raises(PlanError, match="_record_memory_history"):
        from_snapshot({"segments": SNAPSHOT["segments"], "device_traces": [[]]})
