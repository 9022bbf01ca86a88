"""How much host memory is left, as control groups see it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hytrain.memory import host as host_memory

V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the kernel's: `membership`, and the groups' folders below `groups`."""
    (tmp_path / "groups").mkdir()
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def group(tree: Path, path: str, names: tuple[str, str], limit: str, in_use: int, statistics: str = "") -> None:
    folder = tree / "groups" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, str(in_use), statistics), strict=True):
        (folder / name).write_text(text + "\n")


def test_the_tightest_of_the_groups_above_counts(tree: Path) -> None:
    assert host_memory.left_in_groups() is None
    (tree / "membership").write_text("0::/a/b/c\n")
    assert host_memory.left_in_groups() is None
    group(tree, "a/b/c", V2, "max", 700)
    assert host_memory.left_in_groups() is None
    group(tree, "a/b", V2, "1000", 700, "anon 500\nfile 200\ninactive_file 150\nactive_file 50")
    assert host_memory.left_in_groups() == 450, "cached files are left"
    group(tree, "a", V2, "1000", 900)
    assert host_memory.left_in_groups() == 100
    group(tree, "", V2, "1000", 950)
    (tree / "membership").write_text("0::/system.slice/docker-1234.scope\n")
    assert host_memory.left_in_groups() == 50, "a path of the host's leads to the container's group"


def test_version_1_beside_version_2(tree: Path) -> None:
    (tree / "membership").write_text("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    group(tree, "memory", V1, str(2**63 - 4096), 900)
    group(tree, "memory/job", V1, "1000", 400, "inactive_file 7\ntotal_inactive_file 70\ntotal_active_file 9")
    assert host_memory.left_in_groups() == 670


@pytest.mark.parametrize(("limit", "available"), [("max", 5000), ("9000", 5000), ("900", 500), ("300", 0)])
def test_machine_and_groups_both_bound_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, limit: str, available: int
) -> None:
    (tree / "membership").write_text("0::/\n")
    group(tree, "", V2, limit, 400)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    assert host_memory.available_bytes() == available


def test_kills_and_sizes_are_those_of_the_group_or_of_the_machine(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MACHINE", tree / "vmstat")
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=8 << 30))
    assert (host_memory.oom_kills(), host_memory.sizes()) == (0, "the machine has 8.0 GiB")
    (tree / "vmstat").write_text("nr_free_pages 7\noom_kill 4\n")
    assert host_memory.oom_kills() == 4
    for line, names, files in (
        ("0::/a/b", V2, ("memory.events", "memory.peak")),
        ("5:memory:/a/b", V1, ("memory.oom_control", "memory.max_usage_in_bytes")),
    ):
        (tree / "membership").write_text(line + "\n")
        top = "memory/a" if names is V1 else "a"
        group(tree, f"{top}/b", names, "max", 700)
        group(tree, top, names, str(3 << 30), 900)
        (tree / "groups" / top / "b" / files[0]).write_text("low 0\noom_kill 2\n")
        (tree / "groups" / top / "b" / files[1]).write_text(f"{1 << 30}\n")
        (tree / "groups" / top / files[1]).write_text(f"{2 << 30}\n")
        assert host_memory.oom_kills() == 2
        used = "the control group's limit is 3.0 GiB, and the control group has used at most 1.0 GiB"
        assert host_memory.sizes() == used
