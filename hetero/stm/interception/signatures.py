"""What decides which operators a forward runs, as far as it can be seen from outside.

Owns the signature of a call: iterations with equal ones share measurements and plans; and whether a call may have a
backward.

[Note: numbers] A number or a string among the arguments may decide much (how many layers run) or nothing (the count of
steps, the name of a file). The first few count as what they are. Where they go on to be others, each call would be
measured and none planned: from then on such a value counts by its type.

[Note: sizes] So it is with sizes: texts of many lengths. After the first few, a call counts as the smallest known one
that is as large in every dimension: its operators are the same, and what it takes is no more. Plans of larger ones move
more than they would have to, and only a call that is the largest in some dimension is measured.

[Note: data] Texts also come as lists of numbers, or of strings, in lists of their own, and as arrays of NumPy's. Such
count as a tensor of them would, padded to the longest: by how many there are at each depth, and in all. They may be
settings as well: as with numbers, the first few count as what they are, and short strings never as data.

[Note: structures] A list of so many tensors this time, and so many the next, or of what comes in ever other types, has
another structure in each call. After many, a call counts by how many elements it has in all, as with boxes below.

[Note: boxes] Images, and the boxes in each, have many sizes in one call, and no call is as large as another in all of
them. After many such, one counts by how many elements its tensors have in all, and those are few kinds again. What one
of these takes is no bound for the others, so it is guarded like what depends on values.

[Note: micro-batches] An iteration of eight micro-batches, each of one of eight sizes, is one of millions, and hardly
ever comes again. Where there turn out to be many such, each call counts as the largest known one instead.
"""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import nn

from hetero.autograd import saving_hooks
from hetero.stm.interception.arguments import OBJECTS, attributes
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = [
    "Signatures",
    "autocasts",
    "count_elements",
    "counts_by_elements",
    "is_no_larger",
    "may_record",
    "saves_elsewhere",
    "without_training",
]

_MOST_VALUES = 8
_MOST_SIZES = 8
_MOST_APART = 64  # as many as plans are kept of
_MOST_REMEMBERED = 1 << 12  # of those that count as others: these are looked for again
_SHORT = 64  # letters of a string: as many may well be a name
_DEPTHS = 4  # of lists within one another, of which the longest are told apart
_DEEPEST = 16  # what is in itself has no end


class _Elements(int):
    """[Note: boxes]: how many the tensors of a call have in all. Stands in a signature where their shapes would."""


class _Lengths(tuple[int, ...]):
    """[Note: data]: of the longest list at each depth, how deep they are, and how much is in them in all. Stands in a
    signature where a tensor's shape would."""


