"""Where the managed model's forward, backward and step begin and end.

Owns which forwards wait for their backward, and so the keys of segments (`hetero.msc.SegmentKey`). Invariant: whatever
ends by an exception leaves no segment that counts as measured, and no operator that counts as running. What
happens within a segment is `hetero.stm.running.executor`'s.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hetero.errors import ManageError
from hetero.msc import AskedOf, BackwardSignature, MemStatsCollector, Phase, SegmentKey
from hetero.stm.activations.offload import Activations
from hetero.stm.copies.residency import Residency
from hetero.stm.gradients.offload import Gradients
from hetero.stm.running.executor import Executor
from hetero.stm.running.staying import take_away_what_is_over
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["Segments"]

_BACKWARD = Phase.BACKWARD  # every operator of a backward looks, and an enum's members are slow to look up

# Sets of parameters that backwards are asked the gradients of: with more, those that come later count alike.
_MOST_SETS = 8
_WHICHEVER = AskedOf(ours=None, others=0)

_PARTS = "parts"  # the signature of a forward that the model was not called for


class Segments:
    """The boundaries of segments, for one model. ``lock``: the manager's."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        residency: Residency,
        gradients: Gradients,
        activations: Activations,
        collector: MemStatsCollector,
        executor: Executor,
        *,
        lock: contextlib.AbstractContextManager[bool],
        has_optimizer: bool,
    ) -> None:
        self._tensors = tensors
        self._residency = residency
        self._gradients = gradients
        self._activations = activations
        self._collector = collector
        self._executor = executor
        self._lock = lock
        self._has_optimizer = has_optimizer
        self._pending_forwards: list[SegmentKey] = []
        self._clocks_before_step: list[int] = []
        # Homes' clocks when the forward before began, by index; of those that were being updated then, none.
        self._clocks: dict[int, int] = {}
        # Of the backwards that run now, on any thread: whether they return gradients.
        self._backwards: list[bool] = []
        # What the first of them was asked the gradients of, as in `BackwardSignature`.
        self._asked_of: AskedOf | None = None
        self._sets: set[AskedOf] = set()  # of those that have come, the first
        # The last backward has left its graph for another.
        self._graph_is_kept = False
        # The threads of forwards and backwards that run now, once for each.
        self._threads: list[int] = []
        # Backwards begin others within, or are about to: reentrant checkpoints, adjoints.
        self.nest = False

    def begin_forward(
        self,
        signature: object,
        *,
        trains: bool,
        elements: int = 0,
        by_values: bool = False,
        is_open: bool = False,
    ) -> None:
        """The managed model's forward begins. ``trains``: it may have a backward; ``elements``: as in `SegmentKey`;
        ``by_values``: what was measured with this signature is no bound for others that have it; ``is_open``: as in
        `Executor.begin_segment`."""
        with self._lock:
            self._residency.follow_homes(self._tensors)  # may raise, and then nothing has begun
            if not self._pending_forwards:  # else both are to end in the same nodes
                self._residency.follow_stream_with_nodes(self._tensors)
            graph = self._graph() if trains else (0,)
            key = SegmentKey(Phase.FORWARD, trains, (signature, *graph), elements)
            if trains:
                self._activations.begin_forward(len(self._pending_forwards))
            self._executor.begin_segment(key, is_open=is_open)
            if by_values and self._executor.segment is not None:
                self._executor.segment.by_values = True
            take_away_what_is_over()
            self._executor.homes_overtook(self._written())
            if trains:
                self._pending_forwards.append(key)
            if not is_open:
                self._threads.append(threading.get_ident())

    def begin_outside(self) -> None:
        """Autograd records an operator outside of the model's forward (`model.encoder(x)`, a penalty in the loss): if
        none has begun for it to be a part of, one does that nobody will end."""
        segment = self._executor.segment
        if segment is not None and segment.key.phase is Phase.FORWARD and segment.key.trains:
            return
        with self._lock:
            self.begin_forward(_PARTS, trains=True, is_open=True)
            begun = self._executor.segment
            assert begun is not None
            begun.complete = True

    def end_forward(self, *, complete: bool) -> None:
        """It ended; ``complete`` False: by an exception."""
        with self._lock:
            self._threads.remove(threading.get_ident())
            refused = None
            try:
                self._residency.write_back_all()
            except ManageError as error:
                if complete:  # else the caller learns of something else already
                    refused = error
                complete = False
            segment = self._executor.segment
            if segment is not None:
                segment.complete = complete
            if not complete:
                self._void()
            else:
                if segment is not None and segment.key.trains:
                    # A period of its own: what the last operator saved may leave before it, as the plan says.
                    self._executor.before_operator([], "after the model")
                if self._executor.is_guarded:
                    self._executor.between.leave_room()
            if not complete or (segment is not None and not segment.key.trains):
                self._executor.between.release_cap()
            else:
                self._executor.between.leave_to_caller()
            if refused is not None:
                raise refused

    def begin_step(self) -> None:
        """The optimizer's step begins; what the one before it left to be done is done."""
        with self._lock:
            with self._collector.waiting_for_host():
                self._residency.orders.finish_updates(self._tensors)
            self._residency.write_back_all()  # through views that are held
            self._residency.follow_unknown_writes(self._tensors)  # before any copy is stepped in its place
            self._executor.begin_segment(SegmentKey(Phase.STEP, True, None))
            take_away_what_is_over()
            self._pending_forwards.clear()
            self._clocks = {}
            self._gradients.reclaim(0)
            self._clocks_before_step = [tensor.clock.now for tensor in self._tensors]

    def end_step(self, *, complete: bool) -> None:
        """Homes have been written, or will be: forget older copies."""
        with self._lock:
            segment = self._executor.segment
            if segment is not None:
                segment.complete = complete
            before = self._clocks_before_step
            written = [
                t
                for t, clock in zip(self._tensors, before, strict=True)
                if t.pending is not None or t.clock.now != clock
            ]
            if complete:
                self._executor.homes_written(written)
            else:
                self._residency.drop_stale(written)
                self._executor.finish_segment()
            self._gradients.norms.forget_all()  # it may have written to gradients
            self._executor.between.release_cap()

    def prepare_backward(self) -> None:
        """A backward of the process begins: the caller's part is over, and copies whose home may have been written
        unseen do not stay."""
        with self._lock:
            self._executor.between.take_from_caller()
            take_away_what_is_over()
            if not self._backwards:
                self._residency.follow_unknown_writes(self._tensors)

    @contextlib.contextmanager
    def backward(self, *, captures: bool, keeps_graph: bool, inputs: Sequence[Any] = ()) -> Iterator[None]:
        """Surrounds every backward of the process, whether or not it reaches this model; after `prepare_backward`.
        ``inputs``: what it was asked the gradients of; none: of all that it reaches."""
        with self._lock:
            self._begin_backward(captures, keeps_graph, inputs)
        complete = False
        try:
            with self._guarded_backward():
                yield
            complete = True
        finally:
            with self._lock:
                self._end_backward(captures, complete=complete)

    def _begin_backward(self, captures: bool, keeps_graph: bool, inputs: Sequence[Any]) -> None:
        # Only at home does autograd read parameters, and add to gradients, without telling us.
        for tensor in self._tensors:
            tensor.paths.note_backward()
            if tensor.paths.lead_home:
                self._residency.settle(tensor)
                self._gradients.wait(tensor)
                self._gradients.norms.forget(tensor.index)
        if self._pending_forwards:
            self._executor.between.before_backward()
        elif self._graph_is_kept:
            self._executor.between.before_another_backward()
        self._graph_is_kept = keeps_graph
        if not self._backwards:
            self._asked_of = self._set_of(inputs)
        self._backwards.append(captures)
        self._threads.append(threading.get_ident())
        self._choose_keeping()

    def _end_backward(self, captures: bool, *, complete: bool) -> None:
        self._backwards.remove(captures)
        self._threads.remove(threading.get_ident())
        self._choose_keeping()
        self._gradients.additions.flush()
        segment = self._executor.segment
        in_backward = segment is not None and segment.key.phase is Phase.BACKWARD
        if segment is not None and in_backward:
            segment.complete = complete
        if not complete and (in_backward or self._pending_forwards):
            # It may have failed before it reached a parameter: then the forward's last period was cut short.
            self._void()
        if captures or not complete:
            self._gradients.norms.forget_all()
            if complete:
                self._gradients.wait_arrivals(self._tensors)
            else:
                self._gradients.wait_all(self._tensors)
            if not self._backwards:
                self._gradients.kept.forget_lost(self._tensors)
        if not (self._has_optimizer and complete):  # nothing tells when the iteration is over
            self._executor.between.release_cap()
        elif not self._backwards:
            if in_backward and captures:
                self._executor.between.leave_unplanned_room()
            self._executor.between.after_backward()

    @property
    def is_running(self) -> bool:
        """A forward of the model, or a backward, runs now, on whatever thread."""
        return bool(self._threads)

    @property
    def is_idle(self) -> bool:
        """Nothing of an iteration that trains is under way."""
        segment = self._executor.segment
        if self._threads or self._pending_forwards:
            return False
        return segment is None or segment.key.phase is Phase.STEP or not segment.key.trains

    @property
    def awaits_backward(self) -> bool:
        """A forward of the model has recorded a graph, and had no backward yet."""
        return bool(self._pending_forwards)

    @property
    def is_in_step(self) -> bool:
        """A step runs, or has failed, and its segment is the last one."""
        segment = self._executor.segment
        return segment is not None and segment.key.phase is Phase.STEP and not segment.complete

    @property
    def device(self) -> torch.device:
        """That of the manager."""
        return self._tensors[0].owner.device

    @property
    def need_one_thread(self) -> bool:
        """Backwards do (`hetero.stm.interception.onethread`): graphs may have nodes at home, beside those on the
        device, begin a backward within, or end where parameters were."""
        if self.nest or self._gradients.have_graphs:
            return True
        return any(t.paths.lead_home or t.paths.lead_by_former for t in self._tensors)

    def backward_within(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds a backward within another, which may have begun before anything told that it reaches this model."""
        segment = self._executor.segment
        if segment is None or segment.key.phase is not Phase.BACKWARD:
            return contextlib.nullcontext()
        return self._executor.guarded_within()

    @contextlib.contextmanager
    def capture_within(self) -> Iterator[None]:
        """Surrounds an ``autograd.grad`` within a backward: what it returns is no ``p.grad``, and about to be read."""
        with self._lock:
            self._backwards.append(True)
            self._choose_keeping()
        try:
            yield
        finally:
            with self._lock:
                self._backwards.remove(True)
                self._choose_keeping()
                self._gradients.norms.forget_all()
                self._gradients.wait_arrivals(self._tensors)  # not for others', which are p.grad by now

    def enter_backward(self) -> None:
        """First sign that the backward that runs now reaches this model."""
        segment = self._executor.segment
        if segment is None or segment.key.phase is not _BACKWARD:
            self._executor.begin_segment(self._backward_key())
            self._pending_forwards.clear()
            if self._asked_of is _WHICHEVER and self._executor.segment is not None:
                self._executor.segment.by_values = True  # what was measured is no bound

    def forget_forwards(self) -> None:
        """None waits for its backward."""
        self._pending_forwards.clear()

    def _set_of(self, inputs: Sequence[Any]) -> AskedOf | None:
        if not inputs:
            return None
        # A gradient edge leads to its node, and that, if nothing comes after it, to the leaf.
        leaves = (getattr(getattr(each, "node", None), "variable", each) for each in inputs)
        known = (getattr(leaf, "_hetero", None) for leaf in leaves)
        ours = [
            tensor.index for tensor in known if tensor is not None and tensor.owner is self._tensors[0].owner
        ]
        found = AskedOf(frozenset(ours), len(inputs) - len(ours))
        if ours and len(self._sets) < _MOST_SETS:
            self._sets.add(found)
        return found if not ours or found in self._sets else _WHICHEVER

    def _choose_keeping(self) -> None:
        """Only if each backward that runs accumulates, what autograd is given becomes a ``p.grad``."""
        self._gradients.kept.keeps = bool(self._backwards) and not any(self._backwards)

    def _graph(self) -> tuple[object, ...]:
        """What decides which graph a forward makes: how many others wait for their backward, and who is frozen."""
        with plain():
            frozen = tuple(t.index for t in self._tensors if not t.parameter.requires_grad)
        return len(self._pending_forwards), frozen

    def _written(self) -> list[int]:
        """Whose home has been written since the forward before began, and not by a step of ours."""
        before = self._clocks
        self._clocks = {t.index: t.clock.known for t in self._tensors if t.pending is None}
        return [index for index, clock in self._clocks.items() if before.get(index, clock) != clock]

    def _void(self) -> None:
        """What ran was left by an exception."""
        segment = self._executor.segment
        if segment is not None:
            segment.complete = False
        self._executor.finish_segment()
        self._pending_forwards.clear()
        if not self._threads:  # else an operator may run, another thread's, or one that this was within
            for tensor in self._tensors:
                tensor.abandon_compute()
        self._residency.await_copies()
        self._activations.forget_starting()

    def _guarded_backward(self) -> contextlib.AbstractContextManager[None]:
        segment = self._executor.segment
        if segment is not None and segment.key.phase is Phase.BACKWARD:
            return self._executor.guarded()
        # Without a forward that waits for it, it may go through a graph that a failure has left behind.
        if self._pending_forwards or self._activations.has_records:
            return self._executor.guarded(self._backward_key())
        return contextlib.nullcontext()  # nothing of ours waits for it

    def _backward_key(self) -> SegmentKey:
        forwards = tuple(self._pending_forwards)
        elements = sum([key.elements for key in forwards])
        signature = BackwardSignature(forwards, self._graph_is_kept, self._asked_of, any(self._backwards))
        return SegmentKey(Phase.BACKWARD, True, signature, elements)
