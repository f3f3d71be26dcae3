"""Gradients on their way home: how many bytes of them are on the device at once.

Owns the answer for gradients that leave as soon as they are made, one after another, and what is kept free for them.
"""

from collections import deque
from collections.abc import Container, Sequence
from typing import Protocol

from hetero.eviction.model import Links

__all__ = ["Sending", "gradient_reserves", "on_their_way"]

_SLOWER = 1.05  # than copies were on average, one may be


class Sending(Protocol):
    """A period of ``seconds``, and the gradients that it makes: ``(tensor, bytes, seconds after its begin)``."""

    @property
    def seconds(self) -> float: ...
    @property
    def sends(self) -> Sequence[tuple[int, int, float]]: ...


def on_their_way(periods: Sequence[Sending], links: Links, at_home: Container[int]) -> list[int]:
    """For each period of one backward, bytes of gradients that go down at once, at most, if each leaves as soon as it
    is made."""
    sent: deque[tuple[float, int]] = deque()
    rows: list[int] = []
    clock = free = 0.0
    nbytes = 0

    def retire(now: float) -> int:
        gone = 0
        while sent and sent[0][0] <= now:
            gone += sent.popleft()[1]
        return gone

    for period in periods:
        nbytes -= retire(clock)
        most = nbytes
        for index, size, seconds in period.sends:
            if index not in at_home:
                continue
            made = clock + seconds
            nbytes -= retire(made)
            free = max(free, made) + _SLOWER * links.d2h_seconds(size)
            sent.append((free, size))
            nbytes += size
            most = max(most, nbytes)
        rows.append(most)
        clock += period.seconds
    return rows


def gradient_reserves(
    largest: int, *, come: Sequence[bool], ways: Sequence[int], spare: Sequence[int]
) -> list[int]:
    """For each period, room for gradients on their way.

    For as many as there are at once (``ways``), in it or in the one before: a copy may take longer than most. Never for
    more than two of ``largest`` bytes, so that one is copied while the next is made, nor for more than any period that
    still makes some (``come``: in it or after it), or this one, has to ``spare``.
    """
    least = min((left for left, more in zip(spare, come, strict=True) if more), default=0)
    most = max(0, min(2 * largest, least))
    before = [0, *ways[:-1]]
    return [
        min(most, max(way, late)) if more else max(0, min(way, most, left))
        for more, way, late, left in zip(come, ways, before, spare, strict=True)
    ]
