"""Traces of a chain of layers whose optimizer steps on the host."""

from hetero.eviction import Links, Moment, Send, Trace, Updates

SIZE = 1000


def chain(count, room, places=(), *, early=True, update=3.0, sending=2):
    """Forward takes 1 s a layer, backward 2; each gradient leaves at its layer's end."""
    capacity = (room - len(places)) * SIZE

    def layer(x, seconds, sends=()):
        return Moment(
            operands=() if x in places else (x,),
            awaits=(x,) if x in places else (),
            seconds=seconds,
            capacity=capacity - (sending * SIZE if sends else 0),
            sends=sends,
        )

    forward = [layer(x, 1.0) for x in range(count)]
    backward = [layer(x, 2.0, (Send(tensor=x, nbytes=SIZE, seconds=2.0),)) for x in reversed(range(count))]
    step = [
        Moment(operands=(), capacity=capacity),
        Moment(operands=(), capacity=capacity, invalidates=tuple(x for x in range(count) if x not in places)),
    ]
    updates = Updates(
        tensors=tuple(range(count)),
        seconds=(update,) * count,
        queued=2 * count + 1,
        finished=2 * count,
        early=early,
        places=tuple(places),
    )
    return Trace(
        sizes=(SIZE,) * count,
        moments=(*forward, *backward, *step),
        sending_bytes=sending * SIZE,
        updates=updates,
    )


def links(seconds):
    """A copy takes so long."""
    return Links(h2d_bandwidth=SIZE / seconds, d2h_bandwidth=SIZE / seconds)
