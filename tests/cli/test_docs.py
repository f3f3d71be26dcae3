"""Documentation that runs, links that lead somewhere, and figures that are those of the committed files."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    path for folder in ("hetero", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
]


def test_the_virtual_devices_page_runs() -> None:
    text = (ROOT / "docs" / "virtual-device.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "virtual accelerator out of memory: tried to allocate 100.00 MiB" in result.stdout
    assert re.search(
        r"stream 0 reads tensor Float\[1048576\] .* which stream \d+ writes, and no wait", result.stdout
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def _exists(dotted: str) -> bool:
    """A module, or a name in one, at whatever depth. Functions may have their module's name."""
    names = dotted.split(".")
    for depth in range(len(names), 0, -1):
        try:
            found: object = importlib.import_module(".".join(names[:depth]))
        except ModuleNotFoundError:
            continue
        for name in names[depth:]:
            if name in getattr(found, "__annotations__", {}):  # a field without a default
                return True
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def test_every_name_of_ours_that_is_cited_exists() -> None:
    text = "".join(path.read_text() for path in (*PAGES, *SOURCES))
    cited = sorted(set(re.findall(r"`(hetero(?:\.\w+)+)`", text)))
    assert len(cited) > 100
    assert [name for name in cited if not _exists(name)] == []


def test_every_note_that_is_cited_is_written() -> None:
    cited: set[str] = set()
    written: set[str] = set()
    for path in SOURCES:
        source = path.read_text()
        cited.update(re.findall(r"\[Note: ([\w ,'-]+)\]", source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef):
                written.update(re.findall(r"^\[Note: (.+?)\]", ast.get_docstring(node) or "", re.MULTILINE))
    assert len(written) > 50
    assert cited - written == set()


def test_the_readmes_figures_of_the_demo_are_those_of_its_file() -> None:
    numbers = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    text = (ROOT / "README.md").read_text()
    for key in (
        "model_data_bytes",
        "device_budget",
        "peak_device_bytes",
        "unmanaged_peak_device_bytes",
        "bytes_moved",
        "lower_bound_bytes",
    ):
        assert f"{numbers[key] / 2**20:.1f} MiB" in text, key
    assert f"| {numbers['managed_step_seconds'] / numbers['unmanaged_step_seconds']:.2f} |" in text
    assert numbers["bit_identical"] is True
    assert numbers["peak_device_bytes"] <= numbers["device_budget"] < numbers["model_data_bytes"]


def test_the_readmes_plan_of_seven_billion_parameters_is_that_of_its_file() -> None:
    printed = (ROOT / "benchmarks" / "results" / "plan_llama7b.txt").read_text()
    assert printed in (ROOT / "README.md").read_text()
    with_less = (ROOT / "benchmarks" / "results" / "plan_llama7b_64gib.txt").read_text().split()
    assert "2.29 s at 20 GiB" in (ROOT / "README.md").read_text()
    assert "2.29" in with_less


def test_tables_and_figures_are_those_of_the_result_files() -> None:
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_keyword_of_manage_is_in_the_guide_with_its_default() -> None:
    import inspect

    import hetero

    text = (ROOT / "docs" / "guide.md").read_text()
    keywords = [p for p in inspect.signature(hetero.manage).parameters.values() if p.kind is p.KEYWORD_ONLY]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, flags=re.MULTILINE))
    assert list(rows) == [p.name for p in keywords]
    for p in keywords:
        if p.default is not None:
            assert rows[p.name].strip("` ").strip('"') == str(p.default)


def test_every_floor_that_is_enforced_is_described() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = (ROOT / "docs" / "design.md").read_text().split("## Floors")[1].split("```")[1]
    described = {
        name
        for line in floors.splitlines()
        for name in re.findall(r"\w+", re.split(r"(?<! \|) {3,}", line.strip())[0])
    }
    enforced = {
        name.removeprefix("hetero.")
        for contract in contracts
        if contract["type"] == "layers"
        for layer in contract["layers"]
        for name in layer.split(" | ")
    }
    assert enforced - {"__main__"} == described


def test_every_statistic_is_documented() -> None:
    import dataclasses

    from hetero.msc import PeriodStats
    from hetero.report import MemoryStats

    text = (ROOT / "docs" / "statistics.md").read_text()
    for value in (MemoryStats, PeriodStats):
        for each in dataclasses.fields(value):
            assert f"`{each.name}`" in text, f"{value.__name__}.{each.name}"
