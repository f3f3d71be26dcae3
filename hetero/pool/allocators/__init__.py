"""Allocator simulators: what TensorFlow's BFC, PyTorch's CUDA caching allocator and CNMeM would reserve
for a trace.
"""

from hetero.pool.allocators.bfc import BfcAllocator
from hetero.pool.allocators.cnmem import CnmemAllocator
from hetero.pool.allocators.cuda_caching import CachingSettings, CudaCachingAllocator
from hetero.pool.allocators.events import AllocationEvent, events_of_problem
from hetero.pool.allocators.simulation import (
    Allocator,
    IterationAnalysis,
    Usage,
    analyse_iterations,
    simulate,
)

__all__ = [
    "AllocationEvent",
    "Allocator",
    "BfcAllocator",
    "CachingSettings",
    "CnmemAllocator",
    "CudaCachingAllocator",
    "IterationAnalysis",
    "Usage",
    "analyse_iterations",
    "events_of_problem",
    "simulate",
]
