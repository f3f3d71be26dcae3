"""The calls of a managed model, and of its parts.

Owns what surrounds the user's forward: a segment that is measured or follows a plan, interception, hooks on saved
tensors, the guard. It stands in torch's own slot for a replaced call, which wraps hooks and forward alike, unwinds on
any exception, and is left out by `Module.__getstate__`, so that copies and pickles are plain. Invariant: it is gone
from every module when management ends, unless somebody has replaced it since.

[Note: parts] A module of the model that is called by itself (``model.encoder(x)``), with something on the device, is a
forward as well. Those are its children that have children; any other is told by the first operator in it
(`hetero.stm.interception.parts`), and is one from its next call on. Within the model's own forward each then adds a
call of ours; while everything fits, none.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.config import Config
from hetero.stm.activations.saved import part_saved_as_handles, saved_tensors_as_handles
from hetero.stm.checkpoints import refuse_export
from hetero.stm.interception.arguments import any_on
from hetero.stm.interception.compiled import (
    SLOT,
    CompiledCalls,
    check_called_eagerly,
    is_compiling,
    mark_as_ours,
    run_eagerly,
)
from hetero.stm.interception.intercept import in_scope, scope
from hetero.stm.interception.signatures import may_record, signature_of
from hetero.stm.interception.transforms import check_transformed, is_transforming
from hetero.stm.manager import StatefulTensorMgr
from hetero.stm.settled import Settled
from hetero.stm.tensors.precision import cast_inputs

__all__ = ["ModelCalls"]

_Call = Callable[..., Any]


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
        # Each module whose call is replaced, the model first: what stood in its slot, and what does.
        self._replaced: list[tuple[nn.Module, _Call | None, _Call]] = []
        # [Note: parts]. With ``precision``, what is called beside the model computes with home's values
        # (`hetero.stm.interception.outside`).
        children = model.named_children() if self._precision is None else ()
        self._parts = {name: part for name, part in children if next(part.children(), None) is not None}
        self._are_parts_off = False

    def __del__(self) -> None:
        self.unwrap()  # parts may live on

    # -- putting them there, and taking them off ------------------------------------------------------

    def wrap(self) -> None:
        """Replace the model's call, and those of its parts."""
        model = self._model
        own = model.__dict__.get(SLOT)
        self._put(model, own, self._of_model(own or model._call_impl))
        if not self._are_parts_off:
            self._wrap_parts()

    def unwrap(self) -> None:
        """Put back what was there."""
        while self._replaced:
            self._take_off(*self._replaced.pop())

    def add_part(self, part: nn.Module) -> None:
        """It is being called by itself."""
        if self._precision is None and part is not self._model and part not in self._parts.values():
            for name, module in self._model.named_modules():
                if module is part:
                    self._parts[name] = part
                    self._wrap_part(name, part)

    def rest(self) -> None:
        """Everything fits: parts are called as the user's own."""
        self._are_parts_off = True
        while len(self._replaced) > 1:
            self._take_off(*self._replaced.pop())

    def wake(self) -> None:
        """It does not any more."""
        self._are_parts_off = False
        if self._replaced:
            self._wrap_parts()

    def _wrap_parts(self) -> None:
        for name, part in self._parts.items():
            self._wrap_part(name, part)

    def _wrap_part(self, name: str, part: nn.Module) -> None:
        if part.__dict__.get(SLOT) is None:  # else it is the compiler's to call
            self._put(part, None, self._of_part(name, part, part._call_impl))

    def _put(self, module: nn.Module, own: _Call | None, call: _Call) -> None:
        module.__dict__[SLOT] = mark_as_ours(run_eagerly(call))
        self._replaced.append((module, own, call))

    @staticmethod
    def _take_off(module: nn.Module, own: _Call | None, call: _Call) -> None:
        if module.__dict__.get(SLOT) is call:
            if own is None:
                del module.__dict__[SLOT]
            else:
                module.__dict__[SLOT] = own

    # -- what they do ---------------------------------------------------------------------------------

    def _of_model(self, inner: _Call) -> _Call:
        model, stm, settled, compiled = self._model, self._stm, self._settled, self._compiled
        device_type = stm.device.type
        users_own = compiled.own_call(inner)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            if stm.is_in_child:
                stm.check_process()
            if compiled.is_outdated:
                compiled.follow()
            if settled.is_on and torch._C._current_graph_task_id() != -1:
                return inner(*args, **kwargs)
            if is_transforming():
                check_transformed(model)
                return inner(*args, **kwargs)
            signature = signature_of(model, device_type, args, kwargs)
            # Written out, because it runs while everything fits.
            trains = torch.is_grad_enabled() and (
                self._has_optimizer or may_record(stm.tensors, args, kwargs)
            )
            if settled.enter(trains, signature):
                return settled.run(users_own, args, kwargs)
            if torch.compiler.is_exporting():
                raise refuse_export(type(model).__name__, stm.device)
            # A checkpoint around the model recomputes it within backward: that is no new forward.
            if torch._C._current_graph_task_id() != -1:
                with scope(), saved_tensors_as_handles():
                    args, kwargs = self._cast(args, kwargs)
                    return inner(*args, **kwargs)
            check_called_eagerly(model)
            saving = saved_tensors_as_handles(self._activations)
            return self._run(inner, signature, trains, saving, args, kwargs)

        return call

    def _of_part(self, name: str, part: nn.Module, inner: _Call) -> _Call:
        """[Note: parts]"""
        device = self._stm.device
        reference = weakref.ref(self)  # the model's own call keeps us

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls = reference()
            if (
                calls is None
                or in_scope()
                or torch._C._current_graph_task_id() != -1
                or is_transforming()
                or is_compiling()
                or not any_on(device, args, kwargs)
            ):
                return inner(*args, **kwargs)
            calls._stm.check_process()
            signature = (name, *signature_of(part, device.type, args, kwargs))
            trains = torch.is_grad_enabled() and may_record(calls._stm.tensors, args, kwargs)
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
        segments = self._stm.segments
        segments.begin_forward(signature, trains=trains)
        complete = False
        try:
            explaining, guarded = self._compiled.explaining(args, kwargs), self._stm.executor.guarded()
            with explaining, scope(), guarded, saving:
                args, kwargs = self._cast(args, kwargs)
                result = inner(*args, **kwargs)
            complete = True
        finally:
            segments.end_forward(complete=complete)
        return result

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args, kwargs) if self._precision is None else cast_inputs(self._precision, args, kwargs)
