"""Everything that touches hardware: memory counters, streams and copies, pinned memory, link speeds.

One code path on the generic ``torch.Stream``/``torch.Event`` interface serves CUDA, ROCm, XPU and the virtual
accelerator (`hetero.devices.virtual`). Nothing here knows what a parameter is.
"""

from hetero.devices.accelerator import (
    ALLOCATION_GRANULARITY,
    LARGEST_WITHOUT_EXCESS,
    MOST_EXCESS,
    Accelerator,
    default_device,
    named_device,
    norms_depend_on,
    rounds_as_host,
)
from hetero.devices.copies import CopyEngine, Wait
from hetero.devices.host import device_memory_free, host_memory_free, host_memory_total, host_memory_used
from hetero.devices.pinned import HostArena
from hetero.devices.probe import LinkSpeeds, probe_links
from hetero.devices.storage import bytes_of, fills_memory, has_no_gaps, storage_of

__all__ = [
    "ALLOCATION_GRANULARITY",
    "LARGEST_WITHOUT_EXCESS",
    "MOST_EXCESS",
    "Accelerator",
    "CopyEngine",
    "HostArena",
    "LinkSpeeds",
    "Wait",
    "bytes_of",
    "default_device",
    "device_memory_free",
    "fills_memory",
    "has_no_gaps",
    "host_memory_free",
    "host_memory_total",
    "host_memory_used",
    "named_device",
    "norms_depend_on",
    "probe_links",
    "rounds_as_host",
    "storage_of",
]
