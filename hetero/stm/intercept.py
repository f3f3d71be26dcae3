"""Putting device copies in the place of managed parameters, operator by operator.

Owns the parameter class, the fetch node, the saved-tensor handles and the table of functions that are not
operators. Invariant: an operator that runs on the device receives a copy whose bytes are those of home; a
function that only asks about a parameter moves nothing.

Parameters are intercepted per operator and not per module, because modules lie: ``nn.MultiheadAttention`` never
calls ``out_proj.forward``, a tied head uses another module's weight, parametrizations hide the leaf.

[Note: where operators run]
Inside a managed forward (`scope`) every operator on a parameter runs on the device. Elsewhere the other operands
decide: a tensor on the device draws the parameter there, a tensor on the host keeps it at home. With no other
tensor operand, an operator runs on the device during backward (a checkpoint recomputes its forward there) and
at home otherwise.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from hetero.errors import ManageError
from hetero.stm.tensors import ManagedTensor

__all__ = [
    "ManagedParameter",
    "Owner",
    "in_scope",
    "is_managed",
    "managed_of",
    "plain",
    "scope",
    "substituted",
]

plain = torch._C.DisableTorchFunctionSubclass
"""Context in which managed parameters are ordinary tensors: without it, fetching would intercept itself."""


class Owner(Protocol):
    """What interception needs of a manager (`hetero.stm.manager.StatefulTensorMgr`)."""

    device: torch.device

    def begin_operator(self, operands: list[ManagedTensor], name: object) -> None:
        """The pre-op sampling moment; operands are resident and in COMPUTE afterwards."""

    def end_operator(self, operands: list[ManagedTensor]) -> None: ...

    def copy_for(self, tensor: ManagedTensor) -> torch.Tensor:
        """What the operator receives instead of the parameter."""

    def relieve(self) -> int:
        """Free what can be freed after an out-of-memory error; returns the bytes freed."""

    def wait_for_gradient(self, tensor: ManagedTensor) -> None: ...

    def gradient_set(self, tensor: ManagedTensor) -> None: ...

    def rebind_home(self, tensor: ManagedTensor, data: torch.Tensor) -> None: ...


class _Scope(threading.local):
    depth = 0


_scope = _Scope()


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Within it, operators on managed parameters run on the device. Per thread; may be nested."""
    _scope.depth += 1
    try:
        yield
    finally:
        _scope.depth -= 1


def in_scope() -> bool:
    """A managed forward runs on this thread."""
    return _scope.depth > 0


class ManagedParameter(nn.Parameter):
    """What ``p.__class__`` is while `p` is managed. It remains a `nn.Parameter` whose data live at home."""

    _hetero: ManagedTensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with plain():
            handler = _HANDLERS.get(func)
            if handler is not None:
                return handler(func, args, kwargs or {})
            return _operator(func, args, kwargs or {})

    # A copy is an ordinary parameter: nobody manages it.
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with plain():
            copy = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain():
            twin = nn.Parameter(self.detach(), self.requires_grad)
            twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_hetero"})
            return twin.__reduce_ex__(protocol)


def is_managed(value: object) -> bool:
    """``value`` is a parameter under management."""
    return type(value) is ManagedParameter


def managed_of(parameter: Any) -> ManagedTensor:
    """The record behind a managed parameter."""
    return parameter._hetero  # type: ignore[no-any-return]


# -- operators ---------------------------------------------------------------------------------------


