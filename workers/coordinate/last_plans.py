"""Keeps the last plans of this user's runs on this machine, one file each. The coordinator reads and writes them.

    <cache>/hytrain/plans/<what was trained, where>.json

A run takes its file away when it begins, and writes it when a plan rests. So if a plan is not right any more and the
run ends with it, by running out of memory for example, the next one begins without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from protocol.messages import LayerTable
from protocol.placement import Places
from workers.planning.last import LastPlan, same

#: Of the files' format and meaning. Files of other versions are not found.
VERSION: Final = 1

_log = logging.getLogger(__name__)


class LastPlans:
    """`folder`: none are kept without one. `machine`: what else plans depend on."""

    def __init__(self, folder: str, machine: bytes) -> None:
        self._folder, self._machine = folder, machine

    def take(self, table: LayerTable) -> LastPlan | None:
        """The plan for this table, if there is one. Another run does not find it until it is kept again."""
        if (path := self._path(table)) is None:
            return None
        try:
            return _read(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("the last run's plan cannot be read: %s", error)
            return None
        finally:
            with suppress(OSError):
                path.unlink()

    def keep(self, table: LayerTable, places: Places, shares: tuple[float, float]) -> None:
        if (path := self._path(table)) is None:
            return
        text = {"places": places.names, "shares": shares, "gpu_bytes": table.gpu_bytes}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(text))
            temporary.replace(path)
        except OSError as error:
            _log.warning("the next run will not begin with this plan, which cannot be kept: %s", error)
            with suppress(OSError):
                temporary.unlink()

    def _path(self, table: LayerTable) -> Path | None:
        if not self._folder:
            return None
        key = hashlib.sha256(b"\0".join((b"%d" % VERSION, self._machine, same(table).encode()))).hexdigest()
        return Path(self._folder, f"{key[:24]}.json")


def _read(path: Path) -> LastPlan:
    """Raises ValueError, TypeError or KeyError if it is damaged."""
    content: dict[str, Any] = json.loads(path.read_text())
    visit, offload = map(float, content["shares"])
    if not (0.0 <= visit <= 1.0 and 0.0 <= offload <= 1.0):
        raise ValueError(f"{path} has shares that are none: {visit}, {offload}")
    gpu_bytes = content["gpu_bytes"]
    return LastPlan(
        places=Places(tuple(map(str, content["places"]))),
        shares=(visit, offload),
        gpu_bytes=None if gpu_bytes is None else int(gpu_bytes),
    )
