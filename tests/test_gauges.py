"""Power and use of GPUs and host, from a made-up NVML and made-up counters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.gauges import Gauges


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """One GPU, "GPU-1", that has used so many millijoules."""

    NVMLError = NVMLError
    millijoules, has_driver = 1000, True

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=83)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:  # noqa: N802
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_power_is_the_energy_since_the_last_reading(nvml: Nvml, tmp_path: Path) -> None:
    gauges = Gauges(tmp_path)
    gauges.watch("GPU-1")
    known = {"gpu_used_bytes": 5.0 * 2**30, "gpu_utilization": 0.83}
    assert gauges.read("GPU-1", 10.0) == known, "one reading is no power yet"
    nvml.millijoules += 1200_000
    assert gauges.read("GPU-1", 12.0) == known | {"gpu_watts": 600.0}
    nvml.millijoules = 3  # the driver was loaded anew
    assert gauges.read("GPU-1", 13.0) == known
    assert gauges.read("GPU-2", 14.0) == gauges.read("", 14.0) == {}


@pytest.mark.parametrize("lacks", ["the package", "the driver", "nothing, but there is no GPU"])
def test_without_nvml_there_are_no_numbers(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Nvml()
    found.has_driver = lacks != "the driver"
    monkeypatch.setitem(sys.modules, "pynvml", None if lacks == "the package" else found)
    gauges = Gauges(tmp_path)
    gauges.watch("" if lacks.startswith("nothing") else "GPU-1")
    assert gauges.read("GPU-1", 1.0) == {}


def test_the_hosts_processors_are_added_up(tmp_path: Path) -> None:
    """Those whose counters can be read; parts of them, such as cores, are theirs. A counter may begin anew."""

    def counters(*microjoules: int) -> None:
        for index, energy in enumerate(microjoules):
            for name in (f"intel-rapl:{index}", f"intel-rapl:{index}:0"):
                (tmp_path / name).mkdir(exist_ok=True)
                (tmp_path / name / "energy_uj").write_text(f"{energy}\n")

    (tmp_path / "intel-rapl:9").mkdir()  # with a counter that is only for the administrator
    counters(5_000_000, 7_000_000)
    gauges = Gauges(tmp_path)
    assert gauges.read("", 1.0) == {}
    counters(205_000_000, 57_000_000)
    assert gauges.read("", 3.0) == {"host_watts": pytest.approx(125.0)}
    counters(0, 60_000_000)
    assert gauges.read("", 4.0) == {}
    counters(10_000_000, 70_000_000)
    assert gauges.read("", 5.0) == {"host_watts": pytest.approx(20.0)}
