"""Power and use of GPUs and host, from a made-up NVML and made-up counters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.coordinate.gauges import Gauges


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
    known = {"gpu_used_bytes": 5.0 * 2**30, "gpu_utilization": 0.83}
    assert gauges.read(["GPU-1"], 10.0) == {"GPU-1": known}, "one reading is no power yet"
    nvml.millijoules += 1200_000
    powered = {"GPU-1": known | {"gpu_watts": 600.0}, "GPU-2": {}, "": {}}
    assert gauges.read(["GPU-1", "", "GPU-1", "GPU-2"], 12.0) == powered, "two ranks may have one GPU"
    nvml.millijoules = 3  # the driver was loaded anew
    assert gauges.read(["GPU-1"], 13.0) == {"GPU-1": known}


def test_what_a_gpu_does_not_tell_is_left_out_alone(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: str) -> Any:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    gauges = Gauges(tmp_path)
    assert gauges.read(["GPU-1"], 10.0) == {"GPU-1": {"gpu_utilization": 0.83}}


def test_another_package_of_the_name_is_asked_once(nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py3 takes no UUID that is a str, and has no counter of energy."""
    asked = []

    def handle(uuid: str) -> str:
        asked.append(uuid)
        raise TypeError("bytes or integer address expected")

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", handle)
    gauges = Gauges(tmp_path)
    assert gauges.read(["GPU-1"], 1.0) == gauges.read(["GPU-1"], 2.0) == {"GPU-1": {}} and asked == ["GPU-1"]


@pytest.mark.parametrize("lacks", ["the package", "the driver", "nothing, but there is no GPU"])
def test_without_nvml_there_are_no_numbers(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Nvml()
    found.has_driver = lacks != "the driver"
    monkeypatch.setitem(sys.modules, "pynvml", None if lacks == "the package" else found)
    gauges = Gauges(tmp_path)
    gpu = "" if lacks.startswith("nothing") else "GPU-1"
    assert gauges.read([gpu], 1.0) == {gpu: {}}


def test_the_hosts_processors_are_added_up(tmp_path: Path) -> None:
    """Those whose counters can be read, each second once for all ranks. A counter may begin anew."""

    def zone(zone: str, name: str, microjoules: int | None) -> None:
        (tmp_path / zone).mkdir(exist_ok=True)
        (tmp_path / zone / "name").write_text(f"{name}\n")
        if microjoules is not None:
            (tmp_path / zone / "energy_uj").write_text(f"{microjoules}\n")

    def counters(*microjoules: int) -> None:
        for index, energy in enumerate(microjoules):
            zone(f"intel-rapl:{index}", f"package-{index}", energy)
            zone(f"intel-rapl:{index}:0", "core", energy)  # a part of it
        zone("intel-rapl:8", "psys", sum(microjoules))  # the whole machine
        zone("intel-rapl:9", "package-9", None)  # only for the administrator

    counters(5_000_000, 7_000_000)
    gauges = Gauges(tmp_path)
    assert gauges.read([""], 1.0) == {"": {}}
    counters(205_000_000, 57_000_000)
    found = gauges.read(["", "GPU-0"], 3.0)
    assert found[""] == found["GPU-0"] == {"host_watts": pytest.approx(125.0)}
    counters(0, 60_000_000)
    assert gauges.read([""], 4.0) == {"": {}}
    counters(10_000_000, 70_000_000)
    assert gauges.read([""], 5.0) == {"": {"host_watts": pytest.approx(20.0)}}
