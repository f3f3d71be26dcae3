"""What to do with functions that are not operators.

Owns the table `hetero.stm.interception.parameter.HANDLERS`: metadata moves nothing, ``p.grad`` waits, ``p.data`` is
watched, ``p.device`` is home, or the device for who asks while it computes. Importing this module fills the table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.errors import ManageError
from hetero.stm.interception.athome import run_at_home
from hetero.stm.interception.operators import run_operator, substituted
from hetero.stm.interception.parameter import HANDLERS, ManagedParameter, managed_of
from hetero.stm.interception.parts import computes_on
from hetero.stm.interception.scopes import at_home, computes, in_scope
from hetero.stm.tensors.fetch import plain
from hetero.stm.tensors.hostcopies import note_at_home
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["give_back", "take_over"]


def _ask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Metadata, and functions that take parameters without computing with them: nothing moves."""
    return func(*args, **kwargs)


def _is_there(parameter: ManagedParameter) -> bool:
    """As far as the caller can tell: it computes with parameters, or is called by itself."""
    return computes() or computes_on(managed_of(parameter).owner.device)


def _convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Conversions: about home outside a scope, but a checkpoint converts what it computes with."""
    is_ours = type(args[0]) is ManagedParameter
    there = _is_there(args[0]) if is_ours else computes()
    return run_operator(func, args, kwargs) if there else run_at_home(func, args, kwargs)


def _home_outside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies: outside a scope they are about home, whatever the other operand's device."""
    return run_operator(func, args, kwargs) if in_scope() else run_at_home(func, args, kwargs)


def _device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where the parameter is: at home, or on the compute device for those who ask while it computes."""
    if not _is_there(args[0]):
        return func(*args, **kwargs)
    device = managed_of(args[0]).owner.device
    if func == torch.Tensor.device.__get__:  # a new wrapper at each look: equal, not the same
        return device
    if func == torch.Tensor.get_device:
        return device.index
    return device.type == _DEVICE_FLAGS[func]


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The parameter's type and what follows from it: home's, or the copy's for those who ask while it computes."""
    low = managed_of(args[0]).low
    return func(*args, **kwargs) if low is None or not computes() else func(low.tensor, *args[1:], **kwargs)


def _gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``autograd.grad``: gradients of parameters are at home, or where whoever asks while it computes (an inner step
    within forward, a Function's backward) goes on with them."""
    found = func(*args, **kwargs)
    if not computes():
        for of in args[1]:
            if type(of) is ManagedParameter:
                _note_seen(managed_of(of))
        return found
    return tuple(
        value if value is None or type(of) is not ManagedParameter else _as_copy(value, managed_of(of))
        for value, of in zip(found, args[1], strict=True)
    )


def _as_copy(gradient: torch.Tensor, tensor: ManagedTensor) -> torch.Tensor:
    """As it was before it left, differentiably."""
    return gradient.to(tensor.owner.device).to(tensor.origin.dtype)


def _get_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].grad is not None:  # that there is none can be told without waiting
        tensor = managed_of(args[0])
        tensor.owner.gradient_access.wait(tensor)
        _note_seen(tensor)
        gradient = func(*args, **kwargs)
        if gradient is not None:
            note_at_home(gradient)
        return gradient
    return func(*args, **kwargs)


def _note_seen(tensor: ManagedTensor) -> None:
    """The user is given its gradient, at home."""
    if tensor.owner.settled is not None:
        tensor.owner.settled.onlookers.have_gradients = True


