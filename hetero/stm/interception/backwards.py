"""Every backward of the process, announced.

Owns ``autograd._engine_run_backward`` while models are managed, through which ``backward`` and ``grad`` go: nothing
else tells when a backward begins, ends, or fails; and who hears of them.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hetero.autograd import in_backward
from hetero.errors import DeviceError, ManageError
from hetero.stm.activations.saved import part_saved_as_handles
from hetero.stm.interception.onethread import await_device_thread, run_on_device_thread
from hetero.stm.interception.parts import look_again
from hetero.stm.interception.transforms import is_transforming
from hetero.stm.running import guard
from hetero.stm.running.segments import Segments

__all__ = ["REPLACEMENTS", "listeners", "note_nested"]

_autograd: Any = torch.autograd
_run_backward = _autograd._engine_run_backward
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE
_PLACED_OTHERWISE = re.compile("returned an invalid gradient at index .* expected device cpu but got")
_APPLY_WAS_TAKEN = (
    "hetero: of a custom Function that is given parameters? Since torch 2.15 an apply that was taken out of its class "
    "(f = MyFunction.apply) is called without hetero's knowing, and gets parameters as they are at home: call "
    "MyFunction.apply(...)"
)
_NO_THREAD = "device_ready_queues_"  # of an assertion within torch's engine, which says no more

listeners: list[Segments] = []
"""Of the managers that do not rest; `hetero.stm.patches` adds and removes them."""


def note_nested() -> None:
    """A backward begins another within, or is about to: a reentrant checkpoint, an adjoint."""
    for listener in tuple(listeners):
        listener.nest = True


class _Asked(NamedTuple):
    """``captures``: gradients are returned; ``inputs``: what they are asked of, nothing: all that is reached."""

    keeps_graph: bool
    is_recorded: bool
    inputs: Sequence[Any]
    captures: bool


def _asked(
    gradients: Any = None,
    keep_graph: Any = False,
    create_graph: Any = False,
    inputs: Sequence[Any] = (),
    *args: Any,
    accumulate_grad: bool = True,
    **kwargs: Any,
) -> _Asked:
    """What torch's engine is asked with these arguments."""
    return _Asked(bool(keep_graph), bool(create_graph), inputs, not accumulate_grad)


def _announced(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    # A compiler's, of tensors without values.
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return _run_backward(outputs, *args, **kwargs)
    # One of a transform's reaches nothing of ours, and nothing of ours can be copied within it.
    if is_transforming():
        return _run(outputs, args, kwargs)
    asked = _asked(*args, **kwargs)
    hearing = tuple(listeners)  # Python's collector may let go of one in between
    # A backward within a backward: a reentrant checkpoint, an adjoint.
    if in_backward():
        note_nested()
        with contextlib.ExitStack() as stack:
            for listener in hearing:
                stack.enter_context(listener.backward_within())
                if asked.captures:
                    stack.enter_context(listener.capture_within())
            return _run(outputs, args, kwargs)
    look_again()
    _refuse_compiled(hearing)
    with contextlib.ExitStack() as stack:
        for listener in hearing:  # before the first of them looks at what there is on the device
            listener.prepare_backward()
        for listener in hearing:
            stack.enter_context(
                listener.backward(captures=asked.captures, keeps_graph=asked.keeps_graph, inputs=asked.inputs)
            )
        try:
            for listener in hearing:
                # One that is recorded numbers nodes at home as well, by whatever thread they run on.
                records = asked.is_recorded and _begins_on(listener.device, outputs)
                if records or listener.need_one_thread:
                    with _explained():
                        return run_on_device_thread(
                            listener.device, lambda: _run(outputs, args, kwargs), captures=asked.captures
                        )
            return _run(outputs, args, kwargs)
        except BaseException:
            for device in {listener.device for listener in hearing}:
                await_device_thread(device)
            raise


def _refuse_compiled(hearing: Iterable[Segments]) -> None:
    """Raises `ManageError` for a backward that a model waits for: Dynamo would trace it with all that is ours in it."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if (
        compiled is not None
        and compiled.compiled_autograd_enabled
        and any(listener.awaits_backward for listener in hearing)
    ):
        raise ManageError(
            "compiled autograd is on in the backward of a managed model, of which it would make one region, with all "
            "parameters and gradients at once: call backward() outside of it; what blocks of the model compile "
            "(block.compile()) stays compiled in backward without it"
        )


def _run(outputs: Any, args: Any, kwargs: Any) -> Any:
    # autograd.grad with respect to managed parameters comes here with interception off, and its threads inherit that;
    # but what runs within backward (a checkpoint's recompute, a Function of the user's) needs it.
    # What a backward saves that is recorded itself leaves as what a forward saves does.
    saving = part_saved_as_handles() if _asked(*args, **kwargs).is_recorded else contextlib.nullcontext()
    with torch._C._EnableTorchFunction(), guard.formulas_kept(outputs), saving, _explained():
        return _run_backward(outputs, *args, **kwargs)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if _PLACED_OTHERWISE.search(str(error)):
            error.add_note(_APPLY_WAS_TAKEN)
        if _NO_THREAD in str(error):
            raise DeviceError(
                "autograd has no thread for this device, because it came after the process's first backward: make "
                "it (hetero.virtual_device()) before anything is trained, in a fresh process"
            ) from error
        raise


def _begins_on(device: torch.device, outputs: Iterable[Any]) -> bool:
    """A backward from ``outputs`` (tensors or gradient edges) does."""
    return any(
        output.device == device
        if isinstance(output, torch.Tensor)
        else output.node._input_metadata[output.output_nr].device == device
        for output in outputs
    )


REPLACEMENTS: list[tuple[Any, str, Any]] = [(_autograd, "_engine_run_backward", _announced)]
"""As `hetero.stm.patches` wants them."""
