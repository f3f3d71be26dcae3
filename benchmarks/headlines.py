"""The README's figures, one line or two from the record of each benchmark: its worst rows, beside the bound."""

from collections.abc import Callable

from benchmarks.measured import MOVING_ALL, Record

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
    ratios = f"{row['ratio_without_prefetch']:.2f}, {row['ratio_with_prefetch']:.2f}"
    rest = ", transfer as long as compute, over the longer: without prefetch, with"
    return [("training step", rest, ratios, f"none is below {row['ratio_least']:.2f}")]


def _accumulation_lines(record: Record) -> list[Line]:
    row = next(row for row in record["results"] if row["micro_batches"] == 4)
    ratios = f"{row['ratios']['autograd']:.2f}, {row['ratios']['behind']:.2f}"
    rest = " with four micro-batches, likewise: gradients added by autograd, by the queue's thread"
    return [("training step", rest, ratios, "1")]


def _host_step_lines(record: Record) -> list[Line]:
    rows = [row for row in record["results"] if row["share"] == 1.0]
    lines = []
    for clips, copies, norm in (
        (False, False, "that never clips"),
        (False, True, "that never clips, what is overwritten copied as slowly as it is updated"),
        (True, False, "that clips every time"),
    ):
        mine = [row for row in rows if row["clips"] is clips and (row.get("copies", 0.0) == 1.0) is copies]
        if not mine:
            continue
        row = max(mine, key=lambda row: row["ratios"]["both"])
        ratios = ", ".join(f"{row['ratios'][way]:.2f}" for way in ("at once", "deferred", "tried", "both"))
        rest = (
            f", the host's step as long as well, a norm {norm}, {row['held']:.0%} of the weights resident: stepped "
            "at once, deferred, begun in backward, and with device homes (the default)"
        )
        least = row["least"]["both"]
        lines.append(("the same", rest, ratios, "1.15" if least <= 1.15 else f"none is below {least:.2f}"))
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
    return ", ".join(f"{max(row[f'hetero_at_{way}'] / row[way] for row in rows):.2f}" for way in MOVING_ALL)


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
    "accumulation": _accumulation_lines,
    "host_step": _host_step_lines,
    "host_bandwidth": _bandwidth_lines,
    "activations": _activations_lines,
    "activations_models": _models_lines,
    "planning": _planning_lines,
}