class Signatures:
    """Of the calls of one model, and of its parts, on such a device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known: set[tuple[object, ...]] = set()
        # [Note: numbers]: those that differ in such values alone, by what they have in common, whatever their sizes.
        self._values: dict[tuple[object, ...], set[tuple[object, ...]]] = defaultdict(set)
        # [Note: structures]: by what calls have in common that differ in these.
        self._structures: dict[tuple[object, ...], set[tuple[object, ...]]] = defaultdict(set)
        # [Note: sizes]: those that differ in sizes alone, by what they have in common; and what others count as.
        self._sizes: dict[tuple[object, ...], dict[tuple[int, ...], tuple[object, ...]]] = defaultdict(dict)
        self._larger: dict[tuple[object, ...], tuple[object, ...]] = {}
        # [Note: micro-batches]: what each counts as; None: as what it is.
        self._largest: dict[tuple[object, ...], tuple[object, ...]] | None = None

    def coarsen(self) -> None:
        """[Note: micro-batches]"""
        if self._largest is None:
            self._largest = {}

    def of(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *more: object
    ) -> tuple[object, ...]:
        """Of a call of ``model``, told by ``more`` as well; hashable. The second is what autocast casts to there, or
        False; the third, who else keeps what is saved for backward, if anybody does: `torch.autograd.graph.save_on_cpu`
        leaves little of it on the device."""
        device_type = self._device_type
        # Dynamo, which is about to be told that a call of ours cannot be compiled, does not know them.
        hooks = saving_hooks(True) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None
        state = (
            model.training,
            torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
            None if hooks is None else getattr(hooks[0], "__qualname__", type(hooks[0])),
        )
        found = (*state, _shapes(args), (tuple(kwargs), _shapes(kwargs.values())) if kwargs else (), *more)
        if found not in self._known:
            if found not in self._larger:  # else it has been seen not long ago
                values = (tuple(kwargs), _shapes(kwargs.values(), by_value=False)) if kwargs else ()
                alike = (*state, _shapes(args, by_value=False), values, *more)
                kinds = (*state, tuple(map(type, args)), (*kwargs, *map(type, kwargs.values())), *more)
                found = self._coarser(found, alike, kinds)
            found = self._known_as(found)
        return found if self._largest is None else self._largest_for(found)

    def _coarser(
        self, found: tuple[object, ...], alike: tuple[object, ...], kinds: tuple[object, ...]
    ) -> tuple[object, ...]:
        """``found``, or, where there are too many like it, what counts for all of these: ``alike``, without values, or
        how many elements the call has, beside the ``kinds`` of its arguments."""
        structure, _ = _parted(alike)
        known = self._structures[kinds]
        if structure not in known:
            if len(known) >= _MOST_APART:  # [Note: structures]
                return *kinds, _Elements(_elements_of(alike) + _count(structure))
            known.add(structure)
        exact, _ = _parted(found)
        values = self._values[structure]
        if exact not in values:
            if len(values) >= _MOST_VALUES:  # [Note: numbers]
                return alike
            values.add(exact)
        return found

    def _known_as(self, found: tuple[object, ...]) -> tuple[object, ...]:
        """What ``found`` counts as: itself, if it is known, or comes to be."""
        if found in self._known:
            return found
        larger = self._larger.get(found)
        if larger is None:
            larger = self._larger_than(found)
            if larger is None:
                self._known.add(found)
                return found
            if len(self._larger) >= _MOST_REMEMBERED:
                self._larger.clear()
            self._larger[found] = larger
        return larger

    def _largest_for(self, found: tuple[object, ...]) -> tuple[object, ...]:
        """[Note: micro-batches]: of the known ones that are as large in every dimension."""
        assert self._largest is not None
        if found not in self._largest:
            structure, sizes = _parted(found)
            if self._are_apart(structure):
                by_elements = _by_elements(found)
                self._larger_than(by_elements)  # from now on it is known
                structure, sizes = _parted(by_elements)
            known = self._sizes[structure]
            larger = (those for those in known if _is_within(sizes, those))
            self._largest[found] = known[max(larger, key=math.prod)]
        return self._largest[found]

    def _larger_than(self, found: tuple[object, ...]) -> tuple[object, ...] | None:
        """[Note: sizes]; None if ``found`` is known from now on as what it is."""
        structure, sizes = _parted(found)
        known = self._sizes[structure]
        if len(known) >= _MOST_SIZES:
            larger = [those for those in known if _is_within(sizes, those)]
            if larger:
                return known[min(larger, key=math.prod)]
        if self._are_apart(structure):
            by_elements = _by_elements(found)
            return self._larger_than(by_elements) or by_elements
        known[sizes] = found
        if self._largest:
            self._largest.clear()
        return None

    def _are_apart(self, structure: tuple[object, ...]) -> bool:
        """[Note: boxes]: too many of these are known as what they are."""
        return len(self._sizes[structure]) >= _MOST_APART and structure[-1] is not _Elements


def counts_by_elements(signature: object) -> bool:
    """[Note: boxes]: what was measured of such calls is no bound for others that count alike."""
    return isinstance(signature, tuple) and any(isinstance(part, _Elements) for part in signature)


def autocasts(signature: object) -> bool:
    """What it is of was called in a region of autocast."""
    return isinstance(signature, tuple) and len(signature) > 1 and signature[1] is not False


def saves_elsewhere(signature: object) -> bool:
    """Hooks of somebody else's have what it saves for backward."""
    return isinstance(signature, tuple) and len(signature) > 2 and signature[2] is not None


def without_training(signature: tuple[object, ...]) -> tuple[object, ...]:
    """``signature`` without what makes no difference to a call that records nothing: the model's mode, and what would
    be saved."""
    return signature[1], *signature[3:]


def is_no_larger(call: tuple[object, ...], known: tuple[object, ...]) -> bool:
    """Their signatures, or the same parts of these, differ in sizes at most, and ``call`` is larger in no dimension."""
    (structure, sizes), (known_structure, known_sizes) = _parted(call), _parted(known)
    return structure == known_structure and _is_within(sizes, known_sizes)


