"""`Plan`: what is going to happen in an iteration, as one frozen value.

Owns the user's view of a `hetero.stm.plans.plan.CyclePlan`: names in the place of indices.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table

from hetero.report.bounds import TimeBounds, bound_times
from hetero.report.text import ROWS, as_text
from hetero.stm import StatefulTensorMgr
from hetero.stm.plans.plan import CyclePlan
from hetero.stm.updates.kernels import GroupKernels
from hetero.stm.updates.optimizers import is_undeclared
from hetero.units import format_bytes, format_seconds

__all__ = ["Plan", "PlannedMoment", "describe_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMoment:
    """One operator on managed parameters, and what moves before it.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"step"``.
        uses: the parameters that it needs on the device.
        evicts: what leaves: copies of parameters, for nothing, and activations, by a copy. An activation is called by
            its number, in the order in which forward saves them: ``activation 3``.
        fetches: what starts on its way here: what this operator needs, then what later ones will.
        capacity_bytes: model data that the device may hold, what lives there not counted.
    """

    phase: str
    uses: tuple[str, ...]
    evicts: tuple[str, ...]
    fetches: tuple[str, ...]
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of the iteration that ran last. All sizes in bytes.

    Attributes:
        lives_on_device: parameters that live on the device with gradient and optimizer states, and are stepped there.
        lives_at_home: parameters that visit the device, and are stepped on the host.
        device_home_bytes: what the first of these take of the device.
        fetched_bytes: copies to the device in an iteration, activations that come back included; gradients of what
            lives at home come on top, going down.
        activation_bytes: of activations that leave, in an iteration.
        lower_bound_bytes: what any schedule would have to move under this budget, of these two together, with the same
            parameters on the device (interval linear program, Berger et al. 2018).
        host_kernels: of each of the optimizer's groups, how many of the parameters at home torch's fused kernels
            step, how many whatever else the group says, and whether the choice was ours, ``fused`` and ``foreach``
            being None. Empty for ``kept_step``.
        kept_step: the last step came by a method that somebody had kept before `hetero.manage` (``step =
            optimizer.step``): torch made it, at once and at home, with kernels of its own choice.
        undeclared_optimizer: the class of an optimizer that is stepped whole, at once and at home, because it is not
            torch's and does not say ``steps_parameters_independently``; else None.
        predicted_seconds: simulated time of the iteration, updates on the host included, by times measured where such
            a plan was followed (before that, by those of the first iterations).
        issue_seconds: of these, operators wait while the host issues transfers; 0 where it is ahead of the device.
        lower_bounds: what no schedule is faster than, by what would hold it up; ``seconds`` is the slowest of them.
        everything_fits: all parameters are ordinary ones on the device, with gradients and states, and nothing is
            intercepted; each forward of the model begins with one check of its inputs and of the memory in use.
        moments: what moves when.
    """

    lives_on_device: tuple[str, ...]
    lives_at_home: tuple[str, ...]
    device_home_bytes: int
    fetched_bytes: int
    activation_bytes: int
    lower_bound_bytes: int
    host_kernels: tuple[GroupKernels, ...]
    kept_step: bool
    undeclared_optimizer: str | None
    predicted_seconds: float
    issue_seconds: float
    lower_bounds: TimeBounds
    everything_fits: bool
    moments: tuple[PlannedMoment, ...]

    def to_dict(self) -> dict[str, object]:
        """The same as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        moving = [
            (index, moment) for index, moment in enumerate(self.moments) if moment.evicts or moment.fetches
        ]
        return as_text(self._summary(), *([_table(moving)] if moving else []))

    def _summary(self) -> Table:
        table = Table(show_header=False, box=None)
        if self.everything_fits:
            table.add_row("everything fits", "interception off")
        count = len(self.lives_on_device) + len(self.lives_at_home)
        table.add_row(
            "live on the device",
            f"{len(self.lives_on_device)} of {count} parameters, {format_bytes(self.device_home_bytes)} "
            "with gradients and optimizer states",
        )
        for index, kernels in enumerate(self.host_kernels):
            if not (kernels.fused or kernels.others):
                continue
            table.add_row(
                f"stepped at home, group {index}",
                f"{kernels.fused} by fused kernels{', chosen by hetero' if kernels.fused and kernels.chosen else ''}; "
                f"{kernels.others} by others",
            )
        if self.kept_step:
            table.add_row(
                "stepped at home",
                "at once, by torch: what is called was kept before hetero.manage; call optimizer.step instead",
            )
        if (name := self.undeclared_optimizer) is not None:
            table.add_row(
                "stepped whole, at home",
                f"if {name}'s step uses nothing but one parameter, its gradient, state and group at a time, say so "
                f"before hetero.manage: {name}.steps_parameters_independently = True",
            )
        table.add_row("fetched per iteration", format_bytes(self.fetched_bytes))
        table.add_row("activations that leave", format_bytes(self.activation_bytes))
        table.add_row("no schedule moves less", format_bytes(self.lower_bound_bytes))
        issue = (
            f", {format_seconds(self.issue_seconds)} of it to issue transfers" if self.issue_seconds else ""
        )
        table.add_row("predicted time", format_seconds(self.predicted_seconds) + issue)
        bounds = self.lower_bounds
        table.add_row(
            "no faster than",
            f"{format_seconds(bounds.seconds)}: operators {format_seconds(bounds.operators)}, with their copies "
            f"{format_seconds(bounds.copies)}, gradients down {format_seconds(bounds.gradients)}, host step "
            f"{format_seconds(bounds.host_step)}",
        )
        return table


def _table(moving: Sequence[tuple[int, PlannedMoment]]) -> Table:
    table = Table(title="What moves when", box=box.SIMPLE_HEAD)
    table.add_column("#", justify="right")
    for column in ("phase", "uses", "evicts", "fetches"):
        table.add_column(column, overflow="fold")
    table.add_column("capacity", justify="right")
    for index, moment in moving[:ROWS]:
        table.add_row(
            str(index),
            moment.phase,
            *(" ".join(names) for names in (moment.uses, moment.evicts, moment.fetches)),
            format_bytes(moment.capacity_bytes),
        )
    if len(moving) > ROWS:
        table.caption = f"{len(moving) - ROWS} more in plan.moments"
    return table


def describe_plan(
    stm: StatefulTensorMgr,
    kernels: Sequence[GroupKernels],
    *,
    optimizer: torch.optim.Optimizer | None,
    everything_fits: bool,
) -> Plan | None:
    """Of the last training iteration, or one like it; if none trains, of the last; None before there is a plan."""
    stm.close_books()
    plan = stm.plans.shown
    if plan is None:
        return None
    names = [tensor.name for tensor in stm.tensors]
    names += [f"activation {number}" for number in range(len(plan.trace.sizes) - len(names))]
    there = frozenset(t.index for t in stm.tensors) if everything_fits else frozenset(plan.device_homes)
    return Plan(
        lives_on_device=tuple(
            names[index] for index in (sorted(there) if everything_fits else plan.device_homes)
        ),
        lives_at_home=tuple(tensor.name for tensor in stm.tensors if tensor.index not in there),
        device_home_bytes=max(plan.home_bytes),
        fetched_bytes=plan.fetched_bytes,
        activation_bytes=plan.schedule.written_back_bytes,
        lower_bound_bytes=plan.least_bytes,
        host_kernels=() if stm.steps.are_kept else tuple(kernels),
        kept_step=stm.steps.are_kept,
        undeclared_optimizer=type(optimizer).__name__
        if optimizer is not None and is_undeclared(optimizer)
        else None,
        predicted_seconds=plan.schedule.predicted_seconds,
        issue_seconds=plan.schedule.issue_seconds,
        lower_bounds=bound_times(stm, plan),
        everything_fits=everything_fits,
        moments=tuple(_moment(plan, position, names, there) for position in range(len(plan.operands))),
    )


def _moment(plan: CyclePlan, position: int, names: list[str], there: frozenset[int]) -> PlannedMoment:
    actions = plan.schedule.actions[position]

    def of(indices: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(names[index] for index in indices if index not in there)

    return PlannedMoment(
        phase=plan.keys[bisect.bisect_right(plan.bounds, position) - 1].phase.value,
        uses=tuple(names[index] for index in plan.operands[position]),
        evicts=of(actions.evict),
        fetches=of(actions.fetch),
        capacity_bytes=plan.trace.moments[position].capacity,
    )
