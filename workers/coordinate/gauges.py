"""Power, use and memory of GPUs, and power of the host: what NVML and Linux's powercap tell. The coordinator asks.

    each second ─▶ read, of each rank's GPU ─▶ numbers for the next records of that rank

Powers are means since the last reading, from counters of energy: nothing in between is missed. What the driver, the
package or a permission does not give is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from workers.affinity import read_text

POWERCAP: Final = Path("/sys/class/powercap")

_log = logging.getLogger("coordinator")


class Gauges:
    """The readings of one machine."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._joules: dict[object, tuple[float, float]] = {}  # the last reading of each counter, and when it was
        zones = [
            path for path in sorted(powercap.glob("intel-rapl:*")) if read_text(path / "name").startswith("package")
        ]
        self._packages = [path for path in zones if _joules(path) is not None]  # AMD's have this name, too

    @cached_property
    def _nvml(self) -> Any:
        """The library, begun when the first GPU is asked about; None without it."""
        try:
            import pynvml

            pynvml.nvmlInit()
            return pynvml
        except ImportError:
            _log.info("power and use of the GPU are not recorded: pip install nvidia-ml-py")
        except Exception as error:  # the library's, of any kind
            _log.info("power and use of the GPU are not recorded: %s", error)
        return None

    def read(self, gpus: Iterable[str], now_s: float) -> dict[str, dict[str, float]]:
        """For each GPU, its numbers and the host's, as records have them; "" is none. `now_s` is monotonic."""
        of_host = self._of_host(now_s)
        return {gpu: {**self._of_gpu(gpu, now_s), **of_host} for gpu in set(gpus)}

    def _of_gpu(self, gpu: str, now_s: float) -> dict[str, float]:
        device = self._asked(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(gpu)) if gpu else None
        if device is None:
            return {}
        used = self._asked(lambda nvml: float(nvml.nvmlDeviceGetMemoryInfo(device).used))
        share = self._asked(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
        joules = self._asked(lambda nvml: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3)
        found = {"gpu_used_bytes": used, "gpu_utilization": share, "gpu_watts": self._watts(gpu, joules, now_s)}
        return {name: value for name, value in found.items() if value is not None}

    def _asked(self, question: Callable[[Any], Any]) -> Any:
        """NVML's answer; None where it gives none. A library that is not NVML's own is not asked again."""
        if self._nvml is None:
            return None
        try:
            return question(self._nvml)
        except self._nvml.NVMLError:
            return None
        except Exception as error:  # another package has the same name
            _log.info("power and use of the GPU are not recorded any more: %r", error)
            self._nvml = None
            return None

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
    try:
        return float(read_text(package / "energy_uj")) / 1e6
    except ValueError:
        return None
