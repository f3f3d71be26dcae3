"""A naive simulator of a swap plan, second by second, for steps whose times and transfers are whole seconds.

It shares no code with the event simulation: it reads the rules of the paper's section IV-E off the plan itself.
"""

from dataclasses import dataclass, field

from hetero.simulate import Link, Machine
from hetero.swap import Step, Swap

_LINK = Link(latency=0.0, seconds_per_byte=1.0)
# One byte a second each way, no latency: bytes and seconds are the same numbers.
SLOW = Machine(name="a byte a second", flops=1.0, memory_bandwidth=1.0, h2d=_LINK, d2h=_LINK)


@dataclass
class Run:
    """What happened: when operators, outs and ins began and ended, and memory in every second."""

    operators: list[tuple[int, int]] = field(default_factory=list)
    outs: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # (iteration of use, swap)
    ins: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)


def run(step: Step, swaps: tuple[Swap, ...], limit: int, iterations: int) -> Run:
    """``iterations`` of the step; one byte a second in each direction. Gives up if nothing moves."""
    span, found = step.span, Run()
    total = span * iterations
    outs = [
        (turn * span + swap.gap.after, turn, k) for turn in range(iterations) for k, swap in enumerate(swaps)
    ]
    outs.sort(key=lambda out: out[0])
    ins = [(turn, k) for turn in range(iterations) for k in range(len(swaps))]
    away = {k for k, swap in enumerate(swaps) if swap.gap.before >= span}
    born, dying = _births_and_deaths(step)
    memory = min(int(step.load[0]), int(step.load[-1])) - sum(swaps[k].gap.nbytes for k in away)
    ended: dict[int, int] = {}  # operator, unrolled -> second
    out_ended: dict[tuple[int, int], int] = {}
    in_ended: dict[tuple[int, int], int] = {}
    busy: dict[str, tuple[int, object] | None] = {"compute": None, "in": None, "out": None}
    operator, now, still = 0, 0, 0
    while len(ended) < total:
        still += 1
        assert still < 10_000, "nothing moves any more"
        for who, running in list(busy.items()):
            if running is None or running[0] > now:
                continue
            busy[who], still = None, 0
            what = running[1]
            if who == "compute":
                assert isinstance(what, int)
                ended[what] = now
                memory -= dying[what % span]
            elif who == "out":
                out_ended[what] = now  # type: ignore[index]
                memory -= swaps[what[1]].gap.nbytes  # type: ignore[index]
            else:
                in_ended[what] = now  # type: ignore[index]
        if busy["compute"] is None and operator < total:
            turn, place = divmod(operator, span)
            needs = [(turn, k) for k, swap in enumerate(swaps) if swap.gap.before % span == place]
            if all(need in in_ended for need in needs) and _fits(memory, born[place], limit):
                memory += born[place]
                end = now + int(step.seconds[place])
                found.operators.append((now, end))
                busy["compute"] = (end, operator)
                operator += 1
        if busy["in"] is None and ins:
            turn, k = ins[0]
            gap, release = swaps[k].gap, swaps[k].release
            base = turn - (gap.before >= span)  # the iteration in which the gap begins
            there = base < 0 or (base, k) in out_ended
            freed = base * span + release - 1
            if there and (freed < 0 or freed in ended) and _fits(memory, gap.nbytes, limit):
                memory += gap.nbytes
                found.ins[(turn, k)] = (now, now + gap.nbytes)
                busy["in"] = (now + gap.nbytes, ins.pop(0))
        if busy["out"] is None and outs and outs[0][0] in ended:
            _, turn, k = outs.pop(0)
            found.outs[(turn, k)] = (now, now + swaps[k].gap.nbytes)
            busy["out"] = (now + swaps[k].gap.nbytes, (turn, k))
        found.memory.append(memory)
        now += 1
    return found


def _fits(memory: int, nbytes: int, limit: int) -> bool:
    return nbytes == 0 or memory + nbytes <= limit


def _births_and_deaths(step: Step) -> tuple[list[int], list[int]]:
    """Bytes that appear as each operator starts, and go as it ends; a cycle gives back what it took."""
    load = step.load.tolist()
    born = [sum(v.nbytes for v in step.variables if v.begin == t) for t in range(step.span)]
    dying = [sum(v.nbytes for v in step.variables if v.end == t + 1) for t in range(step.span)]
    kept = min(load[0], load[-1])
    born[0] = load[0] - kept
    dying[-1] = load[-1] - kept
    return born, dying
