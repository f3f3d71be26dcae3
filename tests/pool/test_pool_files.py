"""MiniMalloc CSV files, the shared instances, the report and the picture."""

import csv
from pathlib import Path

import pytest

import hetero.pool as pool
from hetero.errors import PlanError
from hetero.pool import Buffer, Problem

SHARED = Path(__file__).parents[3] / "shared" / "data" / "dsa"
INSTANCES = sorted(path for path in SHARED.glob("*.csv") if path.name != "best_known.csv")


def best_known():
    with (SHARED / "best_known.csv").open(newline="") as file:
        return {row["instance"]: row for row in csv.DictReader(file)}


def test_a_problem_and_its_solution_survive_the_round_trip(tmp_path):
    problem = Problem(
        buffers=(
            Buffer(id=7, begin=0, end=3, nbytes=4),
            Buffer(id="b, quoted", begin=-2, end=1, nbytes=0),
            Buffer(id="007", begin=1, end=2, nbytes=9),
        ),
        name="p",
    )
    pool.write_problem(tmp_path / "p.csv", problem)
    assert pool.read_problem(tmp_path / "p.csv") == problem
    solution = pool.smartpool(problem)
    pool.write_solution(tmp_path / "s.csv", problem, solution)
    problem_read, solution_read = pool.read_solution(tmp_path / "s.csv")
    assert problem_read.buffers == problem.buffers
    assert solution_read.offsets == solution.offsets
    assert solution_read.footprint == solution.footprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "s.csv"]


def test_columns_may_come_in_any_order_with_minimalloc_s_inert_extras(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("size,upper,lower,id,alignment\n5,9,3,a,1\n")
    assert pool.read_problem(path).buffers == (Buffer(id="a", begin=3, end=9, nbytes=5),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,lower,upper\n1,2,3\n", "line 1: no column size"),
        ("", "line 1: no column"),
        ("id,lower,upper,size\n1,0,2,3\n2,0,2\n", "line 3: 3 fields where the header has 4"),
        ("id,lower,upper,size\n1,0,2,-3\n", r"line 2.*negative"),
        ("id,lower,upper,size\n1,2,2,3\n", r"line 2.*empty"),
        ("id,lower,upper,size\n1,0,x,3\n", "line 2: upper 'x' is not an integer"),
        ("id,lower,upper,size\n1,0,2,1_0\n", "line 2: size '1_0' is not an integer"),
        ("id,lower,upper,size\n1,0,2,3\n1,0,2,3\n", "line 3: id 1 appears already on line 2"),
        ("id,lower,upper,size,alignment\n1,0,2,3,64\n", "line 2: alignment '64'"),
        ("id,lower,upper,size,size\n1,0,2,3,3\n", "appears twice"),
        ('id,lower,upper,size\n"1,0,2,3\n', "not a CSV file|fields where"),
        ("id,lower,upper,size\n1,0,99999999999999999999,3\n", "number events instead"),
        ("id,lower,upper,size\n1,-9223372036854775808,2,3\n", "number events instead"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        pool.read_problem(path)


def test_a_problem_is_no_solution(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("id,lower,upper,size\n1,0,2,3\n")
    with pytest.raises(PlanError, match="no column offset"):
        pool.read_solution(path)


def test_an_overlapping_solution_file_is_caught_by_the_validator(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("id,lower,upper,size,offset\na,0,2,3,0\nb,1,3,3,2\n")
    with pytest.raises(PlanError, match=r"'a'.*'b'.*overlap"):
        pool.validate(*pool.read_solution(path))


@pytest.mark.parametrize("offset", [2**63 - 2, 2**64])
def test_an_overlap_beyond_the_integers_is_caught_by_the_validator(tmp_path, offset):
    path = tmp_path / "s.csv"
    path.write_text(f"id,lower,upper,size,offset\na,0,2,3,{offset}\nb,1,3,3,{offset}\n")
    with pytest.raises(PlanError, match=r"'a' ends at \d+ bytes; offsets"):
        pool.validate(*pool.read_solution(path))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "p.csv"
    path.write_text("old")
    problem = Problem.from_lives([(0, 1, 1)])

    def refuse(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        pool.write_problem(path, problem)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.csv"]


def test_the_report_lists_every_planner_and_allocator_and_the_picture_is_drawn(tmp_path):
    problem = Problem.from_lives([(0, 2, 4000), (1, 3, 600), (2, 4, 4000)], name="three")
    result = pool.report(problem, seconds=1.0)
    assert [s.planner for s in result.solutions] == list(pool.planner_names())
    assert result.best.footprint == result.bound_nbytes == 4600
    text = pool.format_report(result)
    assert "three: 3 buffers, lower bound 4600 bytes" in text
    assert all(name in text for name in (*pool.planner_names(), "pytorch, expandable_segments:True"))
    figure = pool.plot_solution(problem, result.best, tmp_path / "p.png")
    assert len(figure.axes[0].collections[0].get_paths()) == 3
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not INSTANCES, reason="shared instances are not there")
def test_shared_instances_have_the_recorded_bounds_and_valid_greedy_placements():
    known = best_known()
    for path in INSTANCES:
        problem = pool.read_problem(path)
        assert len(problem) == int(known[path.stem]["buffers"])
        assert pool.lower_bound(problem) == int(known[path.stem]["load_lower_bound"])
        pool.validate(problem, pool.smartpool(problem))
        if len(problem) < 3000:
            pool.validate(problem, pool.skyline(problem))


@pytest.mark.skipif(not INSTANCES, reason="shared instances are not there")
@pytest.mark.parametrize(
    "path",
    [
        p
        for p in INSTANCES
        if p.name.startswith(("glow", "iree", "vela", "minimalloc", "iopddl_G", "somas_resnet", "somas_tiny"))
    ],
    ids=lambda p: p.stem,
)
def test_the_portfolio_reaches_the_bound_of_shared_instances(path):
    problem = pool.read_problem(path)
    # The limit bounds a failure; every one of these is solved in a fraction of it.
    solution = pool.portfolio(problem, seconds=60.0)
    pool.validate(problem, solution)
    assert solution.footprint == pool.lower_bound(problem)
    assert solution.proven_optimal
