"""`manage` and the `Manager` it returns: attaching to a model and optimizer, and letting go of them.

Owns what is changed on the user's objects and its undoing. Invariant: `manage` either succeeds or leaves
everything as it was; after `Manager.close` nothing shows that it was there.
"""

import warnings
from typing import Any

import torch
from torch import nn

from hetero import stm
from hetero.checks import check_budgets, check_manageable, check_step, named_parameters
from hetero.config import Config, Size, resolve
from hetero.devices import (
    ALLOCATION_GRANULARITY,
    Accelerator,
    HostArena,
    default_device,
    device_memory_free,
    host_memory_free,
    host_memory_total,
    named_device,
    probe_links,
)
from hetero.dropped import end_dropped, make_plain, weakly
from hetero.errors import ConfigError
from hetero.eviction import Policy, resolve_policy
from hetero.msc import unseen
from hetero.report import MemoryStats, Plan, collect_stats, describe_plan, plot_stats
from hetero.stm import patches
from hetero.stm.activations.slots import promised_bytes
from hetero.stm.interception.compiled import CompiledCalls
from hetero.stm.interception.functions import take_over
from hetero.stm.interception.parts import forget_model, note_model
from hetero.stm.interception.whereabouts import DeviceProperties
from hetero.stm.modelcalls import ModelCalls
from hetero.stm.running.staying import take_away_what_is_over
from hetero.stm.settled.state import Settled
from hetero.stm.settled.transition import Transition
from hetero.stm.step.hoststep import HostStep
from hetero.stm.tensors.aliases import aliased
from hetero.stm.updates.kernels import GroupKernels
from hetero.units import format_bytes, parse_budget

__all__ = ["Manager", "manage"]


