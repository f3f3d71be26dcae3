"""docs/measured.md and the README's figures, in markdown, from the files under ``results/``.

python -m benchmarks.tables            # writes both
python -m benchmarks.tables --check    # says whether they are what the files say

Every number comes from a file; a benchmark that has not been run gives no table.
"""

import sys
from pathlib import Path

from benchmarks.headlines import HEADLINES
from benchmarks.markdown import Record, markdown
from benchmarks.measured import TABLES, way_of
from benchmarks.record import read
from hetero.units import format_bytes

_ROOT = Path(__file__).resolve().parents[1]
_BEGIN, _END = "<!-- {} BEGIN: python -m benchmarks.tables -->", "<!-- {} END -->"
_INTRODUCTION = """# Measured

`make bench` runs the benchmarks; each writes one file under [`benchmarks/results`](../benchmarks/results), with the
machine, the versions and the commit; `python -m benchmarks.tables` makes this page from them. A *bound* is what we ask
of ourselves; figures that miss it are here as well. But for what says that it ran on a GPU, the machine has two shared
cores and none: operators of the virtual accelerator run on the processor, so times compare ways of working with each
other, and say nothing about a GPU.
"""

_OTHERS = """## Others, without a table here

* [`pool.json`](../benchmarks/results/pool.json), [`networks.json`](../benchmarks/results/networks.json): footprints of
  placement planners on published instances, and on VGG and ResNet.
* [`allocators.md`](../benchmarks/results/allocators.md): what TensorFlow's BFC allocator reserves and uses.
* [`reorder.json`](../benchmarks/results/reorder.json): peaks after reordering, beside Inductor's rules.
* [`simulation.json`](../benchmarks/results/simulation.json): the simulated step against the measured one.
* [`planning_step.json`](../benchmarks/results/planning_step.json): planning a step of a model of 7 billion parameters.
* [`demo.json`](../benchmarks/results/demo.json), [`cuda/demo.json`](../benchmarks/results/cuda/demo.json): the demo.
"""


_SWEPT = {
    "cuda/sweep_h100": "The GPT on another host, with an H100",
    "cuda/sweep_resnet50": "A ResNet50 on two H200s, 64 images of 64 x 64",
    "cuda/sweep_resnet50_of_8": "The same on one, 8 images",
}
# Where all of it fits, and what is trained.
_FITS = {"cuda/fits_gpt": "the GPT", "cuda/fits_resnet50": "that ResNet50"}


def main() -> int:
    readme = _ROOT / "README.md"
    text = readme.read_text()
    for name, block in {"GPU": on_a_gpu, "OTHERS ON A GPU": others_on_a_gpu, "FIGURES": headlines}.items():
        first, last = _BEGIN.format(name), _END.format(name)
        text = f"{text[: text.index(first)]}{first}\n\n{block()}\n{text[text.index(last) :]}"
    wanted = {_ROOT / "docs" / "measured.md": page(), readme: text}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(_ROOT)} is not what the result files say: python -m benchmarks.tables")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
        print(path.relative_to(_ROOT))
    return 0


def page() -> str:
    """Every table, with its source."""
    parts = [_INTRODUCTION]
    for name, table in TABLES.items():
        record = read(name)
        if record is not None:
            parts.append(f"{table(record)}\n\n{_source(name, record)}\n")
    return "\n".join([*parts, _OTHERS])


def headlines() -> str:
    """One line of each."""
    rows = []
    for name, line in HEADLINES.items():
        record = read(name)
        if record is not None:
            rows += [
                (f"[{title}](benchmarks/results/{name}.json){rest}", *cells)
                for title, rest, *cells in line(record)
            ]
    return markdown(("", "measured", "bound"), rows)


def on_a_gpu() -> str:
    """A line for each way that the sweep tried."""
    record = read("cuda/sweep")
    if record is None:
        return ""
    rows = [row for row in record["results"] if "error" not in row]
    unmanaged = record["results"][0].get("seconds")  # it may not have fitted
    cells = [
        (
            way_of(row),
            format_bytes(row["peak_device_bytes"]),
            f"{row['seconds']:.3f} s",
            f"{row['seconds'] / unmanaged:.2f}" if unmanaged else "",
            format_bytes(int(row["last_bytes_moved"])) if "last_bytes_moved" in row else "",
            format_bytes(row["host_bytes"]) if row["host_bytes"] else "",
        )
        for row in rows
    ]
    return markdown(("", "device peak", "a step", "over unmanaged", "moved in it", "host memory"), cells)


def others_on_a_gpu() -> str:
    """A line for each further record of a GPU's."""
    lines = []
    for name, what in _SWEPT.items():
        record = read(name)
        if record is not None:
            rows = [row for row in record["results"] if "error" not in row]
            ways = [f"{way_of(row)} {row['seconds']:.3f} s" for row in rows]
            lines.append(f"* [{what}](benchmarks/results/{name}.json): {'; '.join(ways)}.")
    records = {name: record for name in _FITS if (record := read(name)) is not None}
    if records:
        ways = [
            f"[{_FITS[name]}](benchmarks/results/{name}.json) {record['results']['step_ratio']:.3f}"
            for name, record in records.items()
        ]
        share = next(iter(records.values()))["parameters"]["share"]
        lines.append(
            f"* Where everything fits ({share:g} times what it needs), over unmanaged: {', '.join(ways)}."
        )
    return "\n".join(lines) + "\n"


def _source(name: str, record: Record) -> str:
    machine = record["machine"]
    where = f"{machine['cores']} cores ({machine['cpu']}, load {machine['load']})"
    if machine["accelerator"]:
        where += f", {machine['accelerator']}"
    rows = record["results"] if isinstance(record["results"], list) else []
    commits = sorted({row["commit"][:7] for row in rows if "commit" in row} | {record["commit"][:7]})
    return (
        f"[`benchmarks/results/{name}.json`](../benchmarks/results/{name}.json): {where}, torch {record['torch']}, "
        f"Python {record['python']}, {record['date'][:10]}, commit {', '.join(commits)}"
    )


if __name__ == "__main__":
    sys.exit(main())
