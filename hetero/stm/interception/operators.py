"""Putting device copies in the place of managed parameters, operator by operator.

Invariant: an operator that runs on the device receives a copy whose bytes are those of home.

Parameters are intercepted per operator and not per module, because modules lie: ``nn.MultiheadAttention`` never
calls ``out_proj.forward``, a tied head uses another module's weight, parametrizations hide the leaf.

[Note: where operators run] Inside a managed forward (`hetero.stm.interception.scopes`) every operator on a parameter
runs on the device. Elsewhere the other operands decide: a tensor on the device draws the parameter there, a tensor on
the host keeps it at home. With no other tensor operand, an operator runs on the device during backward (a checkpoint
recomputes its forward there) and in a part or a method of the model that is called by itself with something on the
device (`hetero.stm.interception.parts`), and at home otherwise. So does ``p.detach()``, unless a module is being
called: it is how averages and logs look at parameters. What a hook of an accumulated gradient does runs at home
(`hetero.stm.interception.functions`): there are the parameter that it is given, and the gradient.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hetero.autograd import in_backward
from hetero.errors import BudgetError
from hetero.stm.activations.saved import may_save_again, part_saved_as_handles
from hetero.stm.interception.arguments import tensors_in
from hetero.stm.interception.athome import run_at_home
from hetero.stm.interception.casts import drop_bytes, kept_casts, note_plain_use
from hetero.stm.interception.draws import DRAWING
from hetero.stm.interception.formulas import INSTEAD
from hetero.stm.interception.inplace import writes_in_place
from hetero.stm.interception.operands import collect, replace, replace_one, restore
from hetero.stm.interception.outside import full_copies, keeps_its_type, note_outside, with_relief
from hetero.stm.interception.parameter import ManagedParameter, is_managed
from hetero.stm.interception.parts import called_part, computes_on
from hetero.stm.interception.scopes import in_scope, is_at_home
from hetero.stm.tensors.fetch import Fetch
from hetero.stm.tensors.listwrites import count_writes, versions_of_list
from hetero.stm.tensors.managed import ManagedTensor
from hetero.stm.tensors.owner import Owner

__all__ = ["ahead_of_home", "outside", "run_operator", "substituted", "write_back"]


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_LISTS = frozenset({list, tuple})


def run_operator(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, hands_on: bool = False
) -> Any:
    """``func(*args, **kwargs)`` with device copies in the place of parameters, where it belongs on the device.
    ``hands_on``: there to whoever else has a ``__torch_function__``, of the user's own classes of tensors."""
    operands: list[ManagedTensor] = []
    collect(args, operands)
    if kwargs:
        collect(kwargs.values(), operands)
    in_forward = in_scope()
    if not in_forward:
        if is_at_home() or not _belongs_on_device(func, operands[0].owner.device, args, kwargs):
            return run_at_home(func, args, kwargs)
        if keeps_its_type(operands):
            with full_copies(operands) as copies:
                kwargs = {key: replace_one(value, copies) for key, value in kwargs.items()}
                call = partial(func, *replace(args, copies), **kwargs)
                is_once = writes_in_place(func) or func in DRAWING
                result = call() if is_once else with_relief(operands[0].owner, call)
                return restore(result, operands, copies)
        with outside(operands, args, kwargs):
            return _run_on_device(func, operands, args, kwargs, in_forward=False, hands_on=hands_on)
    return _run_on_device(func, operands, args, kwargs, in_forward=True, hands_on=hands_on)


