"""Where in the training step an operator runs: its phase and its module.

Owns the global module and optimizer hooks during a recording (all removed on exit), the stack of running
modules and the map from autograd nodes to modules. Invariant: asking never changes the step. It knows no
storages; what it learns about parameters, gradients and optimizer states goes to the `label` function given
to it.

[Note: modules of backward operators] A node's sequence number is drawn before its forward kernels are
dispatched, so while an operator runs in forward the newest number belongs to its node. In backward the engine
tells the current node, and its number leads back to the module. AccumulateGrad nodes carry no number but
their variable.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from hetero.autograd import in_backward
from hetero.trace.steptrace import Kind, Phase

__all__ = ["Scopes"]

Label = Callable[[torch.Tensor, Kind, str], None]


class Scopes:
    """A context in which `phase` and `module` can be asked of the operator that is being dispatched."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._names: dict[torch.nn.Module, str] = {}
        self._parameter_names: dict[int, str] = {}
        self._running: list[str] = []
        self._depth_at_backward = 0
        self._optimizer = ""
        self._phase: Phase = "forward"
        self._module_of_node: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Scopes":
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._enter_optimizer),
            optimizer_hooks.register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_step(self) -> None:
        """A new step starts here: what comes before any module is called belongs to its forward."""
        self._phase = "forward"

    def learn_module(self, root: torch.nn.Module) -> None:
        """Take names from ``root``, and label its parameters and buffers."""
        prefix = f"{type(root).__name__}." if self._names else ""
        for name, child in root.named_modules():
            self._names.setdefault(child, prefix + name if name else type(root).__name__)
        for name, parameter in root.named_parameters():
            self._parameter_names.setdefault(id(parameter), prefix + name)
            self._label(parameter, "parameter", prefix + name)
        for name, buffer in root.named_buffers():
            self._label(buffer, "buffer", prefix + name)

    def learn_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the gradients and the states of an optimizer's parameters."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._parameter_names.get(id(parameter), "parameter")
                self._label(parameter, "parameter", name)
                if parameter.grad is not None:
                    self._label(parameter.grad, "gradient", f"{name}.grad")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        self._label(value, "state", f"{name}.{key}")

    def phase(self, *, differentiable: bool) -> Phase:
        """The phase of the operator now dispatched; ``differentiable``: an input requires a gradient.

        After a backward everything is `step` (clipping, the optimizer, clearing gradients) until a module is
        called or something differentiable is computed again.
        """
        if in_backward():
            if self._phase != "backward":
                self._depth_at_backward = len(self._running)
            self._phase = "backward"
        elif self._optimizer:
            self._phase = "step"
        elif self._running or (differentiable and torch.is_grad_enabled()):
            self._phase = "forward"
        elif self._phase == "backward":
            self._phase = "step"
        return self._phase

    def module(self) -> str:
        """The module of the operator now dispatched; call `phase` first."""
        if self._phase == "step":
            return self._optimizer
        running = self._running[-1] if self._running else ""
        if self._phase == "forward":
            # The first operator after a node was made is its own; later ones may make no node.
            self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, running)
            return running
        if len(self._running) > self._depth_at_backward:
            return running  # recomputation under activation checkpointing
        return self._module_of_current_node()

    def _module_of_current_node(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameter_names.get(id(variable), "").rpartition(".")[0]
        return self._module_of_node.get(node._sequence_nr(), "")

    def _enter_module(self, module: torch.nn.Module, inputs: object) -> None:
        if module not in self._names and not self._running:
            self.learn_module(module)
        self._running.append(self._names.get(module, type(module).__name__))

    def _leave_module(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        if self._running:
            self._running.pop()

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.learn_optimizer(optimizer)
        self._optimizer = type(optimizer).__name__

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimizer = ""
        self._module_of_node.clear()
        self.learn_optimizer(optimizer)
