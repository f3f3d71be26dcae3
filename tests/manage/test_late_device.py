"""A device that came after the first backward of the process: autograd has no thread for it, and never will."""

import subprocess
import sys

import pytest
from accelerators import ON_CUDA

SCRIPT = """
import torch
import hetero

model = torch.nn.Linear(4, 4)
model(torch.ones(2, 4)).sum().backward()
manager = hetero.manage(model, device=hetero.virtual_device(memory="64MiB"), device_budget="1MiB")
loss = model(torch.ones(2, 4, device=manager.device)).sum()
x = torch.ones(3, requires_grad=True)
print("slopes", torch.autograd.grad(x.square().sum(), x, create_graph=True)[0].tolist())
try:
    BACKWARD
except hetero.DeviceError as error:
    print("said:", error)
"""


@pytest.mark.skipif(ON_CUDA, reason="a CUDA device is there from the beginning")
@pytest.mark.parametrize(
    "backward", ["loss.backward()", "torch.autograd.grad(loss, list(model.parameters()), create_graph=True)"]
)
def test_a_backward_on_a_device_that_came_too_late_says_so(backward):
    script = SCRIPT.replace("BACKWARD", backward)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "slopes [2.0, 2.0, 2.0]" in done.stdout, done.stderr  # which does not come there
    assert "said: autograd has no thread" in done.stdout, done.stderr
    assert "before anything is trained" in done.stdout
