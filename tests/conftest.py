"""For all tests: the virtual accelerator, made before any runs, because autograd counts devices at the process's first
backward; Hypothesis without deadlines; and collections of garbage that look at what tests made, not at what they
imported."""

import contextlib
import gc
import os

# On CUDA, products with a bias would take tens of MiB for the time of each call, more than most budgets here have.
os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
# And cuBLAS keeps a workspace for each thread, which is memory in use: 32 MiB each on an H100, with this 128 KiB.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB, no more: torch would warn of it
# torch's databases of tests ask numba for the device, which has nothing to do there.
os.environ.setdefault("NUMBA_DISABLE_CUDA", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import hetero

# What helpers assert is told with its numbers, as in tests.
pytest.register_assert_rewrite("equality", "residents", "settling", "several", "ticks", "twins")

# No example is judged by how long it takes: the machine may be busy. Else as Hypothesis has it, with CI=1 or without.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

if not torch.accelerator.is_available():
    # Without a compiler the tests that need the device say so themselves.
    with contextlib.suppress(hetero.DeviceError):
        hetero.virtual_device()


def pytest_collection_finish() -> None:
    """What is there now stays, and is no test's. To look at all of torch takes a collection half a second, and there
    are thousands of them."""
    gc.freeze()