def _operator(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands: list[ManagedTensor] = []
    _collect(args, operands)
    if kwargs:
        _collect(kwargs.values(), operands)
    if not _scope.depth and not _belongs_on_device(operands[0].owner.device, args, kwargs):  # type: ignore[attr-defined]
        return _at_home(func, operands, args, kwargs)
    return _on_device(func, operands, args, kwargs)


def _on_device(
    func: Callable[..., Any], operands: list[ManagedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with substituted(operands, func) as copies:
        args = _replace(args, copies)
        if kwargs:
            kwargs = {key: _replace_one(value, copies) for key, value in kwargs.items()}
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            # An in-place operator may have done half its work; everything else can be tried again.
            name = getattr(func, "__name__", "")
            if (name.endswith("_") and not name.endswith("__")) or not operands[0].owner.relieve():  # type: ignore[attr-defined]
                raise
            result = func(*args, **kwargs)
        _refuse_write_to_leaf(operands)
    return _restore(result, operands, copies)


class substituted:
    """Context manager: device copies of ``operands``, by id of parameter, resident and in COMPUTE throughout."""

    __slots__ = ("_groups", "_operands")

    def __init__(self, operands: list[ManagedTensor], name: object) -> None:
        self._operands = operands
        owners = {id(tensor.owner): tensor.owner for tensor in operands}
        self._groups: list[tuple[Any, list[ManagedTensor]]] = [
            (owner, [t for t in operands if t.owner is owner] if len(owners) > 1 else operands)
            for owner in owners.values()
        ]
        begun = []
        try:
            for owner, group in self._groups:
                owner.begin_operator(group, name)
                begun.append((owner, group))
        except BaseException:
            for owner, group in begun:
                owner.end_operator(group)
            raise

    def __enter__(self) -> dict[int, torch.Tensor]:
        try:
            return {id(tensor.parameter): tensor.owner.copy_for(tensor) for tensor in self._operands}  # type: ignore[attr-defined]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for owner, group in self._groups:
            owner.end_operator(group)


def _at_home(
    func: Callable[..., Any], operands: list[ManagedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.is_grad_enabled():
        for tensor in operands:
            # Autograd now reaches the parameter by a path of its own ([Note: unread gradients]).
            tensor.used_at_home = True
    return func(*args, **kwargs)


def _belongs_on_device(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """[Note: where operators run], outside a scope."""
    on_host = False
    for tensor in _tensors((*args, *kwargs.values())):
        if type(tensor) is ManagedParameter:
            continue
        if tensor.device == device:
            return True
        on_host = on_host or tensor.dim() > 0
    return not on_host and torch._C._current_graph_task_id() != -1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _collect(values: Any, operands: list[ManagedTensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is ManagedParameter:
            if value._hetero not in operands:
                operands.append(value._hetero)
        elif kind is list or kind is tuple:
            _collect(value, operands)
        elif kind is dict:
            _collect(value.values(), operands)


def _replace(values: Any, copies: dict[int, torch.Tensor]) -> Any:
    return tuple([_replace_one(value, copies) for value in values])


def _replace_one(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    kind = type(value)
    if kind is ManagedParameter:
        return copies[id(value)]
    if kind is tuple:
        return _replace(value, copies)
    if kind is list:
        return [_replace_one(item, copies) for item in value]
    if kind is dict:
        return {key: _replace_one(item, copies) for key, item in value.items()}
    return value


def _restore(result: Any, operands: list[ManagedTensor], copies: dict[int, torch.Tensor]) -> Any:
    """An operator that returns an operand as it is (``p.contiguous()``, ``p.add_()``) returns the parameter."""
    if isinstance(result, torch.Tensor):
        for tensor in operands:
            if result is copies[id(tensor.parameter)]:
                return tensor.parameter
    elif type(result) is tuple or type(result) is list:
        return type(result)([_restore(item, operands, copies) for item in result])
    return result


def _refuse_write_to_leaf(operands: list[ManagedTensor]) -> None:
    for tensor in operands:
        identity = tensor.identity
        if identity is not None and tensor.is_dirty and not isinstance(identity.grad_fn, Fetch._backward_cls):  # type: ignore[attr-defined]
            tensor.owner.rebind_home(tensor, tensor.home)  # type: ignore[attr-defined]
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


# -- the fetch node ----------------------------------------------------------------------------------


class Fetch(torch.autograd.Function):
    """Parameter at home -> its identity on the device; the gradient goes the other way.

    It *returns* the gradient, so that all of autograd's semantics hold: ``autograd.grad`` on parameters, tensor
    hooks, post-accumulate hooks, other paths to the same parameter.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, tensor: ManagedTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.tensor = tensor
        # Where autograd has no gradient at all, ``p.grad`` must stay None and not become zeros.
        ctx.set_materialize_grads(False)
        assert tensor.data is not None
        return tensor.data.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        if gradient is None:
            return None, None
        with plain():
            return ctx.tensor.owner.hand_over(ctx.tensor, gradient), None


# Straight to the C implementation: `Function.apply` itself is intercepted (`hetero.stm.patches`).
_apply_fetch = super(torch.autograd.function._SingleLevelFunction, Fetch).apply
_LAST = (1 << 64) - 1


def make_identity(tensor: ManagedTensor) -> None:
    """Give ``tensor``, which is resident, the autograd identity that operators receive (tensors: [Note: identity])."""
    with torch.enable_grad():
        identity = _apply_fetch(tensor.parameter, tensor)
    # As for AccumulateGrad: hand the gradient over as soon as it is complete, not when its turn comes.
    identity.grad_fn._set_sequence_nr(_LAST)
    tensor.add_fetch_node(identity.grad_fn)
    tensor.identity = identity
    tensor.data = identity.detach()


# -- functions that are not operators ----------------------------------------------------------------

_Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _ask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Metadata, and functions that take parameters without computing with them: nothing moves."""
    return func(*args, **kwargs)


def _home_outside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies and conversions: outside a scope they are about home, whatever the other operand's device."""
    return _operator(func, args, kwargs) if _scope.depth else func(*args, **kwargs)


def _device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where the parameter is: at home, or on the compute device for those who ask while it computes."""
    if not _scope.depth:
        return func(*args, **kwargs)
    device = managed_of(args[0]).owner.device  # type: ignore[attr-defined]
    if func is torch.Tensor.device.__get__:  # type: ignore[attr-defined]
        return device
    if func is torch.Tensor.get_device:
        return device.index
    return device.type == _DEVICE_FLAGS[func]


def _get_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = managed_of(args[0])
    tensor.owner.wait_for_gradient(tensor)  # type: ignore[attr-defined]
    return func(*args, **kwargs)


def _set_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(args[0]) is ManagedParameter:
        tensor = managed_of(args[0])
        tensor.owner.wait_for_gradient(tensor)  # type: ignore[attr-defined]
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].device != tensor.home.device:
            # On the device this assignment would have been legal.
            args = (args[0], args[1].to(tensor.home.device))
        tensor.owner.gradient_set(tensor)  # type: ignore[attr-defined]
    return func(*args, **kwargs)


def _get_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = managed_of(args[0])
    if not _scope.depth:
        return tensor.data_alias()
    with substituted([tensor], func):
        return tensor.data


def _set_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(args[0]) is not ManagedParameter:  # other.data = p
        return func(args[0], args[1].detach())
    tensor = managed_of(args[0])
    with torch.no_grad():
        data = args[1].detach()
        if data.shape != tensor.home.shape or data.dtype != tensor.home.dtype:
            raise ManageError(
                f"{tensor.name}.data: a tensor of shape {tuple(data.shape)} and {data.dtype} cannot replace "
                f"{tuple(tensor.home.shape)} and {tensor.home.dtype} while managed: call manager.close() first"
            )
        tensor.owner.rebind_home(tensor, data.to(tensor.home.device))  # type: ignore[attr-defined]
    return None


class HomeHook:
    """A post-accumulate hook that sees its parameter and gradient at home, finished."""

    def __init__(self, inner: Callable[[torch.Tensor], None]) -> None:
        self.inner = inner

    def __call__(self, parameter: torch.Tensor) -> None:
        with plain():
            if type(parameter) is ManagedParameter:
                managed_of(parameter).owner.wait_for_gradient(managed_of(parameter))  # type: ignore[attr-defined]
            self.inner(parameter)


def _register_post_accumulate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hook = kwargs["hook"] if "hook" in kwargs else args[1]
    return func(args[0], HomeHook(hook))


_T = torch.Tensor


def _getters(*names: str) -> list[Any]:
    # Some attributes come and go with torch versions.
    return [getattr(_T, name).__get__ for name in names if hasattr(_T, name)]


def _setters(*names: str) -> list[Any]:
    return [getattr(_T, name).__set__ for name in names]


_DEVICE_FLAGS: dict[Any, str] = {
    _T.is_cuda.__get__: "cuda",  # type: ignore[attr-defined]
    _T.is_xpu.__get__: "xpu",  # type: ignore[attr-defined]
    _T.is_cpu.__get__: "cpu",  # type: ignore[attr-defined]
}

_ASK: list[Any] = [
    *_getters(
        *(
            "shape",
            "dtype",
            "layout",
            "ndim",
            "requires_grad",
            "is_leaf",
            "grad_fn",
            "_version",
            "itemsize",
            "nbytes",
        ),
        *(
            "is_sparse",
            "is_sparse_csr",
            "is_quantized",
            "is_meta",
            "is_mkldnn",
            "is_nested",
            "retains_grad",
            "names",
        ),
        *(
            "output_nr",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
            "_base",
            "volatile",
            "is_vulkan",
            "is_mtia",
        ),
        *("is_mps", "is_ipu", "is_maia", "name"),
    ),
    *_setters("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.stride, _T.storage_offset, _T.element_size),
    *(
        _T.is_contiguous,
        _T.is_floating_point,
        _T.is_complex,
        _T.is_signed,
        _T.is_inference,
        _T.is_conj,
        _T.is_neg,
    ),
    *(
        _T.is_pinned,
        _T.is_shared,
        _T.is_same_size,
        _T.dim_order,
        _T.requires_grad_,
        _T.register_hook,
        _T.__len__,
    ),
    *(
        _T.retain_grad,
        _T.__hash__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_same_size,
    ),
    *(torch.is_signed, torch.is_inference, torch.is_conj, torch.is_neg, _T.is_coalesced),
]

_HANDLERS: dict[Any, _Handler] = {
    **dict.fromkeys(_ASK, _ask),
    **dict.fromkeys([_T.copy_, _T.to, _T.cpu, _T.type], _home_outside),
    **dict.fromkeys([_T.device.__get__, _T.get_device, *_DEVICE_FLAGS], _device),  # type: ignore[attr-defined]
    **dict.fromkeys(_getters("grad", "_grad"), _get_grad),
    **dict.fromkeys([*_setters("grad", "_grad"), _T.grad.__delete__], _set_grad),  # type: ignore[attr-defined]
    _T.data.__get__: _get_data,  # type: ignore[attr-defined]
    _T.data.__set__: _set_data,  # type: ignore[attr-defined]
    **dict.fromkeys([torch.autograd.grad, torch.autograd.backward, _T.backward], _ask),
    _T.register_post_accumulate_grad_hook: _register_post_accumulate,
}
