"""A traced step as the eviction planner takes it: which operators need what, and how much room they leave.

Owns the translation of `StepTrace` into `Reading`, which says the same whatever the budget. Storages of parameters,
gradients and optimizer states are model data; activations of at least ``threshold`` bytes may leave; all else is load.

[Note: periods] A sampling moment comes before each operator that reads a parameter and, as at run time, before one that
makes or needs a large activation; what follows until the next one is its period. One begins as well where another
module's gradient follows one that has been made, which may have left by then. While one node of autograd runs, which
makes a parameter's gradient and reads the parameter, both stay, and no moment comes. A trace does not tell nodes: here,
of the operators of one module that come in a row, those from the first that does either to the last. The optimizer's
operators are one period, the last: at run time they run on the host, or one parameter after another.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from hetero.errors import PlanError
from hetero.trace import StepTrace, Storage

Ints = npt.NDArray[np.int64]

__all__ = ["Activation", "Parameter", "Period", "Reading", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One storage of parameters, with what training adds to it, in bytes."""

    name: str
    nbytes: int
    gradient_bytes: int
    state_bytes: int

    @property
    def is_trained(self) -> bool:
        return self.gradient_bytes > 0

    @property
    def whole_bytes(self) -> int:
        """With gradient and states."""
        return self.nbytes + self.gradient_bytes + self.state_bytes

    @property
    def update_bytes(self) -> int:
        """That an update reads and writes: values and states both ways, and the gradient."""
        return 2 * (self.nbytes + self.state_bytes) + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """``nbytes`` that come to be in period ``begin``, are needed in ``uses``, and are gone from period ``end`` on."""

    nbytes: int
    begin: int
    uses: tuple[int, ...]
    end: int


@dataclass(slots=True, kw_only=True)
class Period:
    """``reads``: parameters, by index. ``load``: peak bytes of what is neither model data nor an `Activation`.
    ``sends``: gradients that it makes, as ``(parameter, bytes, seconds after its begin)``."""

    reads: list[int] = field(default_factory=list)
    seconds: float = 0.0
    load: int = 0
    sends: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A step. ``parameters``: in the order of first use. ``periods``: of forward and backward; the step is not among
    them. ``step_load``: the most that the optimizer's operators have beside model data, in bytes."""

    parameters: tuple[Parameter, ...]
    activations: tuple[Activation, ...]
    periods: tuple[Period, ...]
    step_load: int
    buffer_bytes: int


def read(trace: StepTrace, seconds: Sequence[float], *, threshold: int, large: int) -> Reading:
    """``trace``, whose operators take ``seconds`` each, with activations of ``threshold`` bytes free to leave and
    sampling moments for those of ``large`` bytes. Raises `PlanError` if there are no parameters in it, or no backward.
    """
    if not any(operator.phase == "backward" for operator in trace.operators):
        raise PlanError(
            "the trace has no backward, and a training step is planned: trace one whole, with loss.backward()"
        )
    return _Reader(trace, seconds, threshold, large).read()


