"""Letting an optimizer's kind step one small parameter, to see what it does.

Invariant: random numbers that are drawn in it are drawn again afterwards. What its class counts or prints, it counts or
prints once more.
"""

import pickle
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hetero.stm.updates.optimizers import hyper_parameters, make_shell

__all__ = ["StepTraits", "probe_step"]


class StepTraits(NamedTuple):
    """``states``: how many tensors of a parameter's size were kept; 0 if it could not be stepped, as one that needs a
    closure cannot. ``draws``: from a generator."""

    states: int
    draws: bool


def probe_step(optimizer: torch.optim.Optimizer) -> StepTraits:
    """Of an optimizer of this kind, with the settings of the first group."""
    probe = nn.Parameter(torch.zeros(3, 5, device="cpu"))
    probe.grad = torch.zeros_like(probe)
    generators = _generators(optimizer)
    before = [tell(each) for each, (tell, _) in generators]
    states = 0
    try:
        twin = make_shell(optimizer)  # a step may write to its settings: these are copies
        twin.param_groups = [{**hyper_parameters(optimizer.param_groups[0]), "params": [probe]}]
        type(optimizer).step(twin)
        kept = twin.state.get(probe, {}).values()
        states = sum(isinstance(value, torch.Tensor) and value.shape == probe.shape for value in kept)
    except Exception:  # of a step of the user's, for whatever reason: the first real one tells
        pass
    finally:
        draws = before != [tell(each) for each, (tell, _) in generators]
        for state, (each, (_, put_back)) in zip(before, generators, strict=True):
            put_back(each, state)
    return StepTraits(states, draws)


# By kind of generator: what tells where one is, and what puts it there.
_Ways = tuple[Callable[[Any], object], Callable[[Any, Any], object]]
_GENERATORS: dict[type, _Ways] = {
    torch.Generator: (
        lambda its: its.get_state().tolist(),
        lambda its, state: its.set_state(torch.ByteTensor(state)),
    ),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (
        lambda its: pickle.dumps(its.get_state()),
        lambda its, state: its.set_state(pickle.loads(state)),
    ),
    np.random.Generator: (
        lambda its: pickle.dumps(its.bit_generator.state),
        lambda its, state: setattr(its.bit_generator, "state", pickle.loads(state)),
    ),
}


def _generators(optimizer: torch.optim.Optimizer) -> list[tuple[Any, _Ways]]:
    """The process's on the host, and those that ``optimizer`` holds."""
    of_all: list[Any] = [getattr(get, "__self__", None) for get in (random.getstate, np.random.get_state)]
    held = [value for holder in (vars(optimizer), *optimizer.param_groups) for value in holder.values()]
    return [
        (each, ways)
        for each in (torch.default_generator, *of_all, *held)
        for kind, ways in _GENERATORS.items()
        if isinstance(each, kind)
    ]
