"""The pictures of the README and of docs/measured.md, from the files under ``results/``.

python -m benchmarks.pictures

Every bar and line comes from a file; a benchmark that has not been run gives no picture.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.record import read

Record = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "docs" / "images"
# Names of machines in `swap.json`, and what their times are.
_MACHINES = {
    "roofline": "times: a GTX 1080 Ti's roofline",
    "published": "times: published kernels'",
    "calibrated": "times: calibrated by the paper's",
}
_IN_THE_PAPER = {"vgg16": "VGG16", "resnet50": "ResNet50"}  # with figures of their own
_SCORES = ("doa", "aoa", "wdoa", "swdoa")
_GREY, _BLUES, _ORANGE, _INK = (
    "#b8b8b8",
    ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c"),
    "#e6842a",
    "#222222",
)
# As keys of `host_step.json`, and what they are called.
_WAYS = {
    "at once": "step at once",
    "deferred": "deferred",
    "homes": "deferred, with device homes",
    "tried": "begun in backward",
    "both": "begun in backward,\nwith device homes",
}


def main() -> None:
    for name, draw in {"host_step": host_step, "sweep_cpu": sweep, "swap": swap}.items():
        record = read(name)
        if record is not None:
            figure = Figure(dpi=150, layout="constrained")
            draw(record, figure)
            figure.savefig(FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")


def host_step(record: Record, figure: Figure) -> None:
    """Bars for each row of the benchmark, and below which none can be."""
    axes = _one(figure, "Time of a step, lower is better: at 1, all but the slowest part is hidden")
    rows = sorted(record["results"], key=lambda row: (row["clips"], -row["held"], row.get("copies", 0.0)))
    width = 0.8 / len(_WAYS)
    for place, (way, label) in enumerate(_WAYS.items()):
        x = [n + (place - len(_WAYS) / 2 + 0.5) * width for n in range(len(rows))]
        axes.bar(x, [row["ratios"][way] for row in rows], width * 0.92, label=label, color=_BLUES[place])
        for at, row in zip(x, rows, strict=True):
            if way in row["least"]:
                axes.hlines(row["least"][way], at - width / 2, at + width / 2, color=_ORANGE, linewidth=2)
    axes.hlines([], 0, 0, color=_ORANGE, linewidth=2, label="no schedule can be below")
    axes.axhline(1, color=_INK, linewidth=0.8)
    axes.set_xticks(range(len(rows)), [_row_label(row) for row in rows], fontsize=7)
    axes.set_ylabel("step over the longest\nof compute, transfer, host step", fontsize=8)
    _finish(axes)


def _row_label(row: Record) -> str:
    share = "" if row["share"] == 1 else f"\ntransfer, host step {row['share']:.2f}"
    copies = "\ncopies first, as slowly" if row.get("copies") else ""
    return f"{row['held']:.0%} held" + ("\nclips every step" if row["clips"] else "") + copies + share


def sweep(record: Record, figure: Figure) -> None:
    """Peaks under budgets, beside the unmanaged one, and what moves."""
    axes = _one(figure, "The peak keeps to the budget; what no longer fits moves")
    rows = [row for row in record["results"] if "device_budget" in row]
    x = range(len(rows))
    for place, (key, label) in enumerate(
        {"peak_device_bytes": "device peak", "bytes_moved": "moved in a step"}.items()
    ):
        nbytes = [row[key] / 2**20 for row in rows]
        axes.bar(
            [at + 0.32 * (place - 0.5) for at in x], nbytes, 0.3, color=_BLUES[3 - 2 * place], label=label
        )
    for at, row in zip(x, rows, strict=True):
        budget = row["device_budget"] / 2**20
        axes.hlines(
            budget, at - 0.36, at + 0.04, color=_ORANGE, linewidth=2, label="" if at else "device budget"
        )
    unmanaged = record["results"][0]
    axes.axhline(
        unmanaged["peak_device_bytes"] / 2**20,
        color=_GREY,
        zorder=0,
        label=f"unmanaged peak ({unmanaged['seconds']:.2f} s a step)",
    )
    axes.set_xticks(x, [f"{row['share']:.0%}\n{row['seconds']:.2f} s" for row in rows])
    axes.set_xlabel("device budget, of the unmanaged peak; time of a step", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    _finish(axes)


def swap(record: Record, figure: Figure) -> None:
    """What may leave the device at no cost, and what more of it costs, for each model of the machine's times."""
    figure.set_size_inches(9.6, 5.4)
    figure.suptitle(
        "Memory freed by activations that leave for a while (simulated): how close to what is possible",
        fontsize=10,
    )
    grid = figure.subplots(2, len(_MACHINES), sharey="row")
    for place, (machine, title) in enumerate(_MACHINES.items()):
        rows = [row for row in record["results"] if row["machine"] == machine]
        _freed(rows, grid[0][place])
        grid[0][place].set_title(title, fontsize=9)
        for row, style in zip((r for r in rows if r["network"] in _IN_THE_PAPER), ("-", "--"), strict=True):
            _costs(row, grid[1][place], style)
        grid[1][place].set_xlabel("% of the peak that leaves", fontsize=8)
    grid[0][0].set_ylabel("% of the peak\nthat leaves for free", fontsize=8)
    grid[1][0].set_ylabel("% that the step takes longer", fontsize=8)
    for axes in grid.flat:
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for row_of_axes in grid:
        handles, labels = row_of_axes[-1].get_legend_handles_labels()
        row_of_axes[-1].legend(
            handles, labels, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1)
        )


