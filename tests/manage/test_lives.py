"""What plans are told of saved tensors."""

from hetero.msc import Period, Phase, Segment, SegmentKey
from hetero.stm.plans.lives import read_lives


def forward(nbytes):
    periods = [Period(operands=(0,), saved=[((0, 0), nbytes)]), Period(operands=(1,))]
    return Segment(SegmentKey(Phase.FORWARD, True, "a text"), True, periods=periods)


def test_a_shorter_text_that_is_measured_as_a_longer_one_does_not_tell_what_that_saves():
    for samples in ([forward(64), forward(48)], [forward(48), forward(64)]):
        assert read_lives([samples], 2).sizes == (64,)


def test_what_is_too_small_to_be_recorded_in_one_does_not_hide_how_large_the_others_are():
    def with_small(nbytes, *small):
        records = [((0, number), size) for number, size in enumerate(small)]
        segment = forward(nbytes)
        segment.periods[0].saved = [((0, len(small)), nbytes)]
        segment.periods[1].saved = records
        return segment

    samples = [with_small(64, 8, 4), with_small(48, 2)]
    assert sorted(read_lives([samples], 2).sizes) == [2, 64]
