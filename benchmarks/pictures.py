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
    for name, draw in {"host_step": host_step, "sweep_cpu": sweep}.items():
        record = read(name)
        if record is not None:
            figure = Figure(figsize=(7.2, 3.2), dpi=150, layout="constrained")
            draw(record, figure.add_subplot())
            figure.savefig(FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")


def host_step(record: Record, axes: Axes) -> None:
    """Bars for each row of the benchmark, and below which none can be."""
    rows = sorted(record["results"], key=lambda row: (row["clips"], -row["held"]))
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
    return f"device holds {row['held']:.0%}" + ("\nclips every step" if row["clips"] else "") + share


def sweep(record: Record, axes: Axes) -> None:
    """Peaks under budgets, beside the unmanaged one, and what moves."""
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
        axes.text(at - 0.16, budget, f"{row['seconds']:.2f} s", ha="center", va="bottom", fontsize=7)
    unmanaged = record["results"][0]
    axes.axhline(
        unmanaged["peak_device_bytes"] / 2**20,
        color=_GREY,
        zorder=0,
        label=f"unmanaged peak ({unmanaged['seconds']:.2f} s a step)",
    )
    axes.set_xticks(x, [f"{row['share']:.0%}" for row in rows])
    axes.set_xlabel("device budget, of the unmanaged peak", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.margins(y=0.15)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


if __name__ == "__main__":
    main()
