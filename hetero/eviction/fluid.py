"""The step as a fluid: bytes may leave and return in any fractions, but each direction of the link takes its time.

Owns a linear program over the intervals of a trace, whose value no schedule can beat and whose solution says what had
better be away. Memory is looked at where a chosen few operators begin (checkpoints); between two of them lie the time
of the operators there and a delay, and the delays are what is minimised. What an interval has away at a checkpoint left
before it through the link, and returns after it. Every schedule is a solution, and so is the average over the
iterations of one that does not repeat: moved in one piece, bytes leave no room earlier and return no later than here,
where they move in parts that take their share of the latency. The bound is the dual's, valid whatever the solver did.

[Note: stretches] Stretch k lies between the beginnings of the operators of checkpoints k and k + 1, around the cycle.
Where a use lies in the middle of a stretch, its tensor may move in all of it: that can only help.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from hetero.eviction.intervals import Floats, Intervals, Ints
from hetero.eviction.model import Links, Trace
from hetero.eviction.reach import read_reachable

__all__ = ["Fluid", "fluid"]

_CHECKPOINTS = 64
_AFFORDABLE = 60_000  # intervals x checkpoints that they cover


@dataclass(frozen=True, slots=True, kw_only=True)
class Fluid:
    """``step_seconds``: no schedule is faster. ``away``: of each interval, the share of it that is away at most."""

    step_seconds: float
    away: Floats


def fluid(trace: Trace, links: Links, *, checkpoints: int = _CHECKPOINTS) -> Fluid:
    """The relaxation of a cyclic ``trace`` at about ``checkpoints`` moments, fewer if it is large.

    More checkpoints bound better. Raises `CapacityError` as `plan`.
    """
    problem = read_reachable(trace)
    seconds = np.fromiter((moment.seconds for moment in trace.moments), dtype=np.float64)
    total = float(seconds.sum())
    sending = sum(links.d2h_seconds(send.nbytes) for moment in trace.moments for send in moment.sends)
    least = max(total, sending)
    nothing = Fluid(step_seconds=least, away=np.zeros(len(problem.use)))
    if not trace.cyclic or not (problem.nbytes > 0).any():
        return nothing
    excess = problem.load(problem.saves) - problem.room
    while True:
        points = _checkpoints(seconds, excess, checkpoints)
        model = _Model(problem, links, points)
        if model.covered <= _AFFORDABLE or checkpoints < 16:
            break
        checkpoints //= 2
    edges = np.append(points, points[0] + problem.periods)
    work = np.diff(np.concatenate([[0.0], np.cumsum(np.tile(seconds, 2))])[edges])
    delay, away = model.solve(work, excess[points], sending)
    return Fluid(step_seconds=max(least, total + delay), away=away)


def _checkpoints(seconds: Floats, excess: Ints, most: int) -> Ints:
    """The moment with the most to move away in each of ``most`` equal parts of the iteration, and in all of it."""
    clock = np.cumsum(seconds) - seconds
    parts = np.unique(np.searchsorted(clock, np.linspace(0.0, float(seconds.sum()), most + 1)[:-1]))
    bounds = [*parts[parts < len(seconds)].tolist(), len(seconds)]
    found = {a + int(excess[a:b].argmax()) for a, b in pairwise(bounds) if a < b}
    return np.array(sorted({*found, int(excess.argmax())}), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What intervals have in common that the program cannot tell apart. Checkpoints count on around the cycle.

    ``covers``: the checkpoints ``[a, b)`` of each interval that carries the same write. ``since``: the first one at
    which that write can have been saved; -1 if there is nothing to save. ``returns``: whether each is fetched.
    """

    covers: tuple[tuple[int, int], ...]
    since: int
    returns: tuple[bool, ...]


