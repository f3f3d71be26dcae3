"""`hetero trace` and `hetero pool`: what they print and write, and one line for anything that cannot be."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero.cli import app
from hetero.pool import read_problem, read_solution, validate
from hetero.trace import read_json

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn

def parts():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    return model, torch.optim.AdamW(model.parameters()), [(torch.randn(4, 64), torch.zeros(4, dtype=torch.long))]

def job():
    return *parts(), nn.CrossEntropyLoss()

def recipe():
    model, optimizer, batches = parts()
    return train, model, optimizer, *batches[0]

def train(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()

def data_dependent():
    model, optimizer, batches = parts()
    def step(model, optimizer, inputs):
        loss = model(inputs).mean()
        if loss > 3:
            loss = loss * 2
        loss.backward()
        optimizer.step()
    return step, model, optimizer, batches[0][0]

def number():
    return 3

def none():
    model, optimizer, _ = parts()
    return model, optimizer, [], nn.CrossEntropyLoss()
"""

# At most 1024 + 2048 bytes live at once, and both fit below 3072 whichever comes first.
PROBLEM = "id,lower,upper,size\na,0,2,1024\nb,1,3,2048\nc,2,4,512\nd,3,5,1024\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "traced_here.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.csv"
    path.write_text(PROBLEM)
    return path


@pytest.mark.parametrize("function", ["job", "recipe"])
@pytest.mark.parametrize("real", [[], ["--real"], ["--real", "--device", "virtual"]])
def test_trace_prints_the_peak_and_writes_what_is_asked(
    source: Path, tmp_path: Path, function: str, real: list[str]
) -> None:
    files = {ending: tmp_path / f"step.{ending}" for ending in ("html", "json", "csv")}
    arguments = [word for ending, path in files.items() for word in (f"--{ending}", str(path))]
    result = RUN.invoke(app, ["trace", f"{source}:{function}", *real, *arguments])
    assert result.exit_code == 0, result.output + result.stderr
    assert "peak in backward" in result.output
    traced = read_json(files["json"])
    assert traced.source == ("real" if real else "fake")
    # Weights, gradients and two moments of 64 x 128 + 128 x 8 float32, at least.
    assert traced.peak_nbytes() >= 4 * 4 * (64 * 128 + 128 * 8)
    assert len(read_problem(files["csv"])) == len(traced.to_problem())
    assert files["html"].read_text().lstrip().lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("number", "a recipe returns a tuple (step, *args)"),
        ("parts", "returned 3 values: expected the 4 values"),
        ("none", "returned no batches: at least 1 is needed"),
        ("data_dependent", "trace a real step instead"),
        ("missing", "missing is not there"),
    ],
)
def test_trace_refuses_in_one_line_and_writes_nothing(
    source: Path, tmp_path: Path, function: str, message: str
) -> None:
    result = RUN.invoke(app, ["trace", f"{source}:{function}", "--json", str(tmp_path / "step.json")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_pool_reads_a_trace_and_a_csv_alike(source: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "step.json", tmp_path / "step.csv"]
    RUN.invoke(app, ["trace", f"{source}:recipe", "--json", str(paths[0]), "--csv", str(paths[1])])
    rows = []
    for path in paths:
        result = RUN.invoke(app, ["pool", str(path), "--planner", "tflite"])
        assert result.exit_code == 0, result.output + result.stderr
        rows.append(next(line for line in result.output.splitlines() if line.startswith("tflite")).split()[1])
    assert rows[0] == rows[1]


def test_pool_adds_an_offset_column_to_the_rows(problem: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "solved.csv", tmp_path / "solved.png"
    arguments = ["--seconds", "5", "--solution", str(out), "--plot", str(picture)]
    result = RUN.invoke(app, ["pool", str(problem), *arguments])
    assert result.exit_code == 0, result.output + result.stderr
    assert "lower bound 3072 bytes" in result.output
    with out.open() as rows, problem.open() as given:
        solved, original = list(csv.DictReader(rows)), list(csv.DictReader(given))
    assert [{k: v for k, v in row.items() if k != "offset"} for row in solved] == original
    placed, solution = read_solution(out)
    validate(placed, solution)
    assert solution.footprint == 3072
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_pool_runs_every_planner_and_names_the_allocators(problem: Path) -> None:
    result = RUN.invoke(app, ["pool", str(problem), "--all", "--seconds", "1"])
    assert result.exit_code == 0, result.output + result.stderr
    for name in ("smartpool", "max-block", "binary-block", "ge", "tflite", "xla", "portfolio", "exact"):
        assert any(line.startswith(name) for line in result.output.splitlines()), name
    for name in ("pytorch", "expandable_segments", "max_split_size_mb", "bfc"):
        assert name in result.output


def test_pool_checks_a_solution_that_it_is_given(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("id,lower,upper,size,offset\na,0,2,8,0\nb,1,3,8,100\n")
    bad.write_text("id,lower,upper,size,offset\na,0,2,8,0\nb,1,3,8,4\n")
    result = RUN.invoke(app, ["pool", str(good), "--planner", "smartpool"])
    assert result.exit_code == 0, result.output + result.stderr
    assert (
        next(line for line in result.output.splitlines() if line.startswith("good.csv")).split()[1] == "108"
    )
    result = RUN.invoke(app, ["pool", str(bad)])
    assert result.exit_code == 2
    assert "overlap" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "id,lower,upper,size\na,0,2,-1\n", "line 2: buffer 'a': size -1 bytes is negative"),
        ("p.csv", "id,lower,upper,size\na,2,2,1\n", "is empty"),
        ("p.csv", "id,lower,size\na,0,1\n", "no column upper"),
        ("p.json", '{"format": "hetero step tr', "cut short"),
        ("p.txt", "nothing", "cannot tell what it is"),
    ],
)
def test_pool_refuses_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = RUN.invoke(app, ["pool", str(path), "--solution", str(tmp_path / "out.csv")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_pool_refuses_what_it_does_not_know(problem: Path, tmp_path: Path) -> None:
    assert "unknown; use one of" in RUN.invoke(app, ["pool", str(problem), "--planner", "oracle"]).stderr
    for name, message in (("missing.csv", "no such file"), ("missing", "no such file"), ("", "a folder")):
        missing = RUN.invoke(app, ["pool", str(tmp_path / name)])
        assert missing.exit_code == 2
        assert message in missing.stderr


def test_demo_json_is_whole_or_absent(tmp_path: Path) -> None:
    from hetero.cli.output import write_json

    path = tmp_path / "numbers.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["numbers.json"]
