"""Between two iterations the link is the caller's: the next batch comes by it.

Owns which of the last moment's fetches start there. The caller's own copy, of a batch, waits behind every copy that was
ordered before it, and the next iteration waits for the batch. So only as many are ordered in advance as the link
carries while the caller is busy anyway; the others start when the next iteration begins, beside its operators. A pure
function; it changes when fetches start, never which there are.
"""

from collections.abc import Sequence
from dataclasses import replace

from hetero.eviction.model import Actions, Links, Schedule, Trace
from hetero.eviction.simulation import simulate

__all__ = ["leave_link_free"]


def leave_link_free(trace: Trace, schedule: Schedule, links: Links, *, seconds: float) -> Schedule:
    """``schedule``, with what the last moment fetches and the link does not carry within ``seconds`` fetched by the
    first moment of the next iteration. ``seconds``: of the last period, with nothing ordered in advance."""
    if not trace.cyclic or len(trace.moments) < 2:
        return schedule
    first, last = schedule.actions[0], schedule.actions[-1]
    later = _later(trace, first, last.fetch, links, seconds)
    if not later:
        return schedule
    wanted = set(trace.moments[0].operands)
    fetch = (*later, *first.fetch)
    actions = (
        # The operands of a moment come first.
        replace(first, fetch=(*(x for x in fetch if x in wanted), *(x for x in fetch if x not in wanted))),
        *schedule.actions[1:-1],
        replace(last, fetch=tuple(x for x in last.fetch if x not in later)),
    )
    moved = replace(schedule, actions=actions, start=tuple(x for x in schedule.start if x not in later))
    result = simulate(trace, moved, links)
    return replace(moved, predicted_seconds=result.step_seconds, issue_seconds=result.issue_seconds)


def _later(
    trace: Trace, first: Actions, fetches: Sequence[int], links: Links, seconds: float
) -> tuple[int, ...]:
    """Those of ``fetches`` that are not carried in time, nor needed before the next iteration."""
    moment = trace.moments[0]
    stuck = {*trace.moments[-1].operands, *first.evict, *moment.invalidates, *moment.produces}
    clock, later = 0.0, []
    for x in fetches:
        clock += links.h2d_seconds(trace.sizes[x])
        if clock > seconds and x not in stuck:
            later.append(x)
    return tuple(later)
