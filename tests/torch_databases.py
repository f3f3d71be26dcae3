"""PyTorch's own databases of modules and optimizers, which its wheels carry."""

import sys
import types
import unittest
import warnings

# The databases import torch's own test runner, which wants this package; they themselves do not.
if "expecttest" not in sys.modules:
    try:
        import expecttest  # noqa: F401
    except ImportError:
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own test code is not held to our standard
    from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
    from torch.testing._internal.common_optimizers import optim_db

__all__ = ["ModuleInfo", "ModuleInput", "module_db", "optim_db"]
