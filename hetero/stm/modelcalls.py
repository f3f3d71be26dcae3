"""The calls of a managed model, and of its parts.

Owns what surrounds the user's forward: a segment that is measured or follows a plan, interception, hooks on saved
tensors, the guard. It stands in torch's own slot for a replaced call, which wraps hooks and forward alike, unwinds on
any exception, and is left out by `Module.__getstate__`, so that copies and pickles are plain. Invariant: it is gone
from every module when management ends, unless somebody has replaced it since.

[Note: parts] A module of the model that is called by itself (``model.encoder(x)``), with something on the device, is a
forward as well. Those are its children that have children; any other is told by the first operator in it
(`hetero.stm.interception.parts`), and is one from its next call on. Within the model's own forward each then adds a
call of ours; while everything fits, only those do that have been called by themselves before, because their calls are
checked as the model's are. Parts go by their names: what is replaced is not kept alive.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.autograd import in_backward
from hetero.config import Config
from hetero.stm.activations.saved import part_saved_as_handles, saved_tensors_as_handles
from hetero.stm.checkpoints import refuse_export
from hetero.stm.interception.arguments import any_on
from hetero.stm.interception.compiled import (
    SLOT,
    CompiledCalls,
    SlotCall,
    check_called_eagerly,
    is_compiling,
    is_entry,
    run_eagerly,
    set_slot,
)
from hetero.stm.interception.parts import look_again
from hetero.stm.interception.scopes import in_scope, scope
from hetero.stm.interception.signatures import Signatures, count_elements, counts_by_elements, may_record
from hetero.stm.interception.transforms import check_transformed, is_transforming
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.running.unseen import unseen
from hetero.stm.settled.added import Added
from hetero.stm.settled.state import Settled
from hetero.stm.tensors.precision import cast_inputs
from hetero.stm.wrappers import check_caller

__all__ = ["ModelCalls"]

_Call = Callable[..., Any]


class _Replaced(NamedTuple):
    module: "weakref.ref[nn.Module]"
    call: SlotCall

    def put_back(self) -> None:
        """Unless somebody else has replaced it since."""
        module = self.module()
        if module is not None and module.__dict__.get(SLOT) is self.call:
            set_slot(module, self.call.own)


def _find(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that name, if there is one now."""
    found: nn.Module | None = model
    for key in name.split("."):
        found = None if found is None else found._modules.get(key)
    return found


