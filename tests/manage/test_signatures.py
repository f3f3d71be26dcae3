"""What tells one kind of iteration from another, as far as the model's arguments do."""

import collections
import dataclasses
import random
import types

import numpy as np
import pytest
import torch
from loops import batch, mlp
from torch import nn
from twins import assert_twins

from hetero.stm.interception import signatures as interception_signatures
from hetero.stm.interception.arguments import any_on
from hetero.stm.interception.parameter import managed_in
from hetero.stm.interception.signatures import Signatures, count_elements, counts_by_elements
from hetero.stm.plans import cycles, planbook

STEPS = 24


class Tempered(nn.Module):
    """Its forward takes a number, and a switch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x, temperature, *, step=0, wide=False):
        for layer in self.layers:
            x = layer(x).tanh() / temperature
        return x.repeat(1, 4) if wide else x


def test_a_number_that_goes_on_to_be_another_does_not_make_each_iteration_a_kind_of_its_own():
    def loop(model, optimizer, target):
        seen = []
        for step in range(STEPS):
            loss = model(batch(target), 1 + 0.9**step, step=step, wide=step % 2 == 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    manager = assert_twins(Tempered, loop, share=0.7)
    # Of the few that count as what they are, and of all that come after; each with the switch on and off.
    assert len(manager._stm.plans) == 2 * (8 + 1)


def test_a_string_that_goes_on_to_be_another_does_not_either():
    signatures, model, x = Signatures("cpu"), Tempered(), torch.ones(2, 64)
    names = [signatures.of(model, ([{"image": x, "file": f"{number}.jpg"}],), {}) for number in range(40)]
    assert len(set(names)) == 8 + 1
    modes = [signatures.of(model, (x,), {"mode": mode}) for mode in ("wide", "narrow")]
    assert len(set(modes)) == 2


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    file: str = ""


@dataclasses.dataclass
class Graph:
    """As libraries for graphs have them: an object whose tensors are in another one."""

    store: object


def boxed(x):
    return collections.UserDict(x=x, y=None)


def in_a_store(x):
    return Graph(types.SimpleNamespace(tensors={"x": x}))


WRAPPED = [Slotted, boxed, in_a_store, lambda x: types.SimpleNamespace(x=x)]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_tensors_in_an_object_count_as_others_do(wrap):
    signatures, model, x = Signatures("cpu"), Tempered(), torch.ones(2, 64)
    one, same, larger = (signatures.of(model, (wrap(rows),), {}) for rows in (x, x + 1, torch.ones(3, 64)))
    assert one == same
    assert one != larger
    assert [count_elements((wrap(rows), [wrap(rows)])) for rows in (x, x[:1])] == [256, 128]
    assert any_on(torch.device("cpu"), (wrap(x),), {})
    assert not any_on(torch.device("meta"), ([wrap(x)],), {})


def test_what_is_no_batch_is_not_looked_into_and_no_number_of_an_object_counts():
    signatures, model, x = Signatures("cpu"), Tempered(), torch.ones(2, 64)
    assert len({signatures.of(model, (Slotted(x, f"{number}.jpg"),), {}) for number in range(40)}) == 1
    around = nested = types.SimpleNamespace()
    for _ in range(40):
        nested.next = types.SimpleNamespace(x=x)
        nested = nested.next
    nested.next = around  # and around again
    many = types.SimpleNamespace(rows=[x] * 10_000)
    for given in (nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1), boxed, Slotted, many):
        assert count_elements(given) == 0
    assert count_elements(around) == 2 * x.numel()
    signatures.of(model, (around, many), {})


UNWRAPPED = [lambda g: g.x, lambda g: g["x"], lambda g: g.store.tensors["x"], lambda g: g.x]


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
@pytest.mark.parametrize(("wrap", "unwrap"), list(zip(WRAPPED, UNWRAPPED, strict=True)))
def test_batches_that_get_larger_in_an_object_keep_to_the_budget(wrap, unwrap, share):
    rows = [8] * 4 + [16, 8, 16, 32, 32, 8, 64, 64, 8, 64, 100, 100, 128, 128, 64, 160, 160]

    class Unwrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, given):
            return self.layers(unwrap(given))

    def loop(model, optimizer, target):
        seen = []
        for count in rows:
            loss = model(wrap(batch(target, count))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return seen

    assert_twins(Unwrapping, loop, share=share)


def test_the_first_few_numbers_count_as_what_they_are():
    signatures, model, x = Signatures("cpu"), Tempered(), torch.ones(2, 64)
    few = [signatures.of(model, (x, number), {}) for number in range(8)]
    rest = [signatures.of(model, (x, number), {}) for number in range(8, 40)]
    assert len(set(few)) == 8
    assert len(set(rest)) == 1
    assert rest[0] not in few
    assert few == [signatures.of(model, (x, number), {}) for number in range(8)]
    # Shapes, types and switches go on to tell calls apart, and so does whatever else the caller says.
    others = [
        signatures.of(model, (x[:1], 50), {}),
        signatures.of(model, (x, 50.0), {}),
        signatures.of(model, (x, 50), {"wide": True}),
        signatures.of(model, (x, 50), {"wide": False}),
        signatures.of(model, (x, 50), {}, "layers.0"),
    ]
    assert len({*others, *few, *rest}) == len(others) + len(few) + 1


def test_of_many_sizes_the_smallest_that_is_as_large_stands_for_those_to_come():
    signatures, model = Signatures("cpu"), Tempered()

    def of(*shape, dtype=torch.float32):
        return signatures.of(model, (torch.empty(shape, dtype=dtype),), {})

    few = [of(rows, 64) for rows in range(10, 90, 10)]
    assert len(set(few)) == 8
    assert few == [of(rows, 64) for rows in range(10, 90, 10)]
    assert of(5, 64) == few[0]
    assert of(41, 64) == of(41, 63) == few[4]
    larger = of(81, 64)
    assert larger not in few
    assert of(81, 64) == larger
    assert of(80, 64) == few[7]
    # One that is the largest in some dimension counts as what it is, and so does what is told by other things as well.
    others = [of(5, 65), of(41, 64, dtype=torch.float64), of(41, 64, 1), of(64)]
    assert len({*few, larger, *others}) == len(few) + 1 + len(others)
    assert of(2, 65) == others[0]


def letters(lengths):
    return ["x" * length for length in lengths]


def numbers(lengths):
    return [list(range(length)) for length in lengths]


@pytest.mark.parametrize("make", [letters, numbers, lambda lengths: tuple(map(tuple, numbers(lengths)))])
@pytest.mark.parametrize("by_name", [False, True])
def test_data_in_lists_counts_as_a_tensor_that_it_is_padded_to(make, by_name):
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)

    def of(*lengths):
        data = make(lengths)
        return signatures.of(layer, (), {"texts": data}) if by_name else signatures.of(layer, (data,), {})

    # They may be settings.
    settings = [of(number) for number in range(1, 9)]
    assert len(set(settings)) == 8
    few = [of(longest, 20) for longest in range(20, 36, 2)]
    assert len({*settings, *few}) == 16
    assert of(21, 9) == few[1]  # within 22 and 20
    assert of(5, 34) == few[7]
    larger = of(36, 2)
    assert larger not in few
    assert of(36, 1) == larger
    longer = of(22, 22, 2)  # no longer than others, and more of them
    assert longer not in {*few, larger}
    assert settings == [of(number) for number in range(1, 9)]


def test_arrays_long_strings_and_trees_count_so_too():
    def tree(depth):
        return 1 if depth == 0 else (tree(depth - 1), tree(random.randrange(depth)))

    for kind, make in {
        "array": lambda: np.zeros((random.randrange(1, 40), 3)),
        "string": lambda: "x" * random.randrange(65, 400),
        "tree": lambda: tree(random.randrange(1, 9)),
    }.items():
        random.seed(0)
        signatures, layer = Signatures("cpu"), nn.Linear(1, 1)
        seen = [signatures.of(layer, (make(),), {}) for _ in range(300)]
        assert len(set(seen)) > 8, kind
        assert len(set(seen[-100:])) <= 24, kind
        assert len(set(seen[-100:]) - set(seen[:200])) <= 3, kind  # that are the largest so far
    signatures = Signatures("cpu")
    assert signatures.of(layer, (np.zeros(3),), {}) != signatures.of(layer, (np.zeros(3, np.int8),), {})
    assert count_elements([np.zeros((4, 5)), {"texts": letters([7, 8])}, torch.ones(3)]) == 20 + 15 + 3


def test_lists_of_ever_other_numbers_of_tensors_come_to_count_by_elements(monkeypatch):
    monkeypatch.setattr(interception_signatures, "_MOST_APART", 8)
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)

    def of(*rows):
        return signatures.of(layer, ([torch.empty(each, 2) for each in rows],), {})

    few = [of(*[3] * number) for number in range(1, 9)]
    assert len(set(few)) == 8
    assert not any(map(counts_by_elements, few))
    assert few == [of(*[3] * number) for number in range(1, 9)]
    others = [of(*[number] * 10) for number in range(1, 9)]
    assert len(set(others)) == 8
    assert all(map(counts_by_elements, others))
    assert of(*[1] * 12) == others[1]  # less in all than two by two of ten
    more = of(*[1] * 100)  # hardly more elements than others have, in many more tensors
    assert more not in others
    # What comes beside it tells as before.
    assert signatures.of(layer, ([torch.empty(3, 2)] * 9, 1), {}) not in {*few, *others}


def test_numbers_of_other_types_in_lists_count_as_numbers_and_what_is_in_itself_ends():
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)
    random.seed(0)
    seen = [signatures.of(layer, (list(np.arange(random.randrange(400))),), {}) for _ in range(200)]
    assert len(set(seen)) <= 8 + 8 + 8  # by value, of the first lengths, and the largest so far
    cyclic = [1]
    cyclic += [cyclic, cyclic]
    with pytest.raises(RecursionError):
        signatures.of(layer, (cyclic,), {})


def test_what_is_remembered_of_calls_is_bounded(monkeypatch):
    most = 16
    monkeypatch.setattr(interception_signatures, "_MOST_APART", most)
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)
    random.seed(0)
    seen = []
    for step in range(3000):
        rows = random.randrange(1, 60)
        texts = numbers(random.randrange(300) for _ in range(random.randrange(1, 9)))
        images = [torch.empty(random.randrange(1, 9), 2) for _ in range(random.randrange(20))]
        args = torch.empty(rows, 64), step, texts, [images, texts]
        seen.append(signatures.of(layer, args, {"name": str(step)}))
    # Of each structure, and of what counts by elements alone: by value, apart, by elements, and the largest so far.
    assert len(set(seen)) <= (most + 1) * (8 + most + 8 + 8)
    stores = [signatures._known, *signatures._values.values(), *signatures._structures.values()]
    stores += [*signatures._sizes.values(), signatures._larger]
    assert sum(map(len, stores)) < 6000  # of which 4096 are of those that count as others


def test_a_number_that_is_another_each_time_makes_no_size_a_kind_of_its_own():
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)
    random.seed(0)
    seen = [
        signatures.of(layer, (torch.empty(random.randrange(1, 200), 64), step), {}) for step in range(200)
    ]
    assert len(set(seen)) <= 8 + 8 + 8


class OfTexts(nn.Module):
    """It is given texts as they are, and pads them itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, texts, target):
        ids = [list(text.encode()) if isinstance(text, str) else text for text in texts]
        longest = max(map(len, ids))
        x = self.table(torch.tensor([each + [0] * (longest - len(each)) for each in ids]).to(target))
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize(("share", "settles"), [(0.6, False), (1.6, True)])
@pytest.mark.parametrize("make", [letters, numbers])
def test_batches_of_texts_of_many_lengths_follow_few_plans(make, share, settles):
    measured = []

    def loop(model, optimizer, target):
        lengths = random.Random(0)
        seen = []
        for _ in range(60):
            loss = model(make([lengths.randrange(3, 24) for _ in range(4)]), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            for tensor in managed_in(optimizer)[:1]:
                measured.append(any(s.sampled for s in tensor.owner.plans.last_segments))
        return seen

    manager = assert_twins(OfTexts, loop, share=share)
    assert len(manager._stm.plans) <= 20
    assert (manager.stats.settled_forwards > 20) == settles
    if not settles:
        assert sum(measured[-20:]) <= 8  # those that are the largest so far, and plans that are timed


@pytest.mark.parametrize(("share", "settles"), [(0.35, False), (0.6, False), (1.6, True)])
@pytest.mark.parametrize("forwards", [1, 2])
def test_batches_of_many_sizes_follow_few_plans(share, settles, forwards):
    sizes = torch.randint(16, 257, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def loop(model, optimizer, target):
        seen = []
        for rows in sizes:
            for _ in range(forwards):
                loss = model(batch(target, rows)).square().mean()
                loss.backward()
                seen.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    manager = assert_twins(lambda: mlp(depth=3), loop, share=share)
    assert len(manager._stm.plans) <= 16  # of 40, or more where two of different sizes come together
    assert (manager.stats.settled_forwards > 20) == settles


def test_what_was_measured_of_kinds_that_came_once_is_forgotten(monkeypatch):
    """No size is as large as another in every dimension: each is a kind of its own."""
    for name, number in {"_MANY": 2, "_MOST": 4, "_MOST_SEEN": 4, "_LEAST_TO_PRUNE": 8}.items():
        monkeypatch.setattr(planbook, name, number)
    counts = []

    def loop(model, optimizer, target):
        seen = []
        for step in range(60):
            a = 1 + (step if step < 40 else step % 3)  # those long ago come back
            loss = model(torch.randn(a, 61 - a, 64).to(target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
            counts.extend(len(tensor.owner.plans.samples) for tensor in managed_in(optimizer)[:1])
        return seen

    manager = assert_twins(lambda: mlp(depth=2), loop, share=0.7)
    segments = 3  # of an iteration
    assert max(counts) <= 2 * segments * (4 + 4 + 1)
    assert manager.stats.unplanned_fetches == 0


def test_of_what_is_put_together_the_largest_that_is_as_large_stands_for_all():
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)

    def of(*sizes, more="a"):
        return signatures.of(layer, tuple(torch.empty(size) for size in sizes), {}, more)

    small, wide, high = of((2, 2)), of((2, 8)), of((8, 2))
    other = of((9, 9), more="b")
    signatures.coarsen()
    signatures.coarsen()  # once is enough
    assert of((2, 2)) in {wide, high}
    assert of((2, 8)) == wide
    assert of((8, 2)) == high
    assert of((9, 9), more="b") == other  # of another kind of call
    largest = of((8, 8))
    assert largest not in {small, wide, high}
    assert {of((2, 2)), of((2, 8)), of((8, 2)), of((8, 8))} == {largest}


def test_calls_that_are_never_as_large_as_another_come_to_count_by_how_many_elements_they_have(monkeypatch):
    monkeypatch.setattr(interception_signatures, "_MOST_APART", 12)
    signatures, layer = Signatures("cpu"), nn.Linear(1, 1)

    def of(*sizes, more="a"):
        return signatures.of(layer, ([{"image": torch.empty(size)} for size in sizes],), {}, more)

    def apart(number):
        return (100 + number, 3), (100 - number, 2)  # elements: 500 + number

    few = [of(*apart(number)) for number in range(12)]
    assert len(set(few)) == 12
    first = [of(*apart(number)) for number in range(12, 20)]
    assert len(set(first)) == 8  # of so many numbers of elements each is known
    assert of((109, 3), (92, 2), more="b") not in {*few, *first}
    assert not any(map(counts_by_elements, few))
    assert all(map(counts_by_elements, first))
    assert few == [of(*apart(number)) for number in range(12)]
    assert of((1, 3), (200, 2)) == first[0]  # 403 elements
    assert of((1, 3), (256, 2)) == first[3]  # 515, as many as of one that is known
    larger = of((1, 3), (300, 2))  # 603
    assert larger not in first
    assert of((200, 3), (1, 2)) == larger  # 602
    # Where iterations are put together of several, all count so, as the largest.
    signatures.coarsen()
    assert {of(*apart(number)) for number in range(20)} == {larger}


class Detector(nn.Module):
    """Pictures of many sizes, each with another number of boxes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.box = nn.Linear(64, 64)

    def forward(self, batch):
        x = torch.cat([item["image"] for item in batch])
        for layer in self.backbone:
            x = layer(x).tanh()
        images = x.split([len(item["image"]) for item in batch])
        pairs = zip(images, batch, strict=True)
        return sum(
            (image.mean(0) @ self.box(item["boxes"]).tanh().mT).square().mean() for image, item in pairs
        )


@pytest.mark.parametrize(("share", "micro_batches"), [(0.4, 1), (0.55, 2)])
def test_batches_of_pictures_and_boxes_come_to_follow_few_plans(monkeypatch, share, micro_batches):
    monkeypatch.setattr(interception_signatures, "_MOST_APART", 12)
    monkeypatch.setattr(cycles, "_MOST_PUT_TOGETHER", 12)
    measured = []

    def loop(model, optimizer, target):
        torch.manual_seed(1)
        seen = []
        for step in range(60):
            images, boxes = torch.randint(50, 200, (3,)).tolist(), torch.randint(1, 30, (3,)).tolist()
            sizes = zip(images, boxes, strict=True)
            loss = model(
                [
                    {"image": torch.randn(a, 64).to(target), "boxes": torch.randn(b, 64).to(target)}
                    for a, b in sizes
                ]
            )
            loss.backward()
            seen.append(loss.item())
            if step % micro_batches == micro_batches - 1:
                optimizer.step()
                optimizer.zero_grad()
                for tensor in managed_in(optimizer)[:1]:
                    measured.append(any(s.sampled for s in tensor.owner.plans.last_segments))
        return seen

    manager = assert_twins(Detector, loop, share=share)
    # One that is larger than those that count alike is measured.
    assert sum(measured[-10:]) <= 3
    assert manager.stats.unplanned_fetches <= len(measured)


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_iterations_of_micro_batches_of_many_sizes_come_to_follow_one_plan(share):
    def loop(model, optimizer, target):
        torch.manual_seed(3)
        seen = []
        for _ in range(40):
            for _ in range(4):
                rows = 4 * int(torch.randint(1, 7, ()))
                loss = model(torch.randn(rows, 64).to(target)).square().mean()
                loss.backward()
                seen.append(loss.item())  # kept on the device, they would be more in each iteration
            optimizer.step()
            optimizer.zero_grad()
        return seen

    manager = assert_twins(lambda: mlp(depth=8), loop, share=share)
    assert len(manager._stm.plans) <= 20  # of 6 ** 4
    stats = manager.stats
    assert stats.lower_bound_bytes is not None  # the last iteration has followed its plan
    assert stats.bytes_moved <= 1.1 * stats.lower_bound_bytes  # what starts early may cost some


def test_of_very_many_kinds_those_are_planned_that_come_again_and_those_forgotten_that_do_not(monkeypatch):
    monkeypatch.setattr(planbook, "_MANY", 4)
    monkeypatch.setattr(planbook, "_MOST", 8)
    monkeypatch.setattr(planbook, "_MOST_SEEN", 6)
    # None is as large as another in both dimensions.
    shapes = [(rows, 20 - rows, 64) for rows in range(2, 18)]

    def loop(model, optimizer, target):
        seen = []
        # Once; the last ones again; then as many others as there is room for, twice, with one of the first in between.
        for shape in (*shapes, *shapes[-6:], *2 * (*shapes[4:8], shapes[0])):
            loss = model(torch.randn(shape).to(target)).square().mean()
            loss.backward()
            seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    manager = assert_twins(lambda: mlp(depth=3), loop, share=0.7)
    planned = [shape for shape in shapes for plan in manager._stm.plans if str(shape) in str(plan.keys[0])]
    assert len(manager._stm.plans) == len(planned) == 8
    assert set(planned) >= {shapes[0], *shapes[4:8]}
    assert not set(planned) & set(shapes[1:4])
