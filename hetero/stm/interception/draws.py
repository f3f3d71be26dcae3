"""Random numbers of functions that are tried again.

Owns which functions draw some before they allocate the last of their memory: those made of several operators, and
dropout. Invariant: one that has failed draws the same numbers when it runs again.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

__all__ = ["DRAWING", "state_of_draws"]

_NAMES = (
    *("multi_head_attention_forward", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
    *("feature_alpha_dropout", "native_dropout", "gumbel_softmax", "rrelu", "bernoulli"),
)
DRAWING = frozenset(
    getattr(place, name)
    for name in _NAMES
    for place in (torch, torch.Tensor, torch._C._nn, functional)
    if hasattr(place, name)
)


def state_of_draws(device: torch.device) -> Callable[[], None]:
    """Puts the generator of ``device`` back to where it is now."""
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)
