"""The README's figures, one line or two from the record of each benchmark: its worst rows, beside the bound."""

from collections.abc import Callable

from benchmarks.markdown import Record
from benchmarks.measured import MOVING_ALL

__all__ = ["HEADLINES"]

Line = tuple[str, str, str, str]
"""What is linked to the file, the rest of the sentence, what was measured, the bound."""


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
    ratios = f"{row['ratio_without_prefetch']:.2f} → {row['ratio_with_prefetch']:.2f}"
    rest = " over the longer of compute and transfer, equally long: without → with prefetch"
    return [("training step", rest, ratios, f"none is below {row['ratio_least']:.2f}")]


def _accumulation_lines(record: Record) -> list[Line]:
    row = next(row for row in record["results"] if row["micro_batches"] == 4)
    ratios = f"{row['ratios']['autograd']:.2f} → {row['ratios']['behind']:.2f}"
    rest = ": gradients added within → behind backward"
    return [("the same with four micro-batches", rest, ratios, "1")]


def _host_step_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"] if row["share"] == 1.0]
    lines = []
    for clips, copies, case in (
        (False, False, "a norm that never clips"),
        (
            False,
            True,
            "a norm that never clips, where copying what a trial overwrites takes as long as the update",
        ),
        (True, False, "a norm that clips every time"),
    ):
        mine = [row for row in rows if row["clips"] is clips and (row.get("copies", 0.0) == 1.0) is copies]
        if not mine:
            continue
        mine.sort(key=lambda row: -row["held"])
        at_once, both = (
            ", ".join(f"{row['ratios'][way]:.2f}" for row in mine) for way in ("at once", "both")
        )
        held = ", ".join(f"{100 * row['held']:.0f}" for row in mine)
        rest = f", {case}, {held} % of the weights resident: stepped at once → by default"
        least = min(row["least"]["both"] for row in mine)
        bound = "1.15" if least <= 1.15 else f"none is below {least:.2f}"
        lines.append(("the same with a host step as long", rest, f"{at_once} → {both}", bound))
    return lines


def _bandwidth_lines(record: Record) -> list[Line]:
    rows = record["results"]
    threads = max(row["threads"] for row in rows)
    mine = [row for row in rows if row["threads"] == threads]
    copy = next(row["memory"]["copy"]["best_bytes_per_second"] for row in mine if "memory" in row) / 1e9
    step = next(row["step"] for row in mine if row.get("optimizer") == "AdamW" and row["model"] == "large")
    rates = [f"{step[way]['best_bytes_per_second'] / 1e9:.0f}" for way in ("torch", "hetero")]
    return [
        ("AdamW on the host", ", GB/s: torch's default → hetero", " → ".join(rates), f"a copy: {copy:.0f}")
    ]


def _worst_ratios(record: Record) -> str:
    rows = [row["medians"] for row in record["results"]]
    return ", ".join(f"{max(row[f'hetero_at_{way}'] / row[way] for row in rows):.2f}" for way in MOVING_ALL)


def _activations_lines(record: Record) -> list[Line]:
    ratios = _worst_ratios(record)
    rest = ", over that of moving all of them at the same peak: by `save_on_cpu`, beside compute"
    what = "step of a chain of layers whose activations leave"
    return [(what, rest, ratios, "1")]


def _models_lines(record: Record) -> list[Line]:
    ratios = _worst_ratios(record)
    models = ", ".join(_MODELS[row["model"]] for row in record["results"])
    return [(f"the same, the worst of {models}", "", ratios, "1")]


_MODELS = {"resnet50": "ResNet50", "gpt2": "GPT-2", "llama": "Llama"}


def _planning_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"] if row["policy"] == "opt" and row["prefetch"]]
    row = max(rows, key=lambda row: row["accesses"])
    return [
        (f"planning {row['accesses']:,} accesses", ", processor time", f"{row['cpu_seconds']:.2f} s", "1 s")
    ]


def _zoo_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"] if row["share"] is not None]
    shares = [row["share"] for row in rows]
    equal = sum(row["equal"] and row["is_within"] for row in rows)
    rest = (
        f" of {len({row['library'] for row in rows})} libraries, under {min(shares):.0%} to {max(shares):.0%} of their "
        "unmanaged peak: bit-identical, and within it"
    )
    return [("models", rest, f"{equal} of {len(record['results'])}", "all")]


HEADLINES: dict[str, Callable[[Record], list[Line]]] = {
    "zoo": _zoo_lines,
    "overhead": _overhead_lines,
    "bytes": _bytes_lines,
    "prefetch": _prefetch_lines,
    "accumulation": _accumulation_lines,
    "host_step": _host_step_lines,
    "host_bandwidth": _bandwidth_lines,
    "activations": _activations_lines,
    "activations_models": _models_lines,
    "planning": _planning_lines,
}
