"""Eviction planning: which device copies leave, and when transfers start. No torch in here."""

from hetero.eviction.between import leave_link_free
from hetero.eviction.bounds import lower_bound, lower_bound_seconds
from hetero.eviction.checker import check
from hetero.eviction.competition import compete
from hetero.eviction.device_homes import HomeCost, HomeStep, choose_device_homes
from hetero.eviction.iteration import host_bytes, plan_iteration, with_alive
from hetero.eviction.model import (
    Actions,
    Candidate,
    CapacityError,
    Links,
    Moment,
    Policy,
    Schedule,
    Send,
    Trace,
    Updates,
)
from hetero.eviction.placement import Placement, choose_placement
from hetero.eviction.places import choose_places, renewable, spare_bytes, without_places
from hetero.eviction.planner import plan
from hetero.eviction.policies import resolve_policy
from hetero.eviction.sends import OnTheirWay, gradient_reserves, on_their_way
from hetero.eviction.simulation import Simulation, simulate

__all__ = [
    "Actions",
    "Candidate",
    "CapacityError",
    "HomeCost",
    "HomeStep",
    "Links",
    "Moment",
    "OnTheirWay",
    "Placement",
    "Policy",
    "Schedule",
    "Send",
    "Simulation",
    "Trace",
    "Updates",
    "check",
    "choose_device_homes",
    "choose_placement",
    "choose_places",
    "compete",
    "gradient_reserves",
    "host_bytes",
    "leave_link_free",
    "lower_bound",
    "lower_bound_seconds",
    "on_their_way",
    "plan",
    "plan_iteration",
    "renewable",
    "resolve_policy",
    "simulate",
    "spare_bytes",
    "with_alive",
    "without_places",
]
