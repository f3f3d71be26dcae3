"""Whether different tensors of a model lie over the same bytes.

Owns the exact answer, for any strides. Reads sizes and addresses, never contents.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

__all__ = ["first_overlap"]

Named = tuple[str, torch.Tensor]


def first_overlap(tensors: Sequence[Named], others: Sequence[Named] = ()) -> tuple[str, str, int] | None:
    """Two of ``tensors``, or one of them and one of ``others``, that share bytes, by name, and how many bytes; None if
    there are none. Two of ``others`` may."""
    groups: dict[int, list[tuple[Named, bool]]] = defaultdict(list)
    for named, is_other in (*((n, False) for n in tensors), *((n, True) for n in others)):
        if _has_plain_memory(named[1]):
            groups[named[1].untyped_storage().data_ptr()].append((named, is_other))
    for group in groups.values():
        for one, other in _touching(group):
            shared = _shared_bytes(one[1], other[1])
            if shared:
                return one[0], other[0], shared
    return None


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False  # what has no shape yet, and what has no storage of its own
    return tensor.numel() > 0 and not tensor.is_meta and tensor.layout is torch.strided


def _touching(group: list[tuple[Named, bool]]) -> Iterator[tuple[Named, Named]]:
    """Pairs of one storage whose first to last bytes overlap."""
    spans = sorted(((*_span(named[1]), place) for place, (named, _) in enumerate(group)))
    for number, (_, end, place) in enumerate(spans):
        for begin, _, next_place in spans[number + 1 :]:
            if begin >= end:
                break
            (one, one_is_other), (other, other_is_other) = group[place], group[next_place]
            if not (one_is_other and other_is_other):
                yield (other, one) if one_is_other else (one, other)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of its storage, ``[begin, end)``."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    begin = int(tensor.storage_offset())
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _shared_bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    begin, end = max(_span(one)[0], _span(other)[0]), min(_span(one)[1], _span(other)[1])
    if one.is_contiguous() and other.is_contiguous():
        return end - begin
    return int((_mask(one, begin, end) & _mask(other, begin, end)).sum())


def _mask(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Which bytes in ``[begin, end)`` of its storage are the tensor's."""
    first, last = _span(tensor)
    mask = torch.zeros(last - first, dtype=torch.bool, device="cpu")
    strides = (*(stride * tensor.itemsize for stride in tensor.stride()), 1)
    mask.as_strided((*tensor.size(), tensor.itemsize), strides).fill_(True)
    return mask[begin - first : end - first]
