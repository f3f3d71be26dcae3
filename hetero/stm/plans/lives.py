"""When saved tensors are there, needed and gone, over one iteration.

Owns the translation of what the collector noted of records (`hetero.stm.activations.offload`) into tensors of an
eviction trace. Pure. Invariant: every record that counted as model data in a measured period is in the trace in that
period.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.msc import Segment

__all__ = ["Lives", "read_lives"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Records as tensors ``first_index ..`` of a trace. By moment of the iteration: ``present`` must be on the device,
    ``produced`` come to be there, ``ended`` are gone before it; ``unseen`` bytes went in that period's middle without
    having been needed there, which makes its peak of non-model data look lower than it is.

    ``sizes``: of each record, the most of all samples. ``first_saved``: by moment, and once more for the end, the first
    record that was saved then or later; they are numbered in that order.
    """

    sizes: tuple[int, ...]
    present: tuple[frozenset[int], ...]
    produced: tuple[tuple[int, ...], ...]
    ended: tuple[tuple[int, ...], ...]
    unseen: tuple[int, ...]
    first_saved: tuple[int, ...]


def read_lives(samples: Sequence[Sequence[Segment]], first_index: int) -> Lives:
    """The lives of all records of an iteration, of each of whose segments there are ``samples``: they are those of the
    last ones."""
    return _Reader(samples, first_index).read()


class _Reader:
    def __init__(self, samples: Sequence[Sequence[Segment]], first_index: int) -> None:
        self.samples = samples
        self.first_index = first_index
        self.count = sum(len(those[-1].periods) for those in samples)
        self.sizes: list[int] = []
        self.born: dict[int, int] = {}
        self.present: list[set[int]] = [set() for _ in range(self.count)]
        self.produced: list[list[int]] = [[] for _ in range(self.count)]
        self.ended: list[list[int]] = [[] for _ in range(self.count)]
        self.unseen = [0] * self.count

    def read(self) -> Lives:
        alive: dict[tuple[int, int], int] = {}
        first_saved: list[int] = []
        moment = 0
        for those in self.samples:
            segment, most = those[-1], _most(those)
            self._retire(segment, alive, moment)
            for period in segment.periods:
                first_saved.append(self.first_index + len(self.sizes))
                for key in (*period.held_saved, *period.used):
                    self._need(alive.get(key), moment)
                for key, _ in period.saved:
                    alive[key] = self._bear(most[key], moment + 1)
                for key in period.dropped:
                    self._end(alive.pop(key, None), moment)
                moment += 1
        for index in alive.values():
            if self.born[index] < self.count:
                self.ended[0].append(index)
        return Lives(
            sizes=tuple(self.sizes),
            present=tuple(map(frozenset, self.present)),
            produced=tuple(map(tuple, self.produced)),
            ended=tuple(map(tuple, self.ended)),
            unseen=tuple(self.unseen),
            first_saved=(*first_saved, self.first_index + len(self.sizes)),
        )

    def _retire(self, segment: Segment, alive: dict[tuple[int, int], int], moment: int) -> None:
        """An earlier forward of the same number counts no more once this one begins."""
        number = next((key[0] for period in segment.periods for key, _ in period.saved), None)
        for key in [key for key in alive if key[0] == number]:
            index = alive.pop(key)
            if self.born[index] < moment:
                self.ended[moment].append(index)
            else:
                self._end(index, moment - 1)

    def _bear(self, nbytes: int, moment: int) -> int:
        index = self.first_index + len(self.sizes)
        self.sizes.append(nbytes)
        self.born[index] = moment
        if moment < self.count:
            self.present[moment].add(index)
            self.produced[moment].append(index)
        return index

    def _need(self, index: int | None, moment: int) -> None:
        if index is not None and self.born[index] <= moment:
            self.present[moment].add(index)

    def _end(self, index: int | None, moment: int) -> None:
        if index is None or self.born[index] > moment:
            if index is not None and self.born[index] < self.count:  # it came and went within one period
                self.present[self.born[index]].discard(index)
                self.produced[self.born[index]].remove(index)
            return
        if index not in self.present[moment]:
            self.unseen[moment] += self.sizes[index - self.first_index]
        self.ended[(moment + 1) % self.count].append(index)


def _most(samples: Sequence[Segment]) -> dict[tuple[int, int], int]:
    """Bytes of each record of the last one, at most in those with as many periods, where such a period saves as many: a
    shorter text that counts as a longer one saves less, and may come after it."""
    most = {key: nbytes for period in samples[-1].periods for key, nbytes in period.saved}
    for segment in samples[:-1]:
        if len(segment.periods) == len(samples[-1].periods):
            for period, last in zip(segment.periods, samples[-1].periods, strict=True):
                if len(period.saved) == len(last.saved):  # what is small is not recorded
                    for (_, nbytes), (key, _) in zip(period.saved, last.saved, strict=True):
                        most[key] = max(nbytes, most[key])
    return most