def _freed(rows: list[Record], axes: Axes) -> None:
    x = range(len(rows))
    free = [
        {way: 100 - m["zero_overhead_percent_of_peak"] for way, m in row["methods"].items()} for row in rows
    ]
    best = [max(each[way] for way in _SCORES) for each in free]
    axes.bar([at - 0.2 for at in x], best, 0.36, color=_BLUES[1], label="the best of AutoSwap's\nfour scores")
    axes.bar(
        [at + 0.2 for at in x],
        [each["plan"] for each in free],
        0.36,
        color=_BLUES[3],
        label="one plan (hetero)",
    )
    for at, row in zip(x, rows, strict=True):
        bound = 100 * (1 - row["bound_bytes"] / row["peak_bytes"])
        axes.hlines(
            bound, at - 0.4, at + 0.4, color=_ORANGE, linewidth=2, label="" if at else "no plan can free more"
        )
    paper = [
        (at, 100 * (1 - row["paper_mb"][1] / row["paper_mb"][0]))
        for at, row in enumerate(rows)
        if row["paper_mb"]
    ]
    axes.plot(
        *zip(*paper, strict=True), "D", color=_INK, markersize=4, linestyle="", label="AutoSwap's paper"
    )
    axes.set_xticks(x, [row["network"].replace("resnet", "res\n").replace("vgg", "vgg\n") for row in rows])


def _costs(row: Record, axes: Axes, style: str) -> None:
    curves = [dict(map(tuple, row["methods"][way]["curve"])) for way in _SCORES]
    plan = row["methods"]["plan"]
    called = _IN_THE_PAPER[row["network"]]
    best = [(share, [c[share] for c in curves if c[share] is not None]) for share in curves[0]]
    lines = {
        "the best score": (_BLUES[1], [(share, min(overheads)) for share, overheads in best if overheads]),
        "one plan": (_BLUES[3], [(share, over) for share, over in plan["curve"] if over is not None]),
        "no plan is faster": (
            _ORANGE,
            [(b["share"], b["overhead"]) for b in plan["bounds"] if b is not None],
        ),
    }
    for label, (color, points) in lines.items():
        xs, ys = zip(*((100 * (1 - share), 100 * over) for share, over in points), strict=True)
        axes.plot(xs, ys, style, color=color, linewidth=1.4, label=f"{called}: {label}")


def _one(figure: Figure, title: str) -> Axes:
    figure.set_size_inches(7.2, 3.2)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9, loc="left")
    return axes


def _finish(axes: Axes) -> None:
    axes.margins(y=0.15)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


if __name__ == "__main__":
    main()
