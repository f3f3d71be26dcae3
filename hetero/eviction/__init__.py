"""Eviction planning: which device copies leave, and when transfers start. No torch in here."""

from hetero.eviction.bounds import lower_bound, lower_bound_seconds
from hetero.eviction.checker import check
from hetero.eviction.device_homes import HomeCost, HomeStep, choose_device_homes
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
from hetero.eviction.planner import plan
from hetero.eviction.policies import resolve_policy
from hetero.eviction.simulation import Simulation, simulate

__all__ = [
    "Actions",
    "Candidate",
    "CapacityError",
    "HomeCost",
    "HomeStep",
    "Links",
    "Moment",
    "Policy",
    "Schedule",
    "Send",
    "Simulation",
    "Trace",
    "Updates",
    "check",
    "choose_device_homes",
    "lower_bound",
    "lower_bound_seconds",
    "plan",
    "resolve_policy",
    "simulate",
]
