"""Loaded by torch at the end of its import, as a backend: gives the CUDA device its kernels."""

from pathlib import Path

import torch


def load() -> None:
    torch.ops.load_library(str(Path(__file__).parent / "kernels.so"))
