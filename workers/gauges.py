"""Power, use and memory of GPUs, and power of the host: what NVML and Linux's powercap tell. The coordinator asks.

    LayerTable.gpu ─▶ watch ─┐
    each second ─────────────┴▶ read ─▶ numbers for the next records of that rank

Powers are means since the last reading, from counters of energy: nothing in between is missed. What the driver, the
package or a permission does not give is left out.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

POWERCAP: Final = Path("/sys/class/powercap")

_log = logging.getLogger("coordinator")


class Gauges:
    """The readings of one machine."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._nvml: Any = None
        self._joules: dict[object, tuple[float, float]] = {}  # the last reading of each counter, and when it was
        packages = (path for path in powercap.glob("intel-rapl:*") if path.name.count(":") == 1)  # AMD's, too
        self._packages = [path for path in sorted(packages) if _number(path / "energy_uj") is not None]

    def watch(self, gpu: str) -> None:
        """This GPU will be asked for, by its UUID."""
        if gpu and self._nvml is None:
            try:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            except ImportError:
                _log.info("power and use of the GPU are not recorded: pip install nvidia-ml-py")
            except Exception as error:  # the library's, of any kind
                _log.info("power and use of the GPU are not recorded: %s", error)

    def read(self, gpu: str, now_s: float) -> dict[str, float]:
        """The numbers of one GPU and of the host, as records have them. `now_s` is monotonic."""
        return {**self._of_gpu(gpu, now_s), **self._of_host(now_s)}

    def _of_gpu(self, gpu: str, now_s: float) -> dict[str, float]:
        nvml, found = self._nvml, dict[str, float]()
        if nvml is None or not gpu:
            return found
        with suppress(nvml.NVMLError):
            device = nvml.nvmlDeviceGetHandleByUUID(gpu)
            found["gpu_used_bytes"] = float(nvml.nvmlDeviceGetMemoryInfo(device).used)
            found["gpu_utilization"] = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            joules = nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
            if (watts := self._watts(gpu, joules, now_s)) is not None:
                found["gpu_watts"] = watts
        return found

    def _of_host(self, now_s: float) -> dict[str, float]:
        """The sum of all packages, unless one of them is not known."""
        watts = [self._watts(package, _joules(package), now_s) for package in self._packages]
        known = [one for one in watts if one is not None]
        return {"host_watts": sum(known)} if known and len(known) == len(watts) else {}

    def _watts(self, counter: object, joules: float | None, now_s: float) -> float | None:
        """The mean power since the counter's last reading; None if it has begun anew."""
        if joules is None:
            return None
        before, self._joules[counter] = self._joules.get(counter), (joules, now_s)
        if before is None or joules < before[0] or now_s <= before[1]:
            return None
        return (joules - before[0]) / (now_s - before[1])


def _joules(package: Path) -> float | None:
    microjoules = _number(package / "energy_uj")
    return None if microjoules is None else microjoules / 1e6


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