class ModelCalls:
    """Of one model. ``keeps`` lives as long as the model has these calls: who drops the manager and goes on training is
    managed on. Who keeps a part alone, a trained encoder, keeps nothing else."""

    def __init__(
        self,
        model: nn.Module,
        stm: StatefulTensorMgr,
        settled: Settled,
        compiled: CompiledCalls,
        config: Config,
        *,
        has_optimizer: bool,
        keeps: object,
    ) -> None:
        self._model = model
        self._stm = stm
        self._settled = settled
        self._compiled = compiled
        self._precision = config.precision
        self._activations = stm.activations if config.activations else None
        self._has_optimizer = has_optimizer
        self._keeps = keeps
        self._signatures = Signatures(stm.device.type)
        stm.cycles.coarsen = self._signatures.coarsen
        self._added = Added(model)
        # Each module whose call is replaced, the model first, and what stands in its slot.
        self._replaced: list[_Replaced] = []
        # [Note: parts]: their names, and whether they have been called by themselves. With ``precision``, what is
        # called beside the model computes with home's values (`hetero.stm.interception.outside`).
        children = model.named_children() if self._precision is None else ()
        self._parts = {name: False for name, part in children if next(part.children(), None) is not None}
        self._are_parts_off = False

    def __del__(self) -> None:
        self.unwrap()  # parts may live on

    # -- putting them there, and taking them off ------------------------------------------------------

    def wrap(self) -> None:
        """Replace the model's call, and those of its parts."""
        model = self._model
        own = model.__dict__.get(SLOT)
        self._put(model, own, self._of_model(own or model._call_impl))
        self._wrap_parts()

    def unwrap(self) -> None:
        """Put back what was there."""
        while self._replaced:
            self._replaced.pop().put_back()

    def add_part(self, part: nn.Module) -> None:
        """It is being called by itself."""
        if self._precision is None and part is not self._model and not is_entry(part.__dict__.get(SLOT)):
            for name, module in self._model.named_modules():
                if module is part:
                    self._parts[name] = True
                    self._wrap_part(name, part)

    def rest(self) -> None:
        """Everything fits: parts are called as the user's own, but for those that are called by themselves."""
        self._are_parts_off = True
        self._unwrap_parts()
        self._wrap_parts()

    def wake(self) -> None:
        """It does not any more."""
        self._are_parts_off = False
        if self._replaced:
            self._unwrap_parts()
            self._wrap_parts()

    def _unwrap_parts(self) -> None:
        while len(self._replaced) > 1:
            self._replaced.pop().put_back()

    def _wrap_parts(self) -> None:
        for name, is_called in self._parts.items():
            part = _find(self._model, name)
            if part is not None and (is_called or not self._are_parts_off):
                self._wrap_part(name, part)

    def _wrap_part(self, name: str, part: nn.Module) -> None:
        own = part.__dict__.get(SLOT)
        if not is_entry(own):
            self._put(part, own, self._of_part(name, part, own))

    def _put(self, module: nn.Module, own: _Call | None, call: _Call) -> None:
        slot_call = SlotCall(run_eagerly(call), own, is_entry=True)
        set_slot(module, slot_call)
        self._replaced.append(_Replaced(weakref.ref(module), slot_call))

    # -- what they do ---------------------------------------------------------------------------------

    def _of_model(self, inner: _Call) -> _Call:
        model, stm, settled, compiled = self._model, self._stm, self._settled, self._compiled
        signatures, added = self._signatures, self._added
        users_own = compiled.own_call(inner)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            if stm.standing.is_in_child:
                stm.check_process()
            if compiled.is_outdated:
                compiled.follow()
            # `in_backward`, and below who trains, are written out: this runs while everything fits.
            if settled.is_on and torch._C._current_graph_task_id() != -1:
                return inner(*args, **kwargs)
            if is_transforming():
                check_transformed(model)
                with compiled.explaining(stm.device, args, kwargs):
                    return inner(*args, **kwargs)
            signature = signatures.of(model, args, kwargs, added.kind)
            trains = torch.is_grad_enabled() and (
                self._has_optimizer or may_record(stm.tensors, args, kwargs)
            )
            if settled.enter(trains, signature):
                return settled.run(users_own, args, kwargs)
            if torch.compiler.is_exporting():
                raise refuse_export(type(model).__name__, stm.device, way="torch.export.export")
            # A checkpoint around the model recomputes it within backward: that is no new forward.
            if in_backward():
                with scope(), stm.uses.within_backward(), saved_tensors_as_handles():
                    args, kwargs = self._cast(args, kwargs)
                    return inner(*args, **kwargs)
            check_called_eagerly(model, type(model).__name__)
            saving = saved_tensors_as_handles(self._activations)
            return self._run(inner, signature, trains, saving, args, kwargs)

        return call

    def _of_part(self, name: str, part: nn.Module, own: _Call | None) -> _Call:
        """[Note: parts]"""
        device = self._stm.device
        # The model's own call keeps us; and nothing of ours keeps a part, nor by that the model.
        reference, this = weakref.ref(self), weakref.ref(part)

        @functools.wraps(nn.Module._call_impl)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls, part = reference(), this()
            assert part is not None  # it is being called
            inner = own or part._call_impl
            if (
                calls is None
                or threading.get_ident() in calls._settled.running
                or in_scope()
                or torch._C._current_graph_task_id() != -1  # `in_backward`, written out as above
                or is_transforming()
                or not any_on(device, args, kwargs)
            ):
                return inner(*args, **kwargs)
            if is_compiling():
                check_called_eagerly(part, name)
                return inner(*args, **kwargs)
            stm, settled, compiled = calls._stm, calls._settled, calls._compiled
            if stm.standing.is_in_child:
                stm.check_process()
            if compiled.is_outdated:
                compiled.follow()
            calls._parts[name] = True
            # The name comes last: what else is told by the rest is told alike (`hetero.stm.settled`).
            signature = calls._signatures.of(part, args, kwargs, calls._added.kind, name)
            trains = torch.is_grad_enabled() and (
                calls._has_optimizer or may_record(stm.tensors, args, kwargs)
            )
            if settled.enter(trains, signature):
                return settled.run(compiled.own_call(inner), args, kwargs)
            saving = part_saved_as_handles(calls._activations)
            return calls._run(inner, signature, trains, saving, args, kwargs)

        return call

    def _run(
        self,
        inner: _Call,
        signature: object,
        trains: bool,
        saving: contextlib.AbstractContextManager[None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As a segment of its own."""
        if torch._C._get_tracing_state() is not None:
            raise refuse_export(type(self._model).__name__, self._stm.device, way="torch.jit.trace")
        check_caller(trains=trains)
        look_again()
        settled, segments = self._settled, self._stm.segments
        with self._stm.lock, unseen():
            # Another thread may have settled since it was asked.
            fits = settled.is_on and settled.enter(trains, signature)
            if not fits:
                segments.begin_forward(
                    signature,
                    trains=trains,
                    elements=count_elements((args, kwargs)),
                    by_values=counts_by_elements(signature),
                )
        if fits:
            return settled.run(self._compiled.own_call(inner), args, kwargs)
        complete = False
        try:
            explaining, guarded = (
                self._compiled.explaining(self._stm.device, args, kwargs),
                self._stm.executor.guarded(),
            )
            with explaining, scope(), guarded, saving:
                args, kwargs = self._cast(args, kwargs)
                result = inner(*args, **kwargs)
            complete = True
        finally:
            with unseen():
                segments.end_forward(complete=complete)
        return result

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self._precision is None else cast_inputs(self._precision, args, kwargs)
