"""The search for objects of a class."""

import sys
import threading

import pytest
import torch
from torch import nn

from hetero.stm.tensors.instances import instances_of


class Kept(nn.Parameter):
    pass


def test_instances_of_subclasses_are_found_and_nothing_else():
    kept, plain = Kept(torch.zeros(2)), torch.zeros(3)
    found = {id(one) for one in instances_of(torch.Tensor)}
    assert {id(kept), id(plain)} <= found
    assert all(isinstance(one, torch.Tensor) for one in instances_of(torch.Tensor))
    assert [one is kept for one in instances_of(Kept)] == [True]


@pytest.fixture
def threads_that_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_that_take_turns_often")
def test_tuples_that_another_thread_is_making_are_finished():
    is_over, raised = threading.Event(), []

    def make():
        try:
            while not is_over.is_set():
                assert len(tuple(number for number in range(50))) == 50
        except SystemError as error:
            raised.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        for one in instances_of(nn.Module):
            assert one is not None
    is_over.set()
    for thread in threads:
        thread.join()
    assert raised == []