def _version(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = managed_of(args[0])
    tensor.owner.home_access.wait(tensor)
    return func(*args, **kwargs)


def _expose(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What gives away home's address: from then on it may be read in ways that nobody can see."""
    if not in_scope() and args and type(args[0]) is ManagedParameter:
        managed_of(args[0]).is_exposed = True
    return run_operator(func, args, kwargs)


def _set_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(args[0]) is ManagedParameter:
        tensor = managed_of(args[0])
        if len(args) == 1 or args[1] is None:
            tensor.owner.gradient_access.drop(tensor)
            return None
        tensor.owner.gradient_access.wait(tensor)
        if isinstance(args[1], torch.Tensor) and args[1].device != tensor.home.device:
            # On the device this assignment would have been legal.
            args = (args[0], args[1].to(tensor.home.device))
        tensor.owner.gradient_access.replace(tensor, args[1])
    return func(*args, **kwargs)


def _get_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = managed_of(args[0])
    if not in_scope():
        tensor.owner.home_access.give_out(tensor)
        if tensor.owner.settled is not None:
            tensor.owner.settled.onlookers.note_look()
        return tensor.clock.data_alias()
    with substituted([tensor], func):
        assert tensor.data is not None
        # A tensor of its own, so that it counts as a holder; same version counter, so that writes are seen.
        return tensor.data.detach()


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
        tensor.owner.home_access.rebind(
            tensor, data.to(tensor.home.device), is_inference=args[1].is_inference()
        )
    return None


def take_over(parameter: nn.Parameter, tensor: ManagedTensor) -> None:
    """From now on ``parameter`` is intercepted, ``tensor`` being what is known of it."""
    parameter.__class__ = ManagedParameter
    parameter.__dict__["_hetero"] = tensor
    with plain():
        for hooks in _hooks_of(parameter):
            for key, hook in list(hooks.items()):
                if not isinstance(hook, HomeHook):
                    hooks[key] = HomeHook(hook)


def give_back(parameter: nn.Parameter) -> None:
    """It is an ordinary one again, wherever its bytes are."""
    with plain():
        for hooks in _hooks_of(parameter):
            for key, hook in list(hooks.items()):
                if isinstance(hook, HomeHook):
                    hooks[key] = hook.inner
        parameter.__class__ = nn.Parameter
        parameter.__dict__.pop("_hetero", None)


def _hooks_of(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """By id of their handles."""
    return [hooks for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if hooks]


class HomeHook:
    """A parameter's hook, which finds parameters at home: where its gradient is, if it is given that, or its parameter
    with the gradient, finished, after accumulation. What it does is intercepted: nobody else would see a step that it
    makes through ``p.data``."""

    def __init__(self, inner: Callable[[torch.Tensor], Any]) -> None:
        self.inner = inner

    def __call__(self, given: torch.Tensor) -> Any:
        if type(given) is ManagedParameter:
            tensor = managed_of(given)
            tensor.owner.gradient_access.wait(tensor)
            _note_seen(tensor)
        with at_home():
            return self.inner(given)


def _register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hook = kwargs["hook"] if "hook" in kwargs else args[1]
    return func(args[0], HomeHook(hook))


# Any: typing knows attributes of tensors, not the descriptors behind them.
_T: Any = torch.Tensor


def _getters(*names: str) -> list[Any]:
    # Some attributes come and go with torch versions.
    return [getattr(_T, name).__get__ for name in names if hasattr(_T, name)]


def _setters(*names: str) -> list[Any]:
    return [getattr(_T, name).__set__ for name in names]


_DEVICE_FLAGS: dict[Any, str] = {
    _T.is_cuda.__get__: "cuda",
    _T.is_xpu.__get__: "xpu",
    _T.is_cpu.__get__: "cpu",
}

_ASK: list[Any] = [
    *_getters(
        *(
            "shape",
            "layout",
            "ndim",
            "requires_grad",
            "is_leaf",
            "grad_fn",
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
        *("is_mps", "is_ipu", "is_maia", "name", "grad_dtype"),
    ),
    *_setters("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype"),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.stride, _T.storage_offset),
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

HANDLERS.update(
    {
        **dict.fromkeys(_ASK, _ask),
        **dict.fromkeys([*_getters("dtype", "itemsize", "nbytes"), _T.element_size], _type),
        **dict.fromkeys([_T.copy_, _T.cpu], _home_outside),
        **dict.fromkeys([_T.to, _T.type], _convert),
        **dict.fromkeys([_T.device.__get__, _T.get_device, *_DEVICE_FLAGS], _device),
        **dict.fromkeys(_getters("grad", "_grad"), _get_grad),
        **dict.fromkeys(_getters("_version"), _version),
        **dict.fromkeys([_T.data_ptr, _T.__dlpack__, _T.storage, _T.untyped_storage], _expose),
        **dict.fromkeys([*_setters("grad", "_grad"), _T.grad.__delete__], _set_grad),
        _T.data.__get__: _get_data,
        _T.data.__set__: _set_data,
        **dict.fromkeys([torch.autograd.backward, _T.backward], _ask),
        torch.autograd.grad: _gradients,
        **dict.fromkeys([_T.register_hook, _T.register_post_accumulate_grad_hook], _register_hook),
    }
)