def outside(
    operands: list[ManagedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Around an operator outside of a managed forward. If autograd records it, parameters are saved as handles, as in
    one; and one begins with it, where none has."""
    owner = operands[0].owner
    if in_backward():
        return _NOTHING
    for tensor in operands:
        tensor.owner.home_access.follow_unknown_writes(tensor)
    if (part := called_part(owner.device)) is not None:
        owner.note_part(part)
    records = torch.is_grad_enabled() and (
        any(tensor.parameter.requires_grad for tensor in operands)
        or any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))
    )
    if not records:
        return _NOTHING
    owner.uses.begin_outside()
    return part_saved_as_handles()


_NOTHING = contextlib.nullcontext()


def _run_on_device(
    func: Callable[..., Any],
    operands: list[ManagedTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_forward: bool,
    hands_on: bool,
) -> Any:
    owner = operands[0].owner
    for tensor in operands:
        if tensor.owner is not owner:
            with substituted(operands, func) as copies:
                return _run(func, operands, copies, args, kwargs, in_forward=in_forward, hands_on=hands_on)
    # As `substituted` does it, written out: every operator of a managed model comes here.
    try:
        owner.uses.begin_operator(operands, func)
    except BudgetError as error:
        if not in_forward:
            note_outside(error)
        raise
    try:
        copies = {}
        for tensor in operands:
            parameter = tensor.parameter
            copy = tensor.identity if parameter.requires_grad else tensor.data
            copies[id(parameter)] = owner.uses.copy_for(tensor) if copy is None else copy
        del copy
        return _run(func, operands, copies, args, kwargs, in_forward=in_forward, hands_on=hands_on)
    finally:
        owner.uses.end_operator(operands)


def _run(
    func: Callable[..., Any],
    operands: list[ManagedTensor],
    copies: dict[int, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_forward: bool,
    hands_on: bool,
) -> Any:
    """``func`` with ``copies``, by id of parameter, in the place of ``operands``, which are in COMPUTE."""
    casts = kept_casts(func, operands, copies) if _is_any_autocast_enabled() else None
    for tensor in operands:
        if tensor.cast is not None:
            note_plain_use(tensor, copies)
    ahead = {} if in_forward else ahead_of_home(operands)
    by_name = kwargs
    draw_again = operands[0].owner.relief.random_numbers() if func in DRAWING else None
    compute = INSTEAD.get(func, func)
    while True:
        try:
            given = replace(args, copies)
            if kwargs:
                by_name = {key: replace_one(value, copies) for key, value in kwargs.items()}
        except KeyError:  # one of another model, which had settled and has just made way for this operator
            everyone = list(operands)
            collect((args, kwargs), everyone)
            with substituted(everyone, func) as copies:
                return _run(func, everyone, copies, args, kwargs, in_forward=in_forward, hands_on=hands_on)
        listed = versions_of_list(given) if given and type(given[0]) in _LISTS else []
        try:
            if hands_on:
                with torch._C._EnableTorchFunction():  # parameters are not among what is given
                    result = compute(*given, **by_name)
            else:
                result = compute(*given, **by_name)
            break
        except torch.OutOfMemoryError as error:
            # An in-place operator may have done half its work; everything else can be tried again.
            if writes_in_place(func) or not may_save_again():
                raise
            relief = operands[0].owner.relief
            if not relief.relieve_after(error):
                if isinstance(error, BudgetError):  # a guard has said it
                    raise
                raise relief.refused(getattr(func, "__name__", str(func)), error) from error
            relief.note_answered()
            if draw_again is not None:
                draw_again()
    if listed and writes_in_place(func):
        count_writes(listed)
    for tensor in operands:
        if tensor.is_written:
            _refuse_write_to_leaf(tensor)
    if not in_forward:
        write_back(operands, ahead)
    result = restore(result, operands, copies)
    if casts:
        del given, by_name, listed  # which hold them
        copies.clear()
        drop_bytes(casts)
    return result


def ahead_of_home(operands: list[ManagedTensor]) -> dict[int, int]:
    """Of those that live on the device and were stepped there: the versions of their copies, by id."""
    return {
        id(tensor): tensor.data._version for tensor in operands if tensor.is_ahead and tensor.data is not None
    }


def write_back(operands: list[ManagedTensor], ahead: dict[int, int]) -> None:
    """After an operator outside a forward, home is the truth at once: the next reader, or the optimizer, looks there.
    ``ahead``: by `ahead_of_home`, before the operator; for those whoever looks at home waits."""
    for tensor in operands:
        if tensor.is_written and tensor.data is not None and tensor.data._version != ahead.get(id(tensor)):
            tensor.owner.home_access.write_back(tensor)


class substituted:
    """Context manager: device copies of ``operands``, by id of parameter, resident and in COMPUTE throughout."""

    __slots__ = ("_begun", "_operands")

    def __init__(self, operands: list[ManagedTensor], name: object) -> None:
        self._operands = operands
        self._begun: list[tuple[Owner, list[ManagedTensor]]] = []
        try:
            for owner, group in _by_owner(operands):
                owner.uses.begin_operator(group, name)
                self._begun.append((owner, group))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> dict[int, torch.Tensor]:
        try:
            return {id(tensor.parameter): tensor.owner.uses.copy_for(tensor) for tensor in self._operands}
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for owner, group in self._begun:
            owner.uses.end_operator(group)


def _by_owner(operands: list[ManagedTensor]) -> list[tuple[Owner, list[ManagedTensor]]]:
    first = operands[0].owner
    for tensor in operands:
        if tensor.owner is not first:
            owners = {id(tensor.owner): tensor.owner for tensor in operands}.values()
            return [(owner, [t for t in operands if t.owner is owner]) for owner in owners]
    return [(first, operands)]


def _belongs_on_device(
    func: Callable[..., Any], device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """[Note: where operators run], outside a scope."""
    on_host = False
    for tensor in tensors_in((*args, *kwargs.values())):
        if is_managed(tensor):
            continue
        if tensor.device == device:
            return True
        on_host = on_host or tensor.dim() > 0
    if on_host:
        return False
    if in_backward():
        return True
    return called_part(device) is not None if func is torch.Tensor.detach else computes_on(device)


def _refuse_write_to_leaf(tensor: ManagedTensor) -> None:
    """Its copy was written."""
    if tensor.is_miswritten:
        tensor.owner.home_access.write_back(tensor)  # which raises
    identity = tensor.identity
    if identity is not None and not isinstance(identity.grad_fn, Fetch._backward_cls):
        tensor.owner.home_access.rebind(tensor, tensor.home, is_inference=tensor.is_inference)
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


ManagedParameter._run_operator = staticmethod(run_operator)
