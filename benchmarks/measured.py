"""The tables of docs/measured.md, each from the record of one benchmark, and those on training themselves (those on
plans: `benchmarks.planned`)."""

import statistics
from collections.abc import Callable
from itertools import pairwise

from benchmarks.markdown import Record, markdown
from benchmarks.planned import bytes_moved, footprint, planning, swap
from hetero.units import format_bytes

__all__ = ["MOVING_ALL", "TABLES", "way_of"]


def overhead(record: Record) -> str:
    where = "" if record["machine"]["accelerator"].startswith("virtual") else ", on a GPU"
    title = f"## What management adds when every copy is resident{where}\n\nBound: 10 us an operator.\n\n"
    return title + markdown(
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
        + markdown(
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
        "brackets what no schedule can be below. A layer: its forward and backward; what is ours hides behind it on a "
        "GPU, not here, where operators run on the thread that starts them. Bound: 1.15.\n\n"
        "![Step times](images/host_step.png)\n\n"
        + markdown(
            (
                "transfer = host step",
                "device holds",
                "a layer",
                "clips",
                "copy before an early update",
                "step at once",
                "deferred",
                "and device homes",
                "and begun in backward",
                "both (the default)",
            ),
            [
                (
                    f"{row['share']:.2f} x compute",
                    f"{row['held']:.0%}",
                    f"{row['compute_seconds'] / record['parameters']['layers'] * 1e3:.0f} ms",
                    "every step" if row["clips"] else "never",
                    f"{row.get('copies', 0.0):.1f} x update",
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
        + markdown(
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


def sweep(record: Record) -> str:
    rows = [
        (
            way_of(row),
            *(_sweep_cells(row) if "error" not in row else (row["error"], *[""] * 6)),
        )
        for row in record["results"]
    ]
    facts = record["parameters"]
    billions = facts["parameters"] / 1e9
    size = f"{billions:.3g} billion" if billions >= 1 else f"{1e3 * billions:.3g} million"
    model = f"A GPT of {size} parameters"
    if facts.get("model") == "resnet50":
        model = f"A ResNet50 on images of {facts['side']} x {facts['side']}, {facts['batch']} at a time,"
    accelerator = record["machine"]["accelerator"]
    where = "" if accelerator.startswith("virtual") else f" on an {accelerator.split(' (')[0]}"
    title = f"## {model} under budgets{where}\n\n{facts['dtype']}, AdamW; shares of the unmanaged peak.\n\n"
    heads = ("", "step", "in the optimizer", "device peak", "budget", "moved a step", "host", "losses")
    return title + markdown(heads, rows)


def fits(record: Record) -> str:
    result, facts = record["results"], record["parameters"]
    times = [f"{result['seconds'][way] * 1e3:.2f} ms" for way in ("unmanaged", "managed")]
    title = f"## Where everything fits: a {'ResNet50' if facts['model'] == 'resnet50' else 'GPT'}\n\n"
    title += (
        f"{facts['share']:g} times the unmanaged peak; {facts['steps']} steps of each, in turns, medians.\n\n"
    )
    return title + markdown(
        ("unmanaged", "managed", "ratio", "bound"), [(*times, f"{result['step_ratio']:.3f}", "1.01")]
    )


def way_of(row: Record) -> str:
    """Of training, with its budget as a share of the unmanaged peak."""
    return f"{row['way']}, {row['share']:.0%}" if "share" in row else str(row["way"])


def _sweep_cells(row: Record) -> tuple[str, ...]:
    def size(key: str) -> str:
        return format_bytes(int(row[key])) if key in row else ""

    losses = ""
    if "losses_equal_unmanaged" in row:
        apart = row["largest_relative_loss_difference"]
        losses = "equal" if row["losses_equal_unmanaged"] else f"within {apart:.1g}"
    return (
        f"{row['seconds']:.3f} s",
        f"{row['optimizer_seconds']:.2f} s",
        *(size(key) for key in ("peak_device_bytes", "device_budget", "last_bytes_moved", "host_bytes")),
        losses,
    )


def activations(record: Record) -> str:
    rows = []
    for row in record["results"]:
        times, name = row["medians"], row.get("model") or f"chain, {row['transfer_over_forward']:g}"
        for way, label in MOVING_ALL.items():
            mine = f"hetero_at_{way}"
            predicted = statistics.median(moved["measured_over_predicted"] for moved in row["moved"][mine])
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
    chain = "A chain's number is what a layer's saved tensors take on the link, of its forward. "
    heads = (
        "",
        "unmanaged",
        "compared with",
        "at a peak of",
        "its step",
        "hetero's",
        "ratio",
        "measured over predicted",
    )
    return (
        f"## Steps whose activations leave: {what}\n\n"
        "hetero's budget is the peak of what it is compared with. "
        + (chain if record["benchmark"] == "activations" else "")
        + "Bounds: ratio 1, prediction within 0.05.\n\n"
        + markdown(heads, rows)
    )


MOVING_ALL = {"save_on_cpu": "torch's save_on_cpu", "swap_everything": "swapping everything beside compute"}


def accumulation(record: Record) -> str:
    return (
        "## Step time with several micro-batches over max(compute, transfer)\n\nOn a virtual link on which transfers "
        f"take as long as compute, {record['parameters']['share']:.0%} of the weights resident. What a micro-batch "
        "adds to gradients at home, autograd adds in backward, or the queue's thread does.\n\n"
        + markdown(
            ("micro-batches", "autograd adds", "the queue's thread adds", "the same, with clipping"),
            [
                (
                    str(row["micro_batches"]),
                    *(f"{row['ratios'][way]:.3f}" for way in ("autograd", "behind", "clipped")),
                )
                for row in record["results"]
            ],
        )
    )


def lengths(record: Record) -> str:
    heads = [f"steps {first}-{last}" for first, last in pairwise(record["parameters"]["windows"])]
    return (
        "## Batches of many lengths: step time over unmanaged\n\nA small Llama, training under "
        f"{record['parameters']['share']:.0%} of what the largest batch takes unmanaged, on the same batches in turns: "
        "the median step, in brackets the mean, in which measuring and planning take part. On this machine copies and "
        "the host's step share the processor with the operators, so the first line is what is to be had.\n\n"
        + markdown(
            ("batches", "shapes", *heads, "plans", "moved a step at the end", "losses"),
            [
                (
                    row["batches"],
                    str(row["shapes"]),
                    *(
                        f"{window['seconds'] / window['unmanaged_seconds']:.2f} "
                        f"({window['mean_seconds'] / window['unmanaged_mean_seconds']:.2f})"
                        for window in row["windows"]
                    ),
                    str(row["plans"]),
                    format_bytes(int(row["windows"][-1]["moved_bytes_a_step"])),
                    "equal" if row["losses_equal_unmanaged"] else "not equal",
                )
                for row in record["results"]
            ],
        )
    )


def zoo(record: Record) -> str:
    libraries: dict[str, list[Record]] = {}
    for row in record["results"]:
        libraries.setdefault(f"{row['library']} {row['version']}", []).append(row)
    shares = record["parameters"]["shares"]
    title = (
        "## Models of other libraries\n\nAs they come, with random weights: "
        f"{record['parameters']['steps']} steps of AdamW with clipping, each followed by an evaluation, under the "
        "smallest of these shares of the unmanaged peak that is enough. Losses, what was evaluated, parameters and "
        "buffers are compared.\n\n"
    )
    table = markdown(
        ("", "models", "bit-identical", "peak within the budget", *(f"with {share:.0%}" for share in shares)),
        [
            (
                library,
                str(len(rows)),
                str(sum(row.get("equal", False) for row in rows)),
                str(sum(row.get("is_within", False) for row in rows)),
                *(str(sum(row["share"] == share for row in rows)) for share in shares),
            )
            for library, rows in libraries.items()
        ],
    )
    names = (
        f"* {library}: {'; '.join(row['model'] for row in rows)}\n" for library, rows in libraries.items()
    )
    return title + table + "\n" + "".join(names)


TABLES: dict[str, Callable[[Record], str]] = {
    "overhead": overhead,
    "prefetch": prefetch,
    "accumulation": accumulation,
    "host_step": host_step,
    "host_bandwidth": host_bandwidth,
    "bytes": bytes_moved,
    "planning": planning,
    "activations": activations,
    "activations_models": activations,
    "swap": swap,
    "footprint": footprint,
    "lengths": lengths,
    "zoo": zoo,
    "cuda/sweep": sweep,
    "cuda/sweep_h100": sweep,
    "cuda/sweep_resnet50": sweep,
    "cuda/sweep_resnet50_of_8": sweep,
    "cuda/fits_gpt": fits,
    "cuda/fits_resnet50": fits,
    "cuda/overhead": overhead,
    "sweep_cpu": sweep,
}
