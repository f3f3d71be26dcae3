"""How long a step takes under a plan, on a machine that need not be there: a deterministic event simulation.

Tasks on four servers (compute, the link's two directions, the host) with dependencies and memory; a roofline
that gives operators their times; and the lowering of parameter schedules. No torch, no traces: plain data.
"""

from hetero.simulate.machine import GTX_1080_TI, Link, Machine
from hetero.simulate.program import SERVERS, Program, ProgramBuilder, Server
from hetero.simulate.schedules import lower_schedule
from hetero.simulate.simulation import CAUSES, Cause, Timeline, simulate_program

__all__ = [
    "CAUSES",
    "GTX_1080_TI",
    "SERVERS",
    "Cause",
    "Link",
    "Machine",
    "Program",
    "ProgramBuilder",
    "Server",
    "Timeline",
    "lower_schedule",
    "simulate_program",
]
