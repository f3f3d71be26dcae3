"""How fast the links are: bandwidth and latency in each direction, measured.

Owns the measurement. Leaves nothing allocated.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from hetero.devices.accelerator import Accelerator
from hetero.devices.copies import CopyEngine
from hetero.devices.pinned import HostArena
from hetero.units import format_rate, format_seconds

__all__ = ["LinkSpeeds", "probe_links"]

_REPEATS = 5
_SMALL_NBYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Bandwidths in bytes per second, latency in seconds per copy."""

    h2d_bandwidth: float
    d2h_bandwidth: float
    latency: float

    def __str__(self) -> str:
        return (
            f"host to device {format_rate(self.h2d_bandwidth)}, device to host {format_rate(self.d2h_bandwidth)}, "
            f"{format_seconds(self.latency)} a copy"
        )


def probe_links(accelerator: Accelerator, *, nbytes: int = 16 << 20, pin: bool = True) -> LinkSpeeds:
    """Copy ``nbytes`` and a small block each way, a few times, and take medians.

    Uses ``nbytes`` of device memory while it runs.
    """
    engine = CopyEngine(accelerator)
    arena = HostArena(accelerator, pin=pin)
    small = min(_SMALL_NBYTES, max(1, nbytes // 16))
    arena.expect(nbytes)
    host = arena.empty_strided((nbytes,), (1,), torch.uint8).zero_()
    device = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
    device.zero_()
    up_small, up = (_time(engine, accelerator, host[:n], device[:n], up=True) for n in (small, nbytes))
    down_small, down = (_time(engine, accelerator, host[:n], device[:n], up=False) for n in (small, nbytes))
    # Two sizes give slope and intercept. Noise can make the small copy the slower one: then call it all bandwidth.
    span = nbytes - small
    return LinkSpeeds(
        h2d_bandwidth=span / (up - up_small) if up > up_small else nbytes / up,
        d2h_bandwidth=span / (down - down_small) if down > down_small else nbytes / down,
        latency=min(up_small, down_small),
    )


def _time(
    engine: CopyEngine, accelerator: Accelerator, host: torch.Tensor, device: torch.Tensor, *, up: bool
) -> float:
    samples = []
    for _ in range(_REPEATS):
        accelerator.synchronize()
        begin = time.perf_counter()
        event = engine.upload(host, device) if up else engine.download(device, host)
        event.synchronize()
        samples.append(time.perf_counter() - begin)
        (engine.compute_after_upload if up else engine.free_after_download)(event)
    return statistics.median(samples)
