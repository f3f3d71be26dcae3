"""A device that cannot be used is refused by name, with what would do."""

import pytest
import torch
from accelerators import device
from torch import nn

import hetero


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:99", "xpu:99", "mps", "hpu", 1.5])
def test_a_device_that_is_not_there_is_a_device_error(name):
    with pytest.raises(hetero.DeviceError, match="virtual_device"):
        hetero.manage(nn.Linear(2, 2), device=name)


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_what_is_no_accelerator_is_a_device_error(name):
    with pytest.raises(hetero.DeviceError, match="no accelerator"):
        hetero.manage(nn.Linear(2, 2), device=name)


def test_an_index_that_is_not_there_is_a_device_error():
    target = device()
    count = torch.accelerator.device_count()
    with pytest.raises(hetero.DeviceError, match=f"finds {count} device"):
        hetero.manage(nn.Linear(2, 2), device=f"{target.type}:{count}")


def test_a_type_alone_and_an_index_alone_name_the_machines_device():
    target = device()
    for name in (target.type, 0, target, str(target)):
        with hetero.manage(nn.Linear(2, 2), device=name, device_budget="16MiB") as manager:
            assert manager.device == target
