"""docs/measured.md and the README's figures, in markdown, from the files under ``results/``.

python -m benchmarks.tables            # writes both
python -m benchmarks.tables --check    # says whether they are what the files say

Every number comes from a file; a benchmark that has not been run gives no table.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import read
from hetero.units import format_bytes

Record = dict[str, Any]
Line = tuple[str, str, str, str]
"""What is linked to the file, the rest of the sentence, what was measured, the bound."""

_ROOT = Path(__file__).resolve().parents[1]
_BEGIN, _END = "<!-- FIGURES BEGIN: python -m benchmarks.tables -->", "<!-- FIGURES END -->"
_INTRODUCTION = """# Measured

`make bench` runs the benchmarks; each writes one file under [`benchmarks/results`](../benchmarks/results), with the
machine, the versions and the commit; `python -m benchmarks.tables` makes this page from them. A *bound* is what we ask
of ourselves; figures that miss it are here as well. The machine has two shared cores and no GPU: operators of the
virtual accelerator run on the processor, so times compare ways of working with each other, and say nothing about a GPU.
"""

_OTHERS = """## Others, without a table here

* [`pool.json`](../benchmarks/results/pool.json), [`networks.json`](../benchmarks/results/networks.json): footprints of
  placement planners on published instances, and on VGG and ResNet.
