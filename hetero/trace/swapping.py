"""A recorded step as the swap planner takes it: times for its operators, variables for its storages.

Owns the translation of `StepTrace` into `hetero.swap.Step`. It plans nothing.
"""

from hetero.errors import PlanError
from hetero.simulate import Machine
from hetero.swap.model import Step, Variable
from hetero.trace.steptrace import StepTrace, Storage

__all__ = ["operator_seconds", "swap_step"]

_PERSISTENT = frozenset({"parameter", "buffer", "gradient", "state", "input"})


def operator_seconds(trace: StepTrace, machine: Machine) -> tuple[float, ...]:
    """The roofline's time of each operator: its counted operations, and the storages that it reads and writes.

    A storage counts whole, once for reading and once for writing; caches and partial reads are not known.
    """
    nbytes = {storage.id: storage.nbytes for storage in trace.storages}
    return tuple(
        machine.operator_seconds(o.flops, sum(nbytes[i] for i in (*o.reads, *o.writes)))
        for o in trace.operators
    )


def swap_step(trace: StepTrace, seconds: tuple[float, ...], *, device: str | None = None) -> Step:
    """The storages on ``device`` (default: the trace's own) with their uses, and ``seconds`` for each operator.

    What was there before the step and is there after it, is there in every iteration. Raises `PlanError` if the trace
    has no operators (a CSV file has none), or another number of them than there are times.
    """
    if len(seconds) != len(trace.operators):
        raise PlanError(f"{len(seconds)} times for {len(trace.operators)} operators: give one for each")
    on = device or trace.device
    used: dict[int, list[int]] = {storage.id: [] for storage in trace.storages}
    written: dict[int, list[int]] = {storage.id: [] for storage in trace.storages}
    for index, operator in enumerate(trace.operators):
        for touched in {*operator.reads, *operator.writes}:
            used[touched].append(index)
        for touched in {*operator.writes}:
            written[touched].append(index)
    return Step(
        seconds=seconds,
        variables=tuple(
            _variable(storage, used[storage.id], written[storage.id], trace.span)
            for storage in trace.storages
            if storage.device == on and storage.nbytes
        ),
    )


def _variable(storage: Storage, uses: list[int], writes: list[int], span: int) -> Variable:
    persistent = storage.kind in _PERSISTENT and (storage.begin, storage.end) == (0, span)
    return Variable(
        nbytes=storage.nbytes,
        begin=storage.begin,
        end=storage.end,
        accesses=tuple(uses),
        persistent=persistent,
        name=storage.name,
        writes=tuple(writes),
    )
