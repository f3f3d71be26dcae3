"""The virtual accelerator, made before any test runs: autograd counts devices at the process's first backward."""

import contextlib

import torch

import hetero

if not torch.accelerator.is_available():
    # Without a compiler the tests that need the device say so themselves.
    with contextlib.suppress(hetero.DeviceError):
        hetero.virtual_device()
