"""The named policies: who leaves when room is needed.

Owns `resolve_policy` and the four built-in rules, which also serve a runtime that has no schedule yet
(warm-up): LRU and FIFO need no knowledge of the future. They see candidates and return ids; they move
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.eviction.model import Candidate, Policy

__all__ = ["POLICIES", "CostAware", "FarthestNextUse", "FirstIn", "LeastRecent", "resolve_policy"]


@dataclass(frozen=True, slots=True)
class FarthestNextUse:
    """Belady 1966 (MIN): evict what is needed last. Optimal in bytes when sizes and costs are equal."""

    name: str = "opt"

    def victims(self, candidates: Sequence[Candidate], nbytes: int) -> list[int]:
        return _needed_only(candidates, nbytes, key=lambda c: (-c.next_use, -c.nbytes, c.tensor))


@dataclass(frozen=True, slots=True)
class CostAware:
    """Belady with costs: what is never used again and clean first, then the fewest bytes moved per
    byte-moment.

    Freeing a copy until its next use gains ``nbytes * next_use`` and costs ``nbytes`` to fetch it again,
    twice that if it is dirty. Over a whole trace `hetero.eviction.plan` does better than this rule: it
    chooses intervals.
    """

    name: str = "cost-opt"

    def victims(self, candidates: Sequence[Candidate], nbytes: int) -> list[int]:
        def key(c: Candidate) -> tuple[float, int, int]:
            return (-c.next_use / (2.0 if c.dirty else 1.0), -c.nbytes, c.tensor)

        return _needed_only(candidates, nbytes, key=key)


@dataclass(frozen=True, slots=True)
class LeastRecent:
    """LRU: evict what was used longest ago."""

    name: str = "lru"

    def victims(self, candidates: Sequence[Candidate], nbytes: int) -> list[int]:
        return _in_order(candidates, nbytes, key=lambda c: (c.last_use, c.tensor))


@dataclass(frozen=True, slots=True)
class FirstIn:
    """FIFO: evict what was fetched longest ago."""

    name: str = "fifo"

    def victims(self, candidates: Sequence[Candidate], nbytes: int) -> list[int]:
        return _in_order(candidates, nbytes, key=lambda c: (c.fetched_at, c.tensor))


POLICIES: tuple[Policy, ...] = (FarthestNextUse(), CostAware(), LeastRecent(), FirstIn())


def resolve_policy(policy: str | Policy) -> Policy:
    """The policy of that name, or the object itself. Raises `ConfigError` naming the choices otherwise."""
    for known in POLICIES:
        if policy == known.name:
            return known
    if not isinstance(policy, str) and callable(getattr(policy, "victims", None)):
        return policy
    names = ", ".join(repr(known.name) for known in POLICIES)
    raise ConfigError(f"policy={policy!r}: choose one of {names}, or an object with a name and victims()")


_Key = Callable[[Candidate], tuple[float, ...]]


def _in_order(candidates: Sequence[Candidate], nbytes: int, *, key: _Key) -> list[int]:
    return [c.tensor for c in _taken(candidates, nbytes, key=key)]


def _needed_only(candidates: Sequence[Candidate], nbytes: int, *, key: _Key) -> list[int]:
    """Like `_in_order`, but whoever turns out not to be needed stays, the latest chosen asked first."""
    taken = _taken(candidates, nbytes, key=key)
    surplus = sum(c.nbytes for c in taken) - nbytes
    kept = []
    for candidate in reversed(taken):
        if candidate.nbytes <= surplus:
            surplus -= candidate.nbytes
        else:
            kept.append(candidate.tensor)
    return kept[::-1]


def _taken(candidates: Sequence[Candidate], nbytes: int, *, key: _Key) -> list[Candidate]:
    taken: list[Candidate] = []
    for candidate in sorted(candidates, key=key):
        if nbytes <= 0:
            break
        taken.append(candidate)
        nbytes -= candidate.nbytes
    return taken