def manage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    device_budget: Size | None = None,
    host_budget: Size | None = None,
    warmup_budget: float = 0.3,
    warmup_steps: int = 1,
    policy: str | Policy = "opt",
    prefetch: bool = True,
    pin_memory: bool | None = None,
    precision: torch.dtype | None = None,
    activations: bool = True,
    device_homes: bool = True,
    speculate: bool | None = None,
) -> "Manager":
    """Train ``model`` on a device that it does not fit on. In place; the training loop does not change.

    Parameters live at home in host memory and visit the device when an operator needs them; gradients leave as
    they are made; ``optimizer`` steps at home. The first iterations measure, later ones follow a plan.

    Args:
        model: any ``nn.Module``; on the host or on ``device``.
        optimizer: any ``torch.optim.Optimizer`` over its parameters; None to run forward only, or to consume
            the gradients (on the host) yourself.
        device: where operators run. Default: the machine's accelerator.
        device_budget: bytes of device memory that may be in use, activations included: an int, ``"20GiB"``,
            ``"80%"`` of the device, or a share as a float <= 1.0. Default: what is free; 80 % of all but
            128 MiB of it where the allocator leaves gaps, as on CUDA.
        host_budget: bytes of model data in host memory (homes, gradients, optimizer states, activations that have
            left, and what ``speculate`` copies), written likewise. Default: what is free under the machine's and the
            cgroup's limits, which all managers of the process share.
        warmup_budget: share of ``device_budget``, in (0, 1], that parameters may take before anything has been
            measured.
        warmup_steps: iterations to measure before planning, at least 1.
        policy: who leaves when room is needed: ``"opt"`` (farthest next use), ``"cost-opt"``, ``"lru"``,
            ``"fifo"`` or an object of `hetero.eviction.Policy`.
        prefetch: start copies before they are needed, beside compute.
        activations: tensors saved for backward may leave the device as well, where that costs least or nothing
            else fits.
        pin_memory: page-lock homes, so that copies run beside compute. Default: where the system allows it.
        precision: ``torch.bfloat16`` or ``torch.float16`` computes in it, with the numbers of FSDP2 (see below), and
            moves half the bytes of float32 parameters. Default None: in the parameters' own type.
        device_homes: where there is room, let parameters live on the device, with gradient and optimizer states, and
            step them there, as many as make the iteration shortest (`Manager.plan`). A device's kernels may round
            otherwise than the host's, and how many there are depends on measured speeds: False, or
            ``torch.use_deterministic_algorithms(True)``, steps everything at home.
        speculate: where updates at home take longer than the next forward can hide, begin them in backward, and undo
            them, bit for bit, if the step turns out different from what was assumed. Each such update first copies
            what it overwrites, so parameters and states are in host memory once more: by default as many as take half
            of what is left of ``host_budget``; True: all of it; False: never. Not for parameters that ``precision``
            casts.

    With ``precision``, a floating-point parameter keeps its type at home, for the optimizer, for clipping, in
    checkpoints and wherever it is used outside the model's forward; within forward and backward it, its gradient and
    what is computed from it are of ``precision``. So are the floating-point tensors among the arguments of the model's
    call; integer and complex parameters, buffers, the arguments of submodules and the model's output are not cast. The
    contributions of one backward to a gradient are added in ``precision``, those of several (micro-batches) in the
    parameter's own type. This is ``fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=precision,
    reduce_dtype=torch.float32))``, bit for bit. Writing to a parameter within the model's forward raises `ManageError`.
    It takes two more bytes of host memory a parameter. For float16 use ``torch.amp.GradScaler`` as usual.

    Returns:
        A `Manager`; also a context manager that closes itself.

    Raises:
        ConfigError: a keyword that cannot be used.
        DeviceError: no such accelerator.
        BudgetError: the model cannot be trained under these budgets, whatever the plan.
        ManageError: a model or optimizer that cannot be managed as it is.

    Source: Gemini (ColossalAI), PatrickStar.
    """
    accelerator = Accelerator(default_device() if device is None else named_device(device))
    config = resolve(
        device_budget=device_budget,
        host_budget=host_budget,
        warmup_budget=warmup_budget,
        warmup_steps=warmup_steps,
        prefetch=prefetch,
        pin_memory=pin_memory,
        precision=precision,
        activations=activations,
        device_homes=device_homes,
        speculate=speculate,
        device_total=accelerator.total_bytes(),
        device_free=lambda: accelerator.usable_of(device_memory_free(accelerator)),
        host_total=host_memory_total(),
        host_free=lambda: max(0, host_memory_free() - promised_bytes()),
    )
    eviction_policy = resolve_policy(policy)
    parameters = named_parameters(model)
    check_manageable(model, optimizer, parameters)
    states = 0 if optimizer is None else check_step(optimizer)
    home_bytes = check_budgets(model, optimizer, parameters, config, accelerator, states=states)
    with torch.inference_mode(False):  # homes outlive the caller's
        return Manager(model, optimizer, accelerator, config, eviction_policy, home_bytes)


