"""Sets of objects that somebody else keeps."""

import gc

from hetero.stm.living import Living


class One:
    pass


def test_one_that_comes_while_others_are_gone_through_disturbs_nobody():
    # Here it is the same thread that adds it, so that it happens every time.
    known, kept = Living(), [One(), One()]
    for one in kept:
        known.add(one)
    seen = []
    for one in known:
        seen.append(one)
        kept.append(One())
        known.add(kept[-1])
    assert set(seen) == set(kept[:2])
    assert set(known) == set(kept)


def test_who_is_kept_by_nobody_else_is_gone():
    known, kept = Living(), One()
    known.add(kept)
    known.add(kept)
    known.add(One())
    gc.collect()
    assert list(known) == [kept]
    known.discard(kept)
    known.discard(One())
    assert list(known) == []


def test_equal_ones_are_different_ones():
    class Equal(One):
        def __eq__(self, other):
            return isinstance(other, Equal)

        def __hash__(self):
            return 0

    known, first, second = Living(), Equal(), Equal()
    known.add(first)
    known.add(second)
    assert len(list(known)) == 2
    del first
    gc.collect()
    assert [one is second for one in known] == [True]
    known.discard(Equal())
    assert len(list(known)) == 1
