"""Parameters that a model has got since it is managed, and that somebody trains: adapters, a new head.

Owns what of them tells iterations apart. They are nobody's; but layers save what they had not to save before, so that
what was measured of the model is no measure any more.
"""

import weakref

import torch
from torch import nn

from hetero.stm.living import Living
from hetero.stm.settled.who import record_of

__all__ = ["Added", "note_group"]


class Added:
    """To one model.

    Attributes:
        kind: how many there are, and their elements. A plain one, because every forward looks at it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.kind = (0, 0)
        _living.add(self)

    def look(self, trained: frozenset[int]) -> None:
        """An optimizer has got those with the ids ``trained``, which are nobody's. The model is another one if some of
        them are in it; not where they only take the place of others."""
        model = self._model()
        parameters = () if model is None else tuple(model.parameters())
        if any(id(parameter) in trained for parameter in parameters):
            sizes = [p.numel() for p in parameters if p.requires_grad and record_of(p) is None]
            self.kind = len(sizes), sum(sizes)


_living = Living[Added]()


def note_group(optimizer: torch.optim.Optimizer) -> None:
    """Its last group is new."""
    others = frozenset(id(p) for p in optimizer.param_groups[-1]["params"] if record_of(p) is None)
    if others:
        for added in _living:
            added.look(others)