class _Model:
    """The program, of shapes instead of intervals. Bytes are counted in ``scale``."""

    def __init__(self, problem: Intervals, links: Links, points: Ints) -> None:
        self.problem, self.links = problem, links
        self.count = len(points)
        ring = np.concatenate([points + turn * problem.periods for turn in range(3)])
        self.first = np.searchsorted(ring, problem.begin)
        self.last = np.searchsorted(ring, problem.end)
        self.shapes: dict[_Shape, list[tuple[int, ...]]] = defaultdict(list)
        self._read()
        # Fetched however one chooses: invalidated before its next use.
        certain = (problem.next_use >= 0) & ~problem.reused & (problem.nbytes > 0)
        self.certain = np.flatnonzero(certain)
        self.release = np.searchsorted(ring, problem.release[self.certain])
        self.use = np.searchsorted(ring, problem.next_use[self.certain])
        self.scale = float(problem.nbytes.max())

    @property
    def covered(self) -> int:
        pieces = sum(b - a for shape in self.shapes for a, b in shape.covers)
        return pieces + int((self.use - self.release).sum())

    def _read(self) -> None:
        problem = self.problem
        worth = problem.saves & (problem.nbytes > 0) & (self.last > self.first)
        groups: dict[int, list[int]] = defaultdict(list)
        for j in np.flatnonzero(worth).tolist():
            if problem.group[j] < 0:
                cover = ((int(self.first[j]), int(self.last[j])),)
                self.shapes[_Shape(covers=cover, since=-1, returns=(True,))].append((j,))
            else:
                groups[int(problem.group[j])].append(j)
        writers = np.flatnonzero(problem.written & (problem.group >= 0))
        writer = dict(zip(problem.group[writers].tolist(), writers.tolist(), strict=True))
        for group, members in groups.items():
            begin = int(problem.use[writer[group]])
            turns = [self.count if problem.use[j] < begin else 0 for j in members]
            order = sorted(range(len(members)), key=lambda i: (turns[i], problem.use[members[i]]))
            shape = _Shape(
                covers=tuple(
                    (int(self.first[members[i]]) + turns[i], int(self.last[members[i]]) + turns[i])
                    for i in order
                ),
                since=int(self.first[writer[group]]),
                returns=tuple(bool(problem.reused[members[i]]) for i in order),
            )
            self.shapes[shape].append(tuple(members[i] for i in order))

    def solve(self, work: Floats, excess: Ints, sending: float) -> tuple[float, Floats]:
        """The least sum of delays, and what is away. ``work``: seconds of operators in each stretch."""
        rows = _Rows(self.count)
        unit = float(work.sum()) / self.count or 1.0
        rate = self.scale / unit  # seconds per byte become units per scale
        wanted = excess / self.scale
        where: list[tuple[list[tuple[int, ...]], list[Ints], float]] = []
        for shape, groups in self.shapes.items():
            sizes = self.problem.nbytes[[group[0] for group in groups]].tolist()
            size = sum(sizes) / self.scale
            out = min(self.links.d2h_seconds(n) / n for n in sizes) * rate
            back = min(self.links.h2d_seconds(n) / n for n in sizes) * rate
            where.append((groups, rows.group(shape, size, out, back), size))
        for j, a, b in zip(self.certain.tolist(), self.release.tolist(), self.use.tolist(), strict=True):
            nbytes = int(self.problem.nbytes[j])
            rows.certain(a, b, nbytes / self.scale, self.links.h2d_seconds(nbytes) / nbytes * rate)
            np.add.at(wanted, np.arange(a, b) % self.count, nbytes / self.scale)
        delay, values = rows.solve(work / unit, wanted, sending / unit)
        away = np.zeros(len(self.problem.use))
        if values is not None:
            for groups, columns, size in where:
                shares = [float(values[column].max()) / size for column in columns]
                for group in groups:
                    away[list(group)] = shares
        return delay * unit, away


