"""What most test files import, imported once: `each_file` forks their processes off one that has imported this.

pytest's plugins are among it, and Hypothesis: pytest would rewrite the assertions in all of their modules, in each
process, which takes two seconds where no bytecode may be written.
"""

import gc
import os
from importlib.metadata import entry_points

import hypothesis.strategies  # noqa: F401
import scipy.signal  # noqa: F401  # torch's databases of tests do
import torch._dynamo
import torch._functorch.aot_autograd
import torch.fx.experimental.symbolic_shapes  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import hetero.cli
import hetero.trace  # noqa: F401

if not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
    for _plugin in entry_points(group="pytest11"):
        _plugin.load()

# No test's garbage. Every look at it would also copy its pages, in each process.
gc.collect()
gc.freeze()
