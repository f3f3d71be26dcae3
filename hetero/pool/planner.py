"""What a planner is, and the names under which planners are known.

Owns the `Planner` protocol and the registry. Invariant: a registered planner is a pure function of the
problem (random ones are seeded), so the same problem gives the same placement unless a time limit cuts a
search short.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from hetero.errors import ConfigError
from hetero.pool.problem import Problem, Solution

__all__ = ["Planner", "plan", "planner_names", "register"]


class Planner(Protocol):
    """``Problem -> Solution``: valid, of footprint no smaller than `lower_bound`."""

    def __call__(self, problem: Problem, /) -> Solution: ...


_Planner = TypeVar("_Planner", bound=Planner)

_PLANNERS: dict[str, Planner] = {}


def register(name: str) -> Callable[[_Planner], _Planner]:
    """Decorator that makes a planner known as ``name``; raises `ConfigError` if the name is taken."""

    def enter(planner: _Planner) -> _Planner:
        if name in _PLANNERS:
            raise ConfigError(f"a planner named {name!r} is registered already; choose another name")
        _PLANNERS[name] = planner
        return planner

    return enter


def planner_names() -> tuple[str, ...]:
    """Names of all registered planners, in the order of registration."""
    return tuple(_PLANNERS)


def plan(problem: Problem, planner: str) -> Solution:
    """``problem`` placed by the planner of that name; raises `ConfigError` listing the names if unknown."""
    if planner not in _PLANNERS:
        raise ConfigError(f"planner {planner!r} is unknown; use one of {', '.join(_PLANNERS)}")
    return _PLANNERS[planner](problem)
