"""The tables of docs/measured.md on plans that are made without training, each from the record of one benchmark."""

from collections.abc import Sequence

from benchmarks.markdown import Record, markdown

__all__ = ["bytes_moved", "footprint", "planning", "swap"]


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
    return text + markdown(("policy", "prefetch", *heads, f"run at {measured_at}"), rows)


def _ways(rows: Sequence[Record]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((row["policy"], row["prefetch"]) for row in rows))


def planning(record: Record) -> str:
    rows = record["results"]
    lengths = list(dict.fromkeys(row["accesses"] for row in rows))
    ways = dict.fromkeys((row["policy"], row["prefetch"]) for row in rows)
    times = {(row["policy"], row["prefetch"], row["accesses"]): row["cpu_seconds"] for row in rows}
    return (
        "## Planning time by accesses in an iteration\n\nProcessor seconds; bound: 1 s for 100,000.\n\n"
        + markdown(
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
        "15 %.\n\n![Load reduction by swapping](images/swap.png)\n\n"
        + markdown(("machine", "network", *_SWAP_WAYS.values(), "bound", "paper", "60 % less"), rows)
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


def footprint(record: Record) -> str:
    rows = []
    for row in record["results"]:
        cells = []
        for found in row["baselines"].values():
            less = found["less"]
            cells += [
                f"{found['bytes'] / row['peak_bytes']:.2f}",
                f"{less['overhead']:.1%}" if less else "not to be had",
                f"{found['for_nothing']:.0%}",
                f"{found['for_the_paper_s_overhead']:.0%}",
            ]
        rows.append((row["machine"], row["network"], *cells))
    heads = ("CNMeM over load", "60 % less costs", "for nothing", "for 15 %")
    return (
        "## SmartPool and AutoSwap together: footprint less than CNMeM's\n\n"
        "Machines as above. Both are simulated, swapped tensors placed by SmartPool's rule; CNMeM grows request by "
        "request in the first four columns, and has one pool of the right size in the last four. The paper (CNMeM up "
        "to 1.15 times the load): up to a third less for nothing, 60 % less for under 15 % of the step.\n\n"
        + markdown(("machine", "network", *heads, *(f"{head}, one pool" for head in heads)), rows)
    )