* [`allocators.md`](../benchmarks/results/allocators.md): what TensorFlow's BFC allocator reserves and uses.
* [`reorder.json`](../benchmarks/results/reorder.json): peaks after reordering, beside Inductor's rules.
* [`simulation.json`](../benchmarks/results/simulation.json): the simulated step against the measured one.
* [`planning_step.json`](../benchmarks/results/planning_step.json): planning a step of a model of 7 billion parameters.
* [`demo.json`](../benchmarks/results/demo.json): the demo.
"""


def main() -> int:
    readme = _ROOT / "README.md"
    text = readme.read_text()
    begin, end = text.index(_BEGIN), text.index(_END)
    wanted = {
        _ROOT / "docs" / "measured.md": page(),
        readme: f"{text[:begin]}{_BEGIN}\n\n{headlines()}\n{text[end:]}",
    }
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
    return _table(("", "measured", "bound"), rows)


def overhead(record: Record) -> str:
    return "## What management adds when every copy is resident\n\nBound: 10 us an operator.\n\n" + _table(
        (
            "",
            "managed operators a step",
            "added each (median)",
            "quickest runs",
            "processor time",
            "step ratio",
            "where everything fits",
        ),
        [
            (
                _MODES[row["mode"]],
                str(row["operators"]),
                f"{row['added_microseconds']:.1f} us",
                f"{row['added_microseconds_at_best']:.1f} us",
                f"{row['added_cpu_microseconds']:.1f} us",
                f"{row['step_ratio']:.2f}",
                f"{row['settled_step_ratio']:.3f}",
            )
            for row in record["results"]
        ],
    )


_MODES = {
    "inference": "forward without gradients",
    "frozen": "forward, backward to the input",
    "training": "forward, backward, AdamW (gradients leave, weights return)",
}


def prefetch(record: Record) -> str:
    return (
        "## Step time over max(compute, transfer)\n\nOn a virtual link of set speed, "
        f"{record['parameters']['share']:.0%} of the weights resident.\n\n"
        + _table(
            (
                "",
                "transfer / compute",
                "without prefetch",
                "with prefetch",
                "no schedule below",
                "with prefetch / that",
            ),
            [
                (
                    row["mode"],
                    f"{row['transfer_over_compute']:.2f}",
                    f"{row['ratio_without_prefetch']:.3f}",
                    f"{row['ratio_with_prefetch']:.3f}",
                    f"{row['ratio_least']:.3f}",
                    f"{row['ratio_with_prefetch'] / row['ratio_least']:.3f}",
                )
                for row in record["results"]
            ],
        )
    )


def host_step(record: Record) -> str:
    return (
        "## Step time over max(compute, transfer, host step)\n\nHost step and transfer equally long, clipping on; in "
        "brackets what no schedule can be below. Bound: 1.15.\n\n![Step times](images/host_step.png)\n\n"
        + _table(
            (
                "transfer = host step",
                "device holds",
                "clips",
                "step at once",
                "deferred",
                "and device homes",
                "and begun in backward",
                "both",
            ),
            [
                (
                    f"{row['share']:.2f} x compute",
                    f"{row['held']:.0%}",
                    "every step" if row["clips"] else "never",
                    f"{row['ratios']['at once']:.2f}",
                    *(
                        f"{row['ratios'][way]:.2f} ({row['least'][way]:.2f})"
                        for way in ("deferred", "homes", "tried", "both")
                    ),
                )
                for row in record["results"]
            ],
        )
    )


def host_bandwidth(record: Record) -> str:
    rows = record["results"]
    threads = max(row["threads"] for row in rows)
    memory = next(row["memory"] for row in rows if row["threads"] == threads and "memory" in row)
    rates = {key: row["best_bytes_per_second"] / 1e9 for key, row in memory.items()}

    def rate(row: Record, way: str) -> str:
        if way not in row["step"]:
            return ""
        return f"{row['step'][way]['best_bytes_per_second'] / 1e9:.1f}"

    return (
        f"## GB/s of the step on the host\n\n{threads} threads, the quickest run of each (a copy: "
        f"{rates['copy']:.1f}, a triad: {rates['triad']:.1f}).\n\n"
        + _table(
            ("", "tensors", "torch", "torch, fused=True", "hetero"),
            [
                (
                    row["optimizer"],
                    row["model"],
                    *(rate(row, way) for way in ("torch", "torch, fused", "hetero")),
                )
                for row in rows
                if row["threads"] == threads and "step" in row
            ],
        )
    )


def bytes_moved(record: Record) -> str:
    planned, measured = record["results"]["planned"], record["results"]["measured"]
    shares = record["parameters"]["shares"]
    text = "## Bytes moved over the least possible\n\nThe least: the interval linear program. The worst of "
    text += f"{', '.join(record['parameters']['models'])}; bound: 1.02.\n\n"
    rows = []
    for policy, on in _ways(planned):
        mine = [row for row in planned if row["policy"] == policy and row["prefetch"] == on]
        run = [row for row in measured if row["policy"] == policy and row["prefetch"] == on]
        cells = [f"{max(row['ratio'] for row in mine if row['share'] == share):.3f}" for share in shares]
        cells.append(f"{max(row['ratio'] for row in run):.3f}" if run else "-")
        rows.append((policy, "yes" if on else "no", *cells))
    measured_at = ", ".join(f"{share:.0%}" for share in record["parameters"]["measured_shares"])
    heads = [f"{share:.0%}" for share in shares]
    return text + _table(("policy", "prefetch", *heads, f"run at {measured_at}"), rows)


def _ways(rows: Sequence[Record]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((row["policy"], row["prefetch"]) for row in rows))


def planning(record: Record) -> str:
    rows = record["results"]
    lengths = list(dict.fromkeys(row["accesses"] for row in rows))
    ways = dict.fromkeys((row["policy"], row["prefetch"]) for row in rows)
    times = {(row["policy"], row["prefetch"], row["accesses"]): row["cpu_seconds"] for row in rows}
    return (
        "## Planning time by accesses in an iteration\n\nProcessor seconds; bound: 1 s for 100,000.\n\n"
        + _table(
            ("policy", "prefetch", *(f"{length:,}" for length in lengths)),
            [
                (
                    policy,
                    {True: "yes", False: "no", None: ""}[on],
                    *(f"{times[policy, on, length]:.2f}" for length in lengths),
                )
                for policy, on in ways
            ],
        )
    )


def sweep(record: Record) -> str:
    rows = [
        (
            f"{row['way']}, {row['share']:.0%}" if "share" in row else row["way"],
            *(_sweep_cells(row) if "error" not in row else (row["error"], *[""] * 6)),
        )
        for row in record["results"]
    ]
    title = (
        f"## A GPT of {record['parameters']['parameters'] / 1e9:.3g} billion parameters under budgets\n\n"
        "float32, AdamW; shares of the unmanaged peak.\n\n"
    )
    heads = ("", "step", "of it the optimizer", "device peak", "budget", "moved a step", "host", "losses")
    return title + _table(heads, rows)


def _sweep_cells(row: Record) -> tuple[str, ...]:
    def size(key: str) -> str:
        return format_bytes(int(row[key])) if key in row else ""

    losses = ""
    if "losses_equal_unmanaged" in row:
        apart = row["largest_relative_loss_difference"]
        losses = "equal" if row["losses_equal_unmanaged"] else f"within {apart:.1g}"
    return (
        f"{row['seconds']:.2f} s",
        f"{row['optimizer_seconds']:.2f} s",
        *(size(key) for key in ("peak_device_bytes", "device_budget", "bytes_moved", "host_bytes")),
        losses,
    )


def activations(record: Record) -> str:
    rows = []
    for row in record["results"]:
        times, name = row["medians"], row.get("model") or f"chain, {row['transfer_over_forward']:g}"
        for way, label in _MOVING_ALL.items():
            mine = f"hetero_at_{way}"
            predicted = statistics.median(
                times[mine] / moved["predicted_seconds"] for moved in row["moved"][mine]
            )
            rows.append(
                (
                    name,
                    f"{times['unmanaged']:.3f} s",
                    label,
                    f"{row['peak_bytes'][way] / row['peak_bytes']['unmanaged']:.0%}",
                    f"{times[way]:.3f} s",
                    f"{times[mine]:.3f} s",
                    f"{times[mine] / times[way]:.3f}",
                    f"{predicted:.3f}",
                )
            )
    what = "a chain of layers" if record["benchmark"] == "activations" else "models"
    heads = ("", "unmanaged", "beside", "at a peak of", "it", "hetero", "ratio", "measured over predicted")
    return (
        f"## Steps whose activations leave: {what}\n\n"
        "hetero has the peak of the way beside it as its budget; the chain's number is what a layer's saved tensors "
        "take on the link, of its forward. Bounds: ratio 1, prediction within 0.05.\n\n" + _table(heads, rows)
    )


_MOVING_ALL = {"save_on_cpu": "torch's save_on_cpu", "swap_everything": "swapping everything beside compute"}


def swap(record: Record) -> str:
    rows = []
    for row in record["results"]:
        free = {way: 100 - found["zero_overhead_percent_of_peak"] for way, found in row["methods"].items()}
        paper = row["paper_mb"]
        rows.append(
            (
                row["machine"],
                row["network"],
                *(f"{free[way]} %" for way in _SWAP_WAYS),
                f"{100 * (1 - row['bound_bytes'] / row['peak_bytes']):.1f} %",
                f"{100 * (1 - paper[1] / paper[0]):.1f} %" if paper else "",
                _overhead_at(row["methods"]["plan"], 0.4),
            )
        )
    return (
        "## AutoSwap: load reduction at no simulated overhead\n\n"
        "Batch 100, CIFAR-10 shapes, the paper's model of transfers. Machines: a GTX 1080 Ti's *roofline*; the same, "
        "slowed to *published* kernel times; *calibrated* with the paper's own figures. *bound*: no plan frees more. "
        "*60 % less*: the one plan's overhead at that limit, and in brackets what no plan is below; the paper's is "
        "15 %. Overheads against limits: [`swap.png`](../benchmarks/results/swap.png).\n\n"
        + _table(("machine", "network", *_SWAP_WAYS.values(), "bound", "paper", "60 % less"), rows)
    )


def _overhead_at(method: Record, share: float) -> str:
    overhead = dict(method["curve"])[share]
    bound = next(bound["overhead"] for bound in method["bounds"] if bound["share"] == share)
    return f"{overhead:.1%} ({max(bound, 0.0):.1%})" if overhead is not None else ""


_SWAP_WAYS = {
    "doa": "DOA",
    "aoa": "AOA",
    "wdoa": "WDOA",
    "swdoa": "SWDOA",
    "bo": "BO of the four",
    "search": "local search",
    "training": "training's planner",
    "plan": "one plan",
}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _source(name: str, record: Record) -> str:
    machine = record["machine"]
    where = f"{machine['cores']} cores ({machine['cpu']}, load {machine['load']})"
    if machine["accelerator"]:
        where += f", {machine['accelerator']}"
    return (
        f"[`benchmarks/results/{name}.json`](../benchmarks/results/{name}.json): {where}, torch {record['torch']}, "
        f"Python {record['python']}, {record['date'][:10]}, commit {record['commit'][:7]}"
    )


TABLES: dict[str, Callable[[Record], str]] = {
    "overhead": overhead,
    "prefetch": prefetch,
    "host_step": host_step,
    "host_bandwidth": host_bandwidth,
    "bytes": bytes_moved,
    "planning": planning,
    "activations": activations,
    "activations_models": activations,
    "swap": swap,
    "sweep": sweep,
    "sweep_cpu": sweep,
}


def _overhead_lines(record: Record) -> list[Line]:
    rows = [
        row for row in record["results"] if row["mode"] != "training"
    ]  # there gradients leave, and are waited for
    added = max(row["added_microseconds"] for row in rows)
    fits = max(row["settled_step_ratio"] for row in record["results"])
    return [
        ("time added to an operator", " whose copies are resident", f"{added:.1f} us", "10 us"),
        ("step where everything fits", ", over unmanaged", f"{fits:.3f}", "1.01"),
    ]


def _bytes_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"]["planned"] if row["policy"] == "opt" and row["prefetch"]]
    worst = max(row["ratio"] for row in rows)
    return [
        ("bytes moved over the least possible", f", the worst of {len(rows)} plans", f"{worst:.3f}", "1.02")
    ]


def _prefetch_lines(record: Record) -> list[Line]:
    row = next(row for row in record["results"] if row["mode"] == "training")
    ratios = f"{row['ratio_without_prefetch']:.2f}, {row['ratio_with_prefetch']:.2f}"
    rest = ", transfer as long as compute, over the longer: without prefetch, with"
    return [("training step", rest, ratios, f"none is below {row['ratio_least']:.2f}")]


def _host_step_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"] if row["share"] == 1.0]
    lines = []
    for clips, norm in ((False, "that never clips"), (True, "that clips every time")):
        mine = [row for row in rows if row["clips"] is clips]
        if not mine:
            continue
        row = max(mine, key=lambda row: row["ratios"]["both"])
        ratios = ", ".join(f"{row['ratios'][way]:.2f}" for way in ("at once", "deferred", "tried", "both"))
        rest = (
            f", the host's step as long as well, a norm {norm}, {row['held']:.0%} of the weights resident: stepped "
            "at once, deferred, begun in backward (`speculate=True`), and with device homes"
        )
        lines.append(("the same", rest, ratios, "1.15"))
    return lines


def _bandwidth_lines(record: Record) -> list[Line]:
    rows = record["results"]
    threads = max(row["threads"] for row in rows)
    mine = [row for row in rows if row["threads"] == threads]
    copy = next(row["memory"]["copy"]["best_bytes_per_second"] for row in mine if "memory" in row) / 1e9
    step = next(row["step"] for row in mine if row.get("optimizer") == "AdamW" and row["model"] == "large")
    rates = [f"{step[way]['best_bytes_per_second'] / 1e9:.0f}" for way in ("torch", "hetero")]
    return [("AdamW on the host", ", GB/s: torch's default, hetero", ", ".join(rates), f"a copy: {copy:.0f}")]


def _worst_ratios(record: Record) -> str:
    rows = [row["medians"] for row in record["results"]]
    return ", ".join(f"{max(row[f'hetero_at_{way}'] / row[way] for row in rows):.2f}" for way in _MOVING_ALL)


def _activations_lines(record: Record) -> list[Line]:
    ratios = _worst_ratios(record)
    rest = ", at the same peak, over that of moving all: by `save_on_cpu`, beside compute"
    what = "step of a chain of layers whose activations leave"
    return [(what, rest, ratios, "1")]


def _models_lines(record: Record) -> list[Line]:
    ratios = _worst_ratios(record)
    models = ", ".join(row["model"] for row in record["results"])
    return [(f"the worst of {models}", ", likewise", ratios, "1")]


def _planning_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"] if row["policy"] == "opt" and row["prefetch"]]
    row = max(rows, key=lambda row: row["accesses"])
    return [
        (f"planning {row['accesses']:,} accesses", ", processor time", f"{row['cpu_seconds']:.2f} s", "1 s")
    ]


HEADLINES: dict[str, Callable[[Record], list[Line]]] = {
    "overhead": _overhead_lines,
    "bytes": _bytes_lines,
    "prefetch": _prefetch_lines,
    "host_step": _host_step_lines,
    "host_bandwidth": _bandwidth_lines,
    "activations": _activations_lines,
    "activations_models": _models_lines,
    "planning": _planning_lines,
}

if __name__ == "__main__":
    sys.exit(main())
