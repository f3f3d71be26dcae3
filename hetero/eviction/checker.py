"""An independent judge of schedules: replays every moment on plain sets and refuses the first violation.

Deliberately naive. Shares nothing with the planner but the nouns, so that neither can hide the other's
mistakes. It judges validity and byte totals, not quality.
"""

from hetero.errors import PlanError
from hetero.eviction.model import Schedule, Trace

__all__ = ["check"]


def check(trace: Trace, schedule: Schedule) -> None:
    """Raise `PlanError` at the first moment where ``schedule`` does what ``trace`` does not allow.

    A cyclic schedule is replayed for two iterations, from clean copies of ``start``; the second is the steady
    state whose bytes must equal the schedule's totals.
    """
    if len(schedule.actions) != len(trace.moments):
        raise PlanError(f"the schedule has {len(schedule.actions)} moments, the trace {len(trace.moments)}")
    if not trace.cyclic and schedule.start:
        raise PlanError(f"a trace that does not repeat starts empty, the schedule with {schedule.start}")
    if len(set(schedule.start)) != len(schedule.start) or not set(schedule.start) <= set(
        range(len(trace.sizes))
    ):
        raise PlanError(f"start {schedule.start} repeats a tensor or names an unknown one")
    resident = set(schedule.start)
    dirty: set[int] = set()
    fetched = written_back = 0
    for _ in range(2 if trace.cyclic else 1):
        fetched, written_back = _replay(trace, schedule, resident, dirty)
        if trace.cyclic and resident != set(schedule.start):
            odd = sorted(resident ^ set(schedule.start))
            raise PlanError(f"tensors {odd} are resident at one end of the iteration but not at the other")
    if fetched != schedule.fetched_bytes:
        raise PlanError(f"{fetched} bytes are fetched, the schedule says {schedule.fetched_bytes}")
    if written_back != schedule.written_back_bytes:
        raise PlanError(
            f"{written_back} bytes are written back, the schedule says {schedule.written_back_bytes}"
        )


def _replay(trace: Trace, schedule: Schedule, resident: set[int], dirty: set[int]) -> tuple[int, int]:
    """One iteration, changing ``resident`` and ``dirty``; returns bytes fetched and written back."""
    fetched = written_back = 0
    invalidated: set[int] = set()
    for index, (moment, actions) in enumerate(zip(trace.moments, schedule.actions, strict=True)):
        for tensor in moment.invalidates:
            resident.discard(tensor)
            dirty.discard(tensor)
            invalidated.add(tensor)
        for tensor in actions.evict:
            if tensor not in resident:
                raise PlanError(f"moment {index} evicts tensor {tensor}, which is not resident")
            resident.remove(tensor)
            if tensor in dirty:
                dirty.remove(tensor)
                written_back += trace.sizes[tensor]
        for tensor in moment.produces:
            if tensor in resident:
                raise PlanError(f"moment {index} produces tensor {tensor}, which is already resident")
            resident.add(tensor)
            invalidated.discard(tensor)
        for tensor in actions.fetch:
            if not 0 <= tensor < len(trace.sizes):
                raise PlanError(f"moment {index} fetches tensor {tensor}, which the trace does not know")
            if tensor in resident:
                raise PlanError(f"moment {index} fetches tensor {tensor}, which is already resident")
            resident.add(tensor)
            invalidated.discard(tensor)
            fetched += trace.sizes[tensor]
        for tensor in moment.operands:
            if tensor not in resident:
                why = "was invalidated and not fetched again" if tensor in invalidated else "is not resident"
                raise PlanError(
                    f"moment {index} needs tensor {tensor} ({trace.sizes[tensor]} bytes), which {why}"
                )
        held = sum(trace.sizes[tensor] for tensor in resident)
        if held > moment.capacity:
            raise PlanError(f"moment {index} holds {held} bytes of {moment.capacity}")
        dirty.update(moment.dirties)
    return fetched, written_back
