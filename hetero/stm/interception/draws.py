"""Random numbers of functions that are tried again.

Owns which functions draw some before they allocate the last of their memory: those made of several operators, and
dropout. What is a single operator draws the same again by itself (`hetero.stm.running.retry`).
"""

import torch
from torch.nn import functional

__all__ = ["DRAWING"]

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
