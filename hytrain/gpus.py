"""GPUs by name, with what their vendor states: recipes compute the MFU with it, `doctor` forecasts a GPU's speed."""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Gpu(NamedTuple):
    """`tflops`: the dense bf16 peak, in TFLOP/s. Memory in GiB and in GB/s, the link to the host in GB/s each way.

    `is_desktop`: it is mostly in machines with two memory channels, not in servers.
    """

    tflops: float
    memory_gib: int
    memory_gbs: float
    link_gbs: float
    is_desktop: bool = False


#: Of a GPU's memory, what a CUDA context takes.
CONTEXT_BYTES: Final = 1 << 30
PCIE_4, PCIE_5, NVLINK_C2C = 31.5, 63.0, 450.0

GPUS: Final = {
    "B200": Gpu(2250.0, 180, 8000, PCIE_5),
    "H200": Gpu(989.0, 140, 4800, PCIE_5),
    "H100 PCIe": Gpu(756.0, 80, 2000, PCIE_5),
    "H100 NVL": Gpu(835.0, 94, 3900, PCIE_5),
    "H100": Gpu(989.0, 80, 3350, PCIE_5),
    "GH200": Gpu(989.0, 96, 4000, NVLINK_C2C),
    "H20": Gpu(148.0, 96, 4000, PCIE_5),
    "A100": Gpu(312.0, 80, 1935, PCIE_4),
    "A100 40GB": Gpu(312.0, 40, 1555, PCIE_4),
    "A800": Gpu(312.0, 80, 1935, PCIE_4),
    "A40": Gpu(150.0, 48, 696, PCIE_4),
    "A30": Gpu(165.0, 24, 933, PCIE_4),
    "A10G": Gpu(70.0, 24, 600, PCIE_4),
    "A10": Gpu(125.0, 24, 600, PCIE_4),
    "L40S": Gpu(362.0, 48, 864, PCIE_4),
    "L40": Gpu(181.0, 48, 864, PCIE_4),
    "L4": Gpu(121.0, 24, 300, PCIE_4),
    "RTX 6000 Ada": Gpu(364.0, 48, 960, PCIE_4, is_desktop=True),
    "RTX A6000": Gpu(155.0, 48, 768, PCIE_4, is_desktop=True),
    "RTX 5090": Gpu(210.0, 32, 1792, PCIE_5, is_desktop=True),
    "RTX 4090": Gpu(165.0, 24, 1008, PCIE_4, is_desktop=True),
    "RTX 4080": Gpu(97.0, 16, 717, PCIE_4, is_desktop=True),
    "RTX 3090": Gpu(71.0, 24, 936, PCIE_4, is_desktop=True),
}


def named(text: str) -> str | None:
    """The GPU of `GPUS` that a driver's or a person's words name: "NVIDIA H100 80GB HBM3", "rtx4090", "4090".

    The longest name of which the text has every word; else the only one that has every word of the text.
    """
    given = _words(text)
    if names := [name for name in GPUS if _words(name) <= given]:
        return max(names, key=len)
    meant = [name for name in GPUS if given and given <= _words(name)]
    return meant[0] if len(meant) == 1 else None


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+|\d+[a-z]*", text.lower()))