class _Reader:
    def __init__(self, trace: StepTrace, seconds: Sequence[float], threshold: int, large: int) -> None:
        self.trace, self.seconds = trace, seconds
        self.storages = {s.id: s for s in trace.storages if s.device == trace.device}
        self.parameters = self._order(s for s in self.storages.values() if s.kind == "parameter")
        if not self.parameters:
            raise PlanError("the trace has no parameters: give trace_step the model as one of its arguments")
        self.index = {s.id: place for place, s in enumerate(self.parameters)}
        self.places = [i for i, operator in enumerate(trace.operators) if operator.phase != "step"]
        self.movable = {
            s.id
            for s in self.storages.values()
            if s.kind == "activation" and s.nbytes >= threshold and s.begin > 0
        }
        self.large = {x for x in self.movable if self.storages[x].nbytes >= large}
        by_name = {s.name: place for place, s in enumerate(self.parameters)}
        # The parameter of each that this step makes, whenever the loop drops the ones before: those begin last.
        latest: dict[int, Storage] = {}
        for s in sorted(self.storages.values(), key=lambda s: s.begin):
            if s.kind == "gradient" and (owner := by_name.get(s.name.removesuffix(".grad"))) is not None:
                latest[owner] = s
        self.gradients = {s.id: owner for owner, s in latest.items()}
        self.made = self._first_writes()
        self.nodes = self._nodes()
        self.by_name = by_name
        self.touching: dict[int, list[int]] = defaultdict(list)  # by movable activation
        for place, operator in enumerate(trace.operators):
            for x in {*operator.reads, *operator.writes} & self.movable:
                self.touching[x].append(place)

    def read(self) -> Reading:
        period_of, periods = self._periods()
        activations = [
            self._activation(self.storages[x], period_of, len(periods)) for x in sorted(self.movable)
        ]
        kept = [a for a in activations if a is not None]
        staying = {x for x, a in zip(sorted(self.movable), activations, strict=True) if a is None}
        self._add_load(periods, period_of, staying)
        return Reading(
            parameters=self._parameters(),
            activations=tuple(kept),
            periods=tuple(periods),
            step_load=self._step_load(),
            buffer_bytes=sum(s.nbytes for s in self.storages.values() if s.kind == "buffer"),
        )

    def _order(self, parameters: Iterable[Storage]) -> list[Storage]:
        """By first use, those that are never used last."""
        first: dict[int, int] = {}
        for place, operator in enumerate(self.trace.operators):
            for touched in (*operator.reads, *operator.writes):
                first.setdefault(touched, place)
        return sorted(parameters, key=lambda s: (first.get(s.id, self.trace.span), s.id))

    def _first_writes(self) -> dict[int, int]:
        """The operators of backward that make each gradient, or begin to add to it."""
        made: dict[int, int] = {}
        for place, operator in enumerate(self.trace.operators):
            if operator.phase == "backward":
                for x in operator.writes:
                    if x in self.gradients:
                        made.setdefault(x, place)
        return made

    def _nodes(self) -> dict[int, range]:
        """By gradient: the operators of the node that makes it, as far as they hold its parameter; none, if they do not
        read that."""
        operators = self.trace.operators
        run_of: dict[int, list[int]] = {}
        for _, places in groupby(range(len(operators)), lambda x: (operators[x].phase, operators[x].module)):
            run = list(places)
            run_of.update(dict.fromkeys(run, run))
        nodes = {}
        for x, made in self.made.items():
            parameter = self.parameters[self.gradients[x]].id
            reading = [place for place in run_of[made] if parameter in operators[place].reads]
            if reading:
                nodes[x] = range(min(made, *reading), max(made, *reading) + 1)
        return nodes

    def _parameters(self) -> tuple[Parameter, ...]:
        states: dict[int, int] = defaultdict(int)
        for s in self.storages.values():
            if s.kind == "state" and (owner := self._owner(s.name)) is not None:
                states[owner] += s.nbytes
        gradients = {place: self.storages[x].nbytes for x, place in self.gradients.items()}
        return tuple(
            Parameter(
                name=s.name,
                nbytes=s.nbytes,
                gradient_bytes=gradients.get(place, 0),
                state_bytes=states[place],
            )
            for place, s in enumerate(self.parameters)
        )

    def _owner(self, name: str) -> int | None:
        """The parameter whose state is called ``name``: ``layer.weight.exp_avg``."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in self.by_name:
                return self.by_name[name]
        return None

    def _periods(self) -> tuple[dict[int, int], list[Period]]:
        """[Note: periods], and in which each operator is."""
        periods: list[Period] = [Period()]
        period_of: dict[int, int] = {}
        seen: set[int] = set()  # large activations that were touched in this phase
        held, still_held = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        for x, node in self.nodes.items():
            for place in node:
                held[place].add(self.gradients[x])
            for place in node[1:]:
                still_held[place].add(self.gradients[x])
        phase = sender = ""
        for place in self.places:
            operator = self.trace.operators[place]
            touched = (*operator.reads, *operator.writes)
            if operator.phase != phase:
                phase, seen = operator.phase, set()
            made = [x for x in operator.writes if self.made.get(x) == place]
            reads = {self.index[x] for x in touched if x in self.index} | held[place]
            new = {x for x in touched if x in self.large} - seen
            seen |= new
            if reads - still_held[place] or new or (made and periods[-1].sends and operator.module != sender):
                periods.append(Period(reads=sorted(reads)))
            period = periods[-1]
            period_of[place] = len(periods) - 1
            for x in made:
                sender = operator.module
                period.sends.append(
                    (self.gradients[x], self.storages[x].nbytes, period.seconds + self.seconds[place])
                )
            period.seconds += self.seconds[place]
        return period_of, periods

    def _activation(self, storage: Storage, period_of: dict[int, int], count: int) -> Activation | None:
        """None: it comes and goes within one period, or nobody uses it."""
        uses = sorted({period_of[place] for place in self.touching[storage.id] if place in period_of})
        if not uses or uses[0] == uses[-1]:
            return None
        last = self.places[max(bisect_left(self.places, storage.end) - 1, 0)]
        end = min(max(period_of.get(last, count - 1), uses[-1]) + 1, count)
        return Activation(nbytes=storage.nbytes, begin=uses[0], uses=tuple(uses), end=end)

    def _add_load(self, periods: list[Period], period_of: dict[int, int], staying: set[int]) -> None:
        """A gradient counts in the period that makes it, and as long as its node runs."""
        load = self._load(lambda s: s.id not in self.movable or s.id in staying)
        for place, period in period_of.items():
            periods[period].load = max(periods[period].load, int(load[place]))
        for x, place in self.made.items():
            node = self.nodes.get(x, range(place, place + 1))
            for number in {period_of[later] for later in node if later >= place}:
                periods[number].load += self.storages[x].nbytes

    def _step_load(self) -> int:
        load = self._load(lambda s: s.kind == "temporary")
        places = [i for i, operator in enumerate(self.trace.operators) if operator.phase == "step"]
        return int(load[places].max(initial=0)) if places else 0

    def _load(self, counts: Callable[[Storage], bool]) -> Ints:
        """Bytes alive at each operator of what is no parameter, gradient or state, and ``counts``."""
        change = np.zeros(self.trace.span + 1, dtype=np.int64)
        for s in self.storages.values():
            if s.kind not in ("parameter", "gradient", "state") and counts(s):
                change[s.begin] += s.nbytes
                change[s.end] -= s.nbytes
        return np.cumsum(change[:-1])