class _Rows:
    """Columns and rows: ``memory`` per checkpoint; ``out`` and ``back`` per stretch; what ``order`` demands."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.memory, self.out, self.back, self.order = _Block(), _Block(), _Block(), _Block()
        self.upper: list[Floats] = []
        self.columns = self.orders = 0

    def group(self, shape: _Shape, size: float, out: float, back: float) -> list[Ints]:
        """Intervals that carry one write; the columns of what each has away at its checkpoints."""
        alone = shape.since >= 0 and len(shape.covers) == 1 and shape.covers[0][0] == shape.since
        found = []
        for (a, b), returns in zip(shape.covers, shape.returns, strict=True):
            away, comes = self._new(b - a, size), self._new(b - a, size)
            found.append(away)
            self.memory.add(np.arange(a, b) % self.count, away, -1.0)
            if returns:
                self.back.add(np.arange(a, b) % self.count, comes, back)
            if alone:
                self._left_before(np.arange(a - 1, b - 1) % self.count, away, comes, out)
            else:  # comes >= away - away then
                row = self._order(b - a)
                self.order.add(row, away, 1.0)
                self.order.add(row[:-1], away[1:], -1.0)
                self.order.add(row, comes, -1.0)
        if shape.since >= 0 and not alone:
            self._saved(shape, size, out, found)
        return found

    def certain(self, a: int, b: int, size: float, back: float) -> None:
        """A fetch in any of the stretches from before checkpoint ``a`` to after ``b - 1``; away until then."""
        away, comes = self._new(b - a, size), self._new(b - a + 1, size)
        self.memory.add(np.arange(a, b) % self.count, away, -1.0)
        self.back.add(np.arange(a - 1, b) % self.count, comes, back)
        row = self._order(b - a)  # what is away at a checkpoint comes after it
        self.order.add(row, away, 1.0)
        self.order.add(row[:-1], away[1:], -1.0)
        self.order.add(row, comes[1:], -1.0)
        self.order.add(self._order(1).repeat(b - a + 1), comes, -1.0, at_most=-size)

    def _left_before(self, stretch: Ints, away: Ints, comes: Ints, out: float) -> None:
        """What leaves in a stretch is what is away more at its end, and what came back in it: not negative."""
        row = self._order(len(away))
        for block, rows, sign in ((self.out, stretch, out), (self.order, row, -1.0)):
            block.add(rows, away, sign)
            block.add(rows[1:], away[:-1], -sign)
            block.add(rows[1:], comes[:-1], sign)
        last = self._order(1)
        self.order.add(last, away[-1:], 1.0)
        self.order.add(last, comes[-1:], -1.0)

    def _saved(self, shape: _Shape, size: float, out: float, found: Sequence[Ints]) -> None:
        """What is away of any of them has been saved since their write: once."""
        low, high = shape.since, shape.covers[-1][1]
        saved = self._new(high - low, size)
        for (a, b), away in zip(shape.covers, found, strict=True):
            row = self._order(b - a)
            self.order.add(row, away, 1.0)
            self.order.add(row, saved[a - low : b - low], -1.0)
        row = self._order(high - low - 1)
        self.order.add(row, saved[1:], -1.0)
        self.order.add(row, saved[:-1], 1.0)
        stretch = np.arange(low - 1, high - 1) % self.count
        self.out.add(stretch, saved, out)
        self.out.add(stretch[1:], saved[:-1], -out)

    def solve(self, work: Floats, wanted: Floats, sending: float) -> tuple[float, Floats | None]:
        count = self.count
        delay = self._new(count, np.inf)
        for block in (self.out, self.back):
            block.add(np.arange(count), delay, -1.0)
        everything = _Block()  # gradients go the same way as what leaves, at times that are not looked at
        row, column, value = self.out.columns()
        everything.add(np.zeros(len(row), dtype=np.int64), column, value)
        blocks = [
            (self.memory, count, -wanted),
            (self.out, count, work),
            (self.back, count, work),
            (everything, 1, np.array([float(work.sum()) - sending])),
            (self.order, self.orders, self.order.limits(self.orders)),
        ]
        matrix = sparse.vstack([block.matrix(rows, self.columns) for block, rows, _ in blocks]).tocsc()
        room = np.concatenate([limits for _, _, limits in blocks])
        upper = np.concatenate(self.upper)
        cost = np.zeros(self.columns)
        cost[delay] = 1.0
        bounds = np.stack([np.zeros(self.columns), upper], axis=1)
        result = linprog(cost, A_ub=matrix, b_ub=room, bounds=bounds, method="highs-ipm")
        if result.x is None:
            return 0.0, None
        return _dual(cost, matrix, room, upper, result.ineqlin.marginals, delay), result.x

    def _new(self, count: int, upper: float) -> Ints:
        self.columns += count
        self.upper.append(np.full(count, upper))
        return np.arange(self.columns - count, self.columns)

    def _order(self, count: int) -> Ints:
        self.orders += count
        return np.arange(self.orders - count, self.orders)


class _Block:
    """Entries of some rows."""

    def __init__(self) -> None:
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.at_most: dict[int, float] = {}

    def add(self, rows: Ints, columns: Ints, value: float | Floats, *, at_most: float = 0.0) -> None:
        """``at_most``: what the row's sum is limited to; of the first row, if there are several."""
        self.entries.append((rows, columns, np.broadcast_to(value, len(columns))))
        if at_most:
            self.at_most[int(rows[0])] = at_most

    def columns(self) -> tuple[Ints, Ints, Floats]:
        if not self.entries:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, np.zeros(0)
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        return rows, columns, values

    def matrix(self, rows: int, columns: int) -> "sparse.csr_matrix":
        row, column, value = self.columns()
        return sparse.csr_matrix((value, (row, column)), shape=(rows, columns))

    def limits(self, rows: int) -> Floats:
        limits = np.zeros(rows)
        for row, value in self.at_most.items():
            limits[row] = value
        return limits


def _dual(
    cost: Floats, matrix: "sparse.csc_matrix", room: Floats, upper: Floats, prices: Floats, delay: Ints
) -> float:
    """The value of the dual at ``prices``, made feasible: a bound whoever found them."""
    prices = np.minimum(np.nan_to_num(prices), 0.0)
    # Delays have no upper bound, so what a second of delay is worth in all must not be above its cost.
    prices = prices / max(1.0, float((matrix.T @ prices)[delay].max(initial=0.0)))
    left = cost - matrix.T @ prices
    left[delay] = np.maximum(left[delay], 0.0)
    finite = np.isfinite(upper)
    return max(0.0, float(room @ prices) + float(np.minimum(left[finite], 0.0) @ upper[finite]))
