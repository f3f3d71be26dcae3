"""The virtual accelerator, made before any test runs: autograd counts devices at the process's first backward."""

import contextlib
import os

# On CUDA, products with a bias would take tens of MiB for the time of each call, more than most budgets here have.
os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")

import torch

import hetero

if not torch.accelerator.is_available():
    # Without a compiler the tests that need the device say so themselves.
    with contextlib.suppress(hetero.DeviceError):
        hetero.virtual_device()
