"""Machines by name: published peak figures of devices, and the link that they are mostly used with.

Owns the figures. Floating-point operations a second are those of dense matrix products in bfloat16 (float16 where there
is no bfloat16) with sums in float32, by the vendor's data sheets; a step in float32 without TF32 is slower. Links are
what large pinned copies reach: about 12, 25 and 50 GB/s for 16 lanes of PCIe 3, 4 and 5.
"""

from dataclasses import dataclass

from hetero.simulate import Link, Machine

__all__ = ["MACHINES", "KnownMachine"]

_LATENCY = 10e-6
_PCIE_3, _PCIE_4, _PCIE_5 = 12e9, 25e9, 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMachine:
    """A device of ``memory_bytes``, and how fast it and its link are."""

    machine: Machine
    memory_bytes: int


def _known(name: str, gib: int, tflops: float, bandwidth: float, link: float) -> KnownMachine:
    """``bandwidth``: of the device's memory, GB/s; ``link``: bytes a second, each way."""
    way = Link.of_bandwidth(link, latency=_LATENCY)
    return KnownMachine(
        machine=Machine(name=name, flops=tflops * 1e12, memory_bandwidth=bandwidth * 1e9, h2d=way, d2h=way),
        memory_bytes=gib << 30,
    )


MACHINES: dict[str, KnownMachine] = {
    "t4": _known("Tesla T4", 16, 65, 320, _PCIE_3),
    "l4": _known("L4", 24, 121, 300, _PCIE_4),
    "rtx3090": _known("GeForce RTX 3090", 24, 71, 936, _PCIE_4),
    "rtx4090": _known("GeForce RTX 4090", 24, 165, 1008, _PCIE_4),
    "rtx5090": _known("GeForce RTX 5090", 32, 209, 1792, _PCIE_5),
    "a100-40": _known("A100 40 GB", 40, 312, 1555, _PCIE_4),
    "a100-80": _known("A100 80 GB", 80, 312, 1935, _PCIE_4),
    "h100": _known("H100 SXM", 80, 989, 3350, _PCIE_5),
    "h200": _known("H200", 141, 989, 4800, _PCIE_5),
}
"""By the name that ``hetero plan --machine`` takes."""
