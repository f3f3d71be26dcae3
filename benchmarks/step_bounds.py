"""The least time of an iteration of a chain of layers whose optimizer steps on the host.

Owns a recurrence, a lower bound for any schedule. Layers are equal, backward takes twice as long as forward; gradients
go down one after another, each after its layer's backward; the host updates one layer at a time, and what it has
updated goes up before the layer is used. Without speculation no update begins before the last gradient's norm is known:
until then the device holds a gradient beside each layer that lives there, or that has gone home and comes back.
"""

from dataclasses import dataclass

__all__ = ["Layers", "least_seconds", "least_with_homes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """``count`` of them; seconds of one layer's forward and backward, update, way up and way down; ``room``: how many
    the device holds."""

    count: int
    compute: float
    update: float
    upload: float
    download: float
    room: int


def least_seconds(layers: Layers, *, speculates: bool, homes: int = 0) -> float:
    """With ``homes`` first layers on the device: each takes its own room all along. Gradients of theirs that find none
    until the norm is known are sent up for the step before the layer runs, at best those of the last."""
    forward, count = layers.compute / 3, layers.count
    norm_known = 2 * forward * count
    room = layers.room - homes
    returned = 0 if speculates else max(0, 2 * homes - layers.room)
    arrived = _arrivals(layers, homes)
    if not speculates:
        arrived = [max(time, norm_known) for time in arrived]
    done: list[float] = []
    clock = norm_known
    for layer in range(count):
        if not speculates:  # what is sent up for this layer and those before it
            clock = max(clock, norm_known + max(0, returned + layer - homes + 1) * layers.upload)
        if layer >= homes:
            updated = 0.0
            for other in range(
                layer, homes - 1, -1
            ):  # those of `homes` to here, as they come, and nothing else
                updated = max(updated, arrived[other]) + layers.update
                # Nothing up to it has come before, so nothing has been updated and sent up.
                clock = max(clock, arrived[other] + layers.update + (other - homes + 1) * layers.upload)
            clock = max(clock, updated + layers.upload)
            for used in range(layer):  # what was not there by then has been sent since
                clock = max(clock, done[used] + max(0, layer - max(used, homes - 1) - room) * layers.upload)
        clock += forward
        done.append(clock)
    return clock


def least_with_homes(layers: Layers, *, speculates: bool) -> tuple[float, int]:
    """With the best number of homes that leaves room for two layers; and that number."""
    most = max(0, layers.room - 2)
    return min((least_seconds(layers, speculates=speculates, homes=n), n) for n in range(most + 1))


def _arrivals(layers: Layers, homes: int) -> list[float]:
    """When each layer's gradient is at home; of those on the device, at once."""
    backward = 2 * layers.compute / 3
    arrived = [0.0] * layers.count
    down = 0.0
    for place in range(layers.count):
        layer = layers.count - 1 - place
        made = (place + 1) * backward
        if layer < homes:
            arrived[layer] = made
        else:
            down = max(down, made) + layers.download
            arrived[layer] = down
    return arrived
