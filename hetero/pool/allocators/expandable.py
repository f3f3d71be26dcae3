"""Pages of expandable segments: mapping memory where a request needs it, unmapping what no one holds.

Owns `grow` and `unmap_free_pages` on the segments of the CUDA caching allocator. Invariant:
``segment.mapped`` is the sum of its mapped blocks, a whole number of pages. PyTorch:
``try_allocate_expandable_block`` and ``unmap_block``.
"""

from hetero.pool.allocators.blocks import Block, Segment, merge, split_off
from hetero.units import round_up

__all__ = ["grow", "unmap_free_pages"]


def grow(segment: Segment, size: int, room: int | None) -> Block | None:
    """A free block of at least ``size`` bytes, mapped at the lowest run of free and unmapped addresses that
    holds it.

    ``room``: bytes the device can still give (None: any); None is returned, with nothing mapped, where it
    is short. The block is in no list afterwards.
    """
    run = _first_run(segment, size)
    needed = _pages_needed(segment, run, size)
    if room is not None and needed > room:
        return None
    block = run[0]
    if block.mapped:
        segment.free_list.remove(block)
    else:
        _map(block, size)
    while block.size < size:
        tail = block.following
        # `_first_run` checked that free and unmapped blocks follow until there is enough.
        assert tail is not None
        if tail.mapped:
            segment.free_list.remove(tail)
        else:
            _map(tail, size - block.size)
        block = merge(block, tail)
    return _absorb_following(block)


def unmap_free_pages(block: Block) -> None:
    """Give back every whole page inside the free ``block`` of an expandable segment."""
    segment = block.segment
    page, base = segment.page, segment.address
    begin = base + round_up(block.address - base, page)
    end = base + (block.address + block.size - base) // page * page
    if begin >= end:
        return
    segment.free_list.remove(block)
    if begin > block.address:
        low = block
        block = split_off(low, begin - low.address)
        segment.free_list.add(low)
    if end < block.address + block.size:
        segment.free_list.add(split_off(block, end - block.address))
    block.mapped = False
    segment.mapped -= block.size
    for neighbour in (block.previous, block.following):
        if neighbour is not None and not neighbour.mapped:
            block = merge(block, neighbour)


def _first_run(segment: Segment, size: int) -> list[Block]:
    """The lowest run of free blocks, at least one of them unmapped and no free one before the first gap but
    one.
    """
    for block in segment:
        if block.mapped:
            continue
        start = block.previous if block.previous is not None and block.previous.free else block
        run, held = [], 0
        candidate: Block | None = start
        while candidate is not None and candidate.free and held < size:
            run.append(candidate)
            held += candidate.size
            candidate = candidate.following
        if held >= size:
            return run
    raise AssertionError("the tail of an expandable segment never ends")


def _pages_needed(segment: Segment, run: list[Block], size: int) -> int:
    needed, held = 0, 0
    for block in run:
        if not block.mapped:
            wanted = min(size - held, block.size)
            needed += min(round_up(wanted, segment.page), block.size)
        held += block.size
    return needed


def _map(block: Block, size: int) -> None:
    """Map the low pages of an unmapped block that hold ``size`` bytes; what is left stays unmapped behind
    it.
    """
    segment = block.segment
    mapped = min(round_up(size, segment.page), block.size)
    if mapped < block.size:
        split_off(block, mapped)
    block.mapped = True
    segment.mapped += mapped


def _absorb_following(block: Block) -> Block:
    following = block.following
    if following is not None and following.free and following.mapped:
        block.segment.free_list.remove(following)
        block = merge(block, following)
    return block
