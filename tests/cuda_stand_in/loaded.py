"""Loaded by torch at the end of its import, as a backend: gives the CUDA device its kernels."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def load() -> None:
    torch.ops.load_library(str(Path(__file__).parent / "kernels.so"))
    # The host has none for what only CUDA fuses.
    for kernel in (
        _thnn_fused_lstm_cell,
        _thnn_fused_lstm_cell_backward_impl,
        _thnn_fused_gru_cell,
        _thnn_fused_gru_cell_backward,
        _fused_rms_norm_backward,
    ):
        _library.impl(kernel.__name__, kernel, "CUDA", allow_override=True)


def _sum(gates: Tensor, hidden: Tensor, bias: Tensor | None, hidden_bias: Tensor | None) -> Tensor:
    return gates + hidden if bias is None or hidden_bias is None else gates + bias + (hidden + hidden_bias)


def _thnn_fused_lstm_cell(
    gates: Tensor,
    hidden: Tensor,
    cx: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = _sum(gates, hidden, bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _thnn_fused_lstm_cell_backward_impl(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Any, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    along = torch.zeros_like(cy) if grad_cy is None else grad_cy
    through = torch.zeros_like(cy) if grad_hy is None else grad_hy
    along = along + through * o * (1 - t * t)
    grads = (
        along * g * i * (1 - i),
        along * cx * f * (1 - f),
        along * i * (1 - g * g),
        through * t * o * (1 - o),
    )
    grad_gates = torch.cat(grads, 1)
    return grad_gates, along * f, grad_gates.sum(0) if has_bias else None


def _thnn_fused_gru_cell(
    gates: Tensor,
    hidden: Tensor,
    hx: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if bias is not None and hidden_bias is not None:
        gates, hidden = gates + bias, hidden + hidden_bias
    (ir, iz, n), (hr, hz, hn) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _thnn_fused_gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r, grad_z = grad_n * hn * r * (1 - r), grad * (hx - n) * z * (1 - z)
    grads, hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grads.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return grads, hidden, grad * z, *biases


def _fused_rms_norm_backward(*arguments: Any) -> Any:
    from torch._decomp.decompositions import _fused_rms_norm_backward as decomposed

    return decomposed(*arguments)
