"""Gradients on their way home: how many bytes of them are on the device at once.

Owns the answer for gradients that leave as soon as they are made, one after another, and what is kept free for them.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.eviction.model import Links

__all__ = ["OnTheirWay", "Sending", "gradient_reserves", "on_their_way"]

_SLOWER = 1.05  # than copies were on average, one may be


@dataclass(frozen=True, slots=True)
class OnTheirWay:
    """Bytes of gradients on their way home: as a period begins, and at most in it."""

    begin: int
    most: int


class Sending(Protocol):
    """A period of ``seconds``, and the gradients that it makes: ``(tensor, bytes, seconds after its begin)``."""

    @property
    def seconds(self) -> float: ...
    @property
    def sends(self) -> Sequence[tuple[int, int, float]]: ...


def on_their_way(
    periods: Sequence[Sending], links: Links, at_home: Container[int], *, most: int
) -> list[OnTheirWay]:
    """For each period of one backward, what goes down at once if each gradient leaves as soon as it is made; what makes
    more than ``most`` bytes of them waits."""
    sent: deque[tuple[float, int]] = deque()
    rows: list[OnTheirWay] = []
    clock = free = 0.0
    nbytes = 0

    def retire(now: float) -> int:
        gone = 0
        while sent and sent[0][0] <= now:
            gone += sent.popleft()[1]
        return gone

    for period in periods:
        nbytes -= retire(clock)
        begin = peak = nbytes
        for index, size, seconds in period.sends:
            if index not in at_home:
                continue
            made = clock + seconds
            nbytes -= retire(made)
            free = max(free, made) + _SLOWER * links.d2h_seconds(size)
            sent.append((free, size))
            nbytes += size
            while nbytes > most:
                landed, gone = sent.popleft()
                clock += max(0.0, landed - made)
                made = max(made, landed)
                nbytes -= gone
            peak = max(peak, nbytes)
        rows.append(OnTheirWay(begin, peak))
        clock += period.seconds
    return rows


def gradient_reserves(
    largest: int,
    *,
    come: Sequence[bool],
    ways: Sequence[OnTheirWay],
    freed: Sequence[int],
    spare: Sequence[int],
) -> list[OnTheirWay]:
    """For each period, what may be on its way: as it begins, which is kept free for that, and later in it.

    A period's peak has room for the gradients that it makes. Once these are made, ``freed`` bytes of it are there for
    what is on its way, so that no more has to be kept free than the others of ``ways`` take: what is still on its way
    from before. Never so much that there would be room for more than two of ``largest`` bytes, one that is copied while
    the next is made, nor more than any period that still makes some (``come``: in it or after it), or this one, has to
    ``spare``.
    """
    least = min((left for left, more in zip(spare, come, strict=True) if more), default=0)
    rows = []
    for more, way, again, left in zip(come, ways, freed, spare, strict=True):
        most = min(2 * largest - min(again, largest), least, least if more else left)
        kept = max(0, min(most, max(way.begin, way.most - again)))
        rows.append(OnTheirWay(kept, kept + again))
    return rows