class Manager:
    """A managed model. Made by `manage`.

    Attributes:
        device: where operators run.
        config: the resolved settings, sizes in bytes.
    """

    _is_attached = False  # of the class, for one that was never made

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        accelerator: Accelerator,
        config: Config,
        policy: Policy,
        home_bytes: int,
    ) -> None:
        self.device = accelerator.device
        self.config = config
        self._model = model
        self._optimizer = optimizer
        self._accelerator = accelerator
        self._closed = False
        self._compiled = CompiledCalls(model)
        self._patched = False
        self._properties = DeviceProperties(model)
        self._kernels: list[GroupKernels] = []  # these two for `plan` and `stats` when closed
        self._everything_fitted = False
        # The measurement keeps to the budget as well: what is in use already counts.
        room = max(config.device_budget - accelerator.used_bytes(), ALLOCATION_GRANULARITY)
        nbytes = max(min(16 << 20, room // 4), ALLOCATION_GRANULARITY)
        with unseen(accelerator):
            links = probe_links(accelerator, nbytes=nbytes, pin=config.pin_memory)
        arena = HostArena(accelerator, pin=config.pin_memory)
        self._homes = stm.Homes(arena)
        self._stm = stm.StatefulTensorMgr(
            accelerator,
            arena,
            config,
            policy,
            links,
            home_bytes=home_bytes,
            has_optimizer=optimizer is not None,
        )
        self._host_step: HostStep | None = None
        if optimizer is not None:
            self._host_step = HostStep(
                optimizer,
                self._stm,
                accelerator,
                note_states=weakly(self._take_optimizer_states),
                kept_ids=self._homes.kept_ids,
                uses_device=config.device_homes,
                speculates=config.speculate,
            )
        transition = Transition(
            self._stm,
            accelerator,
            config.device_budget,
            step=self._host_step,
            compiled=self._compiled,
            allowed=config.device_homes,
            rest=weakly(self._rest),
            wake=weakly(self._wake),
        )
        self._settled = Settled(transition)
        self._calls = ModelCalls(
            model,
            self._stm,
            self._settled,
            self._compiled,
            config,
            has_optimizer=optimizer is not None,
            keeps=self,
        )
        self._stm.note_part = weakly(self._calls.add_part)
        self._compiled.release, self._compiled.wrap = weakly(self._calls.unwrap), weakly(self._calls.wrap)
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        self._abandon = self._settled.abandonment()
        self._is_attached = True

    def __del__(self) -> None:
        if self._is_attached:
            end_dropped(self._stm, self._properties, self._abandon)

    # -- what users call ------------------------------------------------------------------------------

    @property
    def stats(self) -> MemoryStats:
        """Memory and traffic so far; a snapshot. Waits for what the last step left to be done, and raises what a queued
        update raised. After `close`: as they were then."""
        if not self._closed:
            self._stm.home_access.finish_updates()
        return collect_stats(
            self._stm,
            self._accelerator,
            self.config,
            settled_forwards=self._settled.forwards,
            everything_fits=self._everything_fits,
        )

    @property
    def plan(self) -> Plan | None:
        """Where parameters live, and what moves when, in iterations like the last one; a snapshot. None before there is
        a plan: the first iteration measures. After `close`: as it was then."""
        if self._host_step is not None and not self._closed:
            self._kernels = self._host_step.kernels
        return describe_plan(
            self._stm, self._kernels, optimizer=self._optimizer, everything_fits=self._everything_fits
        )

    def trim(self, device_budget: Size | None = None) -> int:
        """Give device memory back that later iterations do not need, so that other jobs can share the device.

        Copies that no operator uses leave, the allocator's cached blocks go back to the device, and plans are
        made anew for ``device_budget`` (default: what the present ones use, which costs no time). Below that,
        fewer copies stay and more bytes move; the numbers are the same. Works between iterations; before the
        first plan there is nothing to plan anew. The budget of `manage` stays the hard limit: on a device that
        several managers of one process share it is that of all of them together.

        Returns the bytes that the process has given back; after `close`, 0. Raises `ConfigError` for a budget above
        that of `manage`, `BudgetError` for one below what one operator needs, `ManageError` in a forked process.

        Source: the iteration-aware release that the analysis of TensorFlow's BFC allocator asks for.
        """
        self._stm.check_process()
        if self._closed:
            return 0
        if device_budget is None:
            return self._settled.trim() if self._settled.is_on else self._stm.trim(None)
        nbytes = parse_budget(device_budget, self._accelerator.total_bytes(), name="device_budget")
        if nbytes > self.config.device_budget:
            raise ConfigError(
                f"trim(device_budget={device_budget!r}) is above the budget of {self.config.device_budget} bytes "
                f"({format_bytes(self.config.device_budget)}) that manage() was given: trim only gives back"
            )
        return self._stm.trim(nbytes, goes_on=not self._settled.leave_soon())

    def plot(self, path: str) -> None:
        """Draw model and non-model data per period against the budget, as PNG, SVG or PDF by the name's ending.

        Raises `ConfigError` for another ending, where nothing can be written, and before an iteration has been
        measured."""
        plot_stats(self.stats, path)

    def close(self) -> None:
        """Give back plain parameters: same objects, present values, gradients and optimizer states, on the
        devices where they were before; states that there were not yet go where their parameter is. Closing twice does
        nothing.

        Raises what a queued update raised, when everything has been given back; `ManageError` where a backend cannot
        change a parameter's device because a graph that is still alive refers to it."""
        if self._closed:
            return
        self._stm.executor.between.take_from_caller()
        take_away_what_is_over()
        with torch.inference_mode(False):
            self._is_attached = False
            self._everything_fitted = self._settled.is_on
            self._settled.close()
            if self._host_step is not None:
                self._kernels = self._host_step.kernels
            self._stm.close()
            self._detach()
        self._closed = True
        self._stm.updates.raise_error()

    @property
    def _everything_fits(self) -> bool:
        return self._everything_fitted if self._closed else self._settled.is_on

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        # Copies and pickles of a managed model are plain models: one that the manager is kept in has None there.
        return _no_manager, ()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._stm.tensors)} parameters"
        return (
            f"<hetero.Manager of {type(self._model).__name__}: {state}, "
            f"{format_bytes(self.config.device_budget)} on {self.device}>"
        )

    # -- attaching ------------------------------------------------------------------------------------

    def _attach(self) -> None:
        model = self._model
        patches.install(self._stm.segments)
        self._patched = True
        parameters = named_parameters(model)
        self._stm.registry.expect_twins(parameter for _, parameter in parameters)
        if self._optimizer is not None:
            self._homes.note_states(self._optimizer, (parameter for _, parameter in parameters))
        if names := aliased(model, parameters):
            warnings.warn(
                f"{len(names)} of {len(parameters)} parameters share memory with tensors from before `manage` "
                f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): these follow no longer, nor does what "
                "is written to them reach the model, as after model.to(device). No harm unless they are used so: then "
                "take the alias (p.data, a view, an optimizer that keeps one) after `manage`",
                RuntimeWarning,
                stacklevel=4,
            )
        self._homes.take_parameters(parameters)
        for name, parameter in parameters:
            tensor = self._stm.registry.add_parameter(name, parameter, self._stm)
            take_over(parameter, tensor)
        for name, buffer in model.named_buffers():
            self._homes.take_tensor(name, buffer, self.device)
            self._stm.registry.add_buffer(name, buffer)
            self._stm.activations.leave_out(buffer)
        self._take_optimizer_states(returns=True)
        note_model(model)
        self._compiled.attach()  # before the model itself: its wrapper stays the outer one
        self._calls.wrap()
        self._properties.attach()
        if self._host_step is not None:
            self._host_step.attach()

    def _detach(self) -> None:
        self._calls.unwrap()
        self._properties.detach()
        self._compiled.detach()
        forget_model(self._model)
        if self._host_step is not None:
            self._host_step.detach()
        make_plain(self._stm)
        self._homes.give_back()
        if self._optimizer is not None:
            self._homes.send_states(self._optimizer)
        if self._patched:
            self._patched = False
            patches.remove(self._stm.segments)

    def _rest(self) -> None:
        """Everything fits: nothing is intercepted."""
        patches.rest(self._stm.segments)
        self._calls.rest()

    def _wake(self) -> None:
        """It does not any more."""
        patches.wake(self._stm.segments)
        self._calls.wake()

    def _take_optimizer_states(self, *, returns: bool = False) -> None:
        """Register states; those of our parameters that lie on the device (a resumed run) go home. ``returns``: and are
        to be there again when management ends."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        ours = {id(tensor.parameter): tensor.name for tensor in self._stm.tensors}
        states = []
        there = frozenset() if self._host_step is None else self._host_step.on_device
        for parameter, entries in list(dict.items(optimizer.state)):
            name = ours.get(id(parameter))
            if name is None or not isinstance(entries, dict):
                continue
            for key, value in list(entries.items()):
                if isinstance(value, torch.Tensor):
                    if name not in there:
                        self._homes.take_state(f"{name}.{key}", value, returns=returns)
                    states.append((f"{name}.{key}", value))
        self._stm.registry.set_states(states)
        self._homes.forget_states({id(state) for _, state in states})


def _no_manager() -> None:
    """What a copy of a `Manager` is."""
