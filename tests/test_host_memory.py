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
