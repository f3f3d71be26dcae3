"""The least time of a step, against schedules that are played: none may be quicker, and some come close."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_bounds import Layers, least_seconds, least_with_homes


def played(layers, *, speculates, homes, updates, uploads):
    """Seconds of an iteration, from the begin of backward, in which the host updates in the order ``updates`` and
    sends up in the order ``uploads``: layers that live there, and, as -1 - layer, gradients that come back. None where
    what is sent first leaves no room for what is needed first."""
    arrived, now, down = {}, 0.0, 0.0
    for layer in reversed(range(layers.count)):
        now += 2 * layers.compute / 3
        if layer >= homes:
            down = max(down, now) + layers.download
            arrived[layer] = down
    norm = now
    updated, host = {}, 0.0
    for layer in updates:
        host = max(host, arrived[layer], 0.0 if speculates else norm) + layers.update
        updated[layer] = host
    sent, link, done = {}, 0.0, []

    def run():
        """Forward, as far as what it needs is there."""
        while len(done) < layers.count:
            layer = len(done)
            needs = [layer] if layer >= homes else [item for item in (-1 - layer,) if item in uploads]
            if any(item not in sent for item in needs):
                return
            done.append(
                max([done[-1] if done else norm, *(sent[item] for item in needs)]) + layers.compute / 3
            )

    run()
    taken = 0
    for item in uploads:
        if item < 0:  # made room for by nobody: it is waited for all the same
            link = max(link, norm) + layers.upload
        else:
            # Of those that have been sent, as many have to have been used that one more fits.
            used = homes + taken - (layers.room - homes)
            if used >= homes and len(done) <= used:
                return None
            link = max(link, updated[item], done[used] if used >= homes else 0.0) + layers.upload
            taken += 1
        sent[item] = link
        run()
    return done[-1] if len(done) == layers.count else None


def returned(layers, *, speculates, homes, order):
    """Gradients of those homes, the last of ``order``, that do not fit beside them until the norm is known."""
    fit = homes if speculates else min(homes, layers.room - homes)
    return [-1 - layer for layer in order[fit:]]


seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])
chains = st.builds(
    lambda count, room, **times: Layers(count=count, room=min(room, count), **times),
    count=st.integers(1, 6),
    compute=st.sampled_from([0.75, 1.5, 3.0, 6.0]),
    update=seconds,
    upload=seconds,
    download=seconds,
    room=st.integers(1, 6),
)


@given(chains, st.booleans(), st.data())
def test_no_schedule_is_quicker(layers, speculates, data):
    homes = data.draw(st.integers(0, max(0, layers.room - 2)))
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    away = list(range(homes, layers.count))
    back = returned(layers, speculates=speculates, homes=homes, order=rng.sample(range(homes), homes))
    least = least_seconds(layers, speculates=speculates, homes=homes)
    for _ in range(20):
        updates = rng.sample(away, len(away))
        uploads = rng.sample([*away, *back], len(away) + len(back))
        if in_order := rng.random() < 0.5:  # as needed, which leaves room
            uploads.sort(key=lambda item: item if item >= 0 else -1 - item)
        took = played(layers, speculates=speculates, homes=homes, updates=updates, uploads=uploads)
        assert took >= least - 1e-9 if took is not None else not in_order


@pytest.mark.parametrize(
    ("room", "homes", "speculates", "times"),
    [
        (4, 0, True, {"compute": 6, "update": 0.5, "upload": 0.5, "download": 0.5}),
        (4, 0, True, {"compute": 1.5, "update": 0.5, "upload": 0.5, "download": 5}),
        (4, 0, False, {"compute": 1.5, "update": 0.5, "upload": 0.5, "download": 5}),
        (4, 0, False, {"compute": 3, "update": 5, "upload": 1, "download": 1}),
        (3, 1, False, {"compute": 3, "update": 2, "upload": 2, "download": 0.5}),
        (4, 2, False, {"compute": 3, "update": 1, "upload": 2, "download": 0.5}),
        (4, 3, False, {"compute": 3, "update": 1, "upload": 2, "download": 0.5}),
    ],
    ids=["compute", "gradients", "gradients-norm", "updates-norm", "room", "homes", "returned"],
)
def test_the_best_schedule_takes_no_longer(room, homes, speculates, times):
    """Of all orders, whatever it is that takes longest."""
    layers = Layers(count=4, room=room, **times)
    away = list(range(homes, layers.count))
    back = returned(layers, speculates=speculates, homes=homes, order=range(homes))
    orders = itertools.product(itertools.permutations(away), itertools.permutations([*away, *back]))
    took = [
        played(layers, speculates=speculates, homes=homes, updates=updates, uploads=uploads)
        for updates, uploads in orders
    ]
    assert min(time for time in took if time is not None) == least_seconds(
        layers, speculates=speculates, homes=homes
    )


def test_the_best_number_of_homes_leaves_room_for_two_layers():
    layers = Layers(count=6, room=5, compute=3, update=2, upload=1, download=1)
    seconds = [least_seconds(layers, speculates=True, homes=homes) for homes in range(4)]
    assert least_with_homes(layers, speculates=True) == (min(seconds), seconds.index(min(seconds)))
    assert seconds == [22, 19, 18, 18]
