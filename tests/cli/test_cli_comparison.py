"""Comparing runs: what counts as equal, and that every kind of difference is seen."""

import pytest
import torch
from torch import Tensor

from hetero.cli.comparison import compare
from hetero.cli.training import Outcome


def outcome(losses: list[float], tensors: dict[tuple[str, str], object]) -> Outcome:
    return Outcome(
        losses=[torch.tensor(loss) for loss in losses],
        tensors=tensors,
        seconds=[0.0] * len(losses),
        model_data_bytes=0,
        peak_device_bytes=0,
        stats=None,
    )


def fault_between(ours: object, theirs: object) -> str:
    key = ("parameter", "w")
    (row,) = compare(outcome([], {key: ours}), outcome([], {key: theirs}))
    assert (row.kind, row.name) == key
    return row.fault


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([float("nan"), 1.0]),
        torch.tensor([float("inf")]),
        torch.tensor([3]),
        torch.tensor([1 + 2j]),
        torch.empty(0),
        4,
        None,
    ],
)
def test_a_value_equals_its_copy(value: object) -> None:
    copy = value.clone() if isinstance(value, Tensor) else value
    assert fault_between(value, copy) == ""


def test_the_last_bit_of_one_element_is_a_difference() -> None:
    ours = torch.ones(1000)
    theirs = ours.clone()
    theirs[17] = torch.nextafter(theirs[17], torch.tensor(2.0))
    assert fault_between(ours, theirs) == "1 of 1000 differ, by 1.19e-07 at most"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.tensor([float("nan")]), torch.tensor([1.0])),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")])),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
        (3, 3.0),
        (3, 4),
        (None, torch.ones(1)),
    ],
)
def test_anything_else_differs(ours: object, theirs: object) -> None:
    assert fault_between(ours, theirs) != ""


def test_a_tensor_that_only_one_run_has_is_a_difference() -> None:
    key = ("gradient", "w")
    assert [row.fault for row in compare(outcome([], {key: 1}), outcome([], {}))] == ["only managed"]
    assert [row.fault for row in compare(outcome([], {}), outcome([], {key: 1}))] == ["only unmanaged"]


def test_each_step_has_a_loss_of_its_own() -> None:
    rows = compare(outcome([1.0, 2.0, 3.0], {}), outcome([1.0, 2.5, 3.0], {}))
    assert [(row.kind, row.name, bool(row.fault)) for row in rows] == [
        ("loss", "step 0", False),
        ("loss", "step 1", True),
        ("loss", "step 2", False),
    ]
