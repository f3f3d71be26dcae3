"""What becomes of the parameters: each exchanges its implementation for one on the device, and back.

Owns the implementations that wait at home meanwhile (`hetero.stm.settled.exchange`).
"""

import gc
from collections.abc import Sequence

import torch
from torch import nn

from hetero.devices import Accelerator, fills_memory
from hetero.stm.copies.residency import Residency
from hetero.stm.gradients.kept import KeptGradients
from hetero.stm.interception.functions import give_back, take_over
from hetero.stm.settled.exchange import exchange, is_like, let_go, redirect
from hetero.stm.settled.who import forget, note
from hetero.stm.tensors.inference import make_inference, make_ordinary
from hetero.stm.tensors.managed import ManagedTensor

__all__ = ["OwnParameters"]


class OwnParameters:
    """Of one manager. `exchange_all`, then `give_back_all`; `take_back_all` at the end."""

    def __init__(
        self,
        tensors: Sequence[ManagedTensor],
        residency: Residency,
        kept: KeptGradients,
        accelerator: Accelerator,
    ) -> None:
        self._tensors = tensors
        self._residency = residency
        self._kept = kept
        self._accelerator = accelerator
        self._shadows: list[nn.Parameter] = []
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        # Of each parameter: its version for autograd before, and its own when it settled.
        self._versions: list[tuple[int, int]] = []

    def exchange_all(self) -> bool:
        """Each has the device copy's implementation; False, and all is as before, if somebody stands against it."""
        self._shadows, self._versions = [], []
        try:  # now, because whoever leaves may do so for want of memory
            for tensor in self._tensors:
                self._placeholder(tensor.parameter.dtype)
        except torch.OutOfMemoryError:
            self._accelerator.note_answered()
            return False
        for tensor in self._tensors:
            version = tensor.version
            tensor.cast = None
            data = tensor.data
            assert data is not None
            self._shadows.append(nn.Parameter(data.detach(), tensor.parameter.requires_grad))
            self._versions.append((version, self._shadows[-1]._version))
            if tensor.is_inference:
                make_inference(self._shadows[-1])
            del data
        pairs = [
            (tensor.parameter, shadow) for tensor, shadow in zip(self._tensors, self._shadows, strict=True)
        ]
        if not _exchange_pairs(pairs):
            self._shadows = []
            return False
        return True

    def give_back_all(self) -> None:
        """They are the user's: nothing of ours is asked about them."""
        for tensor, shadow in zip(self._tensors, self._shadows, strict=True):
            self._residency.lend(tensor)
            give_back(tensor.parameter)
            note(tensor)
            make_ordinary(shadow)  # as long as it waits: torch finds no end of a graph in an inference tensor
            redirect(shadow, tensor)

    def exchange_back(self, *, force: bool) -> bool:
        """Each has home's implementation again; False, and all is as before, if somebody stands against it. ``force``:
        such a parameter then keeps the one it has, with bytes of its own on the host."""
        self._give_own_memory()
        pairs = [
            (tensor.parameter, shadow)
            for tensor, shadow in zip(self._tensors, self._shadows, strict=True)
            # Else ``p.data`` was set; only close() comes here then.
            if is_like(tensor.parameter, tensor.home, self._accelerator.device)
        ]
        if _exchange_pairs(pairs):
            return True
        gc.collect()  # they may be garbage, in cycles: a profiler's results
        if _exchange_pairs(pairs):
            return True
        if force:
            for pair in pairs:
                if not _exchange_pairs([pair]):
                    parameter, gradient = pair[0], pair[0].grad
                    parameter.grad = None
                    parameter.data = parameter.detach().cpu()
                    parameter.grad = None if gradient is None else gradient.cpu()
        return force

    def take_back_all(self, *, amid: bool) -> None:
        """After `exchange_back`: they are at home, as far as that is known; what has been written is on the device.
        ``amid``: an operator may have been given one of them."""
        for tensor, shadow in zip(self._tensors, self._shadows, strict=True):
            self._take_back(tensor, shadow, amid=amid)
        self._shadows, self._versions = [], []

    def version(self, tensor: ManagedTensor) -> int:
        """`ManagedTensor.version`, as graphs from before know it."""
        before, then = self._versions[tensor.index]
        return before + tensor.parameter._version - then

    def close(self) -> None:
        """Management ends."""
        self._placeholders.clear()

    def abandon(self) -> None:
        """They are dropped."""
        for tensor in self._tensors:
            forget(tensor)
        self._shadows = []  # whose hooks hold parameters where Python's collector cannot see it

    # -- helpers --------------------------------------------------------------------------------------

    def _give_own_memory(self) -> None:
        """To those that lie in one with others (``vector_to_parameters``, ``p.data = flat[i:j]``): a copy on the device
        is known by its memory. By way of home, which is behind, so that the device never holds more than before."""
        tensors = [
            tensor
            for tensor in self._tensors
            if is_like(tensor.parameter, tensor.home, self._accelerator.device)
            and not fills_memory(tensor.parameter)
        ]
        homes = [tensor.home.data for tensor in tensors]  # whose versions are not those that graphs know
        for tensor, home in zip(tensors, homes, strict=True):
            home.copy_(tensor.parameter)
        for tensor in tensors:
            parameter = tensor.parameter
            parameter.data = self._placeholder(parameter.dtype).expand(parameter.shape)
        for tensor, home in zip(tensors, homes, strict=True):
            tensor.parameter.data = home.to(self._accelerator.device)

    def _take_back(self, tensor: ManagedTensor, shadow: nn.Parameter, *, amid: bool) -> None:
        parameter = tensor.parameter
        forget(tensor)
        if not is_like(shadow, tensor.home, self._accelerator.device):
            return  # it was not exchanged
        tensor.is_inference = shadow.is_inference()
        make_ordinary(shadow)
        gradient, shadow.grad = shadow.grad, None
        version = shadow._version
        parameter.requires_grad_(shadow.requires_grad)
        if tensor.is_inference:
            make_inference(parameter)
        take_over(parameter, tensor)
        written = tensor.stays or version != self._versions[tensor.index][1]
        self._residency.take_back(tensor, shadow.detach())
        if written:  # home does not have its bytes
            tensor.clean_version -= 1
        tensor.may_be_ahead = not written  # through ``p.data``, which is nothing of ours meanwhile
        if gradient is not None:
            self._kept.adopt(tensor, gradient)
        redirect(shadow, tensor)
        if not amid:  # else an operator may have been given it
            let_go(shadow, self._placeholder(shadow.dtype))

    def _placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.empty((), dtype=dtype, device=self._accelerator.device)
        return self._placeholders[dtype]


def _exchange_pairs(pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> bool:
    """All of them; False, and none, where somebody has a weak reference to an implementation (a profiler that records
    shapes has)."""
    for number, (parameter, shadow) in enumerate(pairs):
        try:
            exchange(parameter, shadow)
        except RuntimeError:
            for done, other in pairs[:number]:
                exchange(done, other)
            return False
    return True