def _is_within(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(map(operator.le, sizes, others))


def _parted(signature: tuple[object, ...]) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """What it is but for sizes, and the sizes."""
    shapes: list[tuple[int, ...]] = []
    structure = tuple([_without_shapes(part, shapes) for part in signature])
    return structure, tuple(itertools.chain.from_iterable(shapes))


def _by_elements(signature: tuple[object, ...]) -> tuple[object, ...]:
    """[Note: boxes]; how many there are comes last."""
    structure = [_without_shapes(part, []) for part in signature]
    return *structure, _Elements(_elements_of(signature))


def _elements_of(signature: tuple[object, ...]) -> int:
    """Of its tensors, and of what counts as such."""
    shapes: list[tuple[int, ...]] = []
    for part in signature:
        _without_shapes(part, shapes)
    return sum(shape[-1] if isinstance(shape, _Lengths) else math.prod(shape) for shape in shapes)


def _count(part: object) -> int:
    """Of what is told in ``part`` of a signature."""
    return sum(map(_count, part)) if isinstance(part, tuple) else 1


def _without_shapes(part: object, shapes: list[tuple[int, ...]]) -> object:
    """``part`` of a signature, less the shapes of tensors, which go into ``shapes``."""
    if isinstance(part, _Elements):
        shapes.append((part,))
        return _Elements
    if not isinstance(part, tuple):
        return part
    # As `_shapes` writes a tensor, and what counts as one.
    if len(part) == 3 and (part[1] is _Lengths or isinstance(part[1], torch.dtype)):
        shapes.append(part[0])
        return *part[1:], len(part[0])
    return tuple([_without_shapes(each, shapes) for each in part])


def _shapes(values: Iterable[Any], *, by_value: bool = True, objects: int = OBJECTS) -> tuple[object, ...]:
    """``objects``: as in `tensors_in`; of their numbers only the types count."""
    # No generators: it is called at each forward, settled ones included, once for each container.
    seen: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            # One that wants a gradient gives backward more to do: a GAN's discriminator is called with and without.
            seen.append((tuple(value.shape), value.dtype, value.requires_grad))
        elif isinstance(value, np.ndarray):
            seen.append((_Lengths((*value.shape, value.size)), _Lengths, value.dtype.str))
        elif not by_value and isinstance(value, _DATA) and (lengths := _lengths(value)) is not None:
            seen.append((lengths, _Lengths, False))
        elif isinstance(value, list | tuple):
            seen.append(_shapes(value, by_value=by_value, objects=objects))
        elif isinstance(value, dict):
            seen.append((tuple(value), _shapes(value.values(), by_value=by_value, objects=objects)))
        elif isinstance(value, bool | type(None)) or (by_value and isinstance(value, int | float | str)):
            seen.append(value)
        elif objects and (held := attributes(value)):
            shapes = _shapes(held.values(), by_value=False, objects=objects - 1)
            seen.append((type(value), tuple(held), shapes))
        else:
            seen.append(type(value))
    return tuple(seen)


_DATA = (list, tuple, str, bytes)
_LEAVES = (int, float, complex, type(None), np.generic, Decimal)


def _lengths(value: Any) -> _Lengths | None:
    """None for what has anything else in it than numbers and strings, such as tensors, and for a short string."""
    if isinstance(value, str | bytes) and len(value) <= _SHORT:
        return None
    longest = [1] * _DEPTHS
    depth = leaves = 0
    level = [value]
    while level:
        if depth == _DEEPEST:
            return None
        place, depth = min(depth, _DEPTHS - 1), depth + 1
        following = []
        for each in level:
            longest[place] = max(longest[place], len(each))
            if isinstance(each, str | bytes):
                leaves += len(each)
                continue
            for item in each:
                if isinstance(item, list | tuple | str | bytes):
                    following.append(item)
                elif isinstance(item, _LEAVES):
                    leaves += 1
                else:
                    return None
        level = following
    return _Lengths((*longest, depth, leaves))


def count_elements(value: Any) -> int:
    """Of all tensors in there, and of what counts as such ([Note: data])."""
    return _elements_of(_shapes([value], by_value=False))


def may_record(tensors: Sequence[ManagedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Autograd may record a call with these parameters and arguments: one of them wants a gradient, or something among
    the arguments cannot be looked into. A teacher, all frozen and called in grad mode, has no backward."""
    with plain():
        trained = any(tensor.parameter.requires_grad for tensor in tensors)
    return trained or _may_want_gradients(args) or _may_want_gradients(kwargs.values())


def _may_want_gradients(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            found = value.requires_grad
        elif isinstance(value, list | tuple):
            found = _may_want_gradients(value)
        elif isinstance(value, dict):
            found = _may_want_gradients(value.values())
        else:
            found = not isinstance(value, bool | int | float | str | type(None))
        if found:
            return True
    return False
