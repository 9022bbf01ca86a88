"""Finishes saves on a thread of its own, one after the other, while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from hytrain.run.ranks import Ranks

_log = logging.getLogger(__name__)


T = TypeVar("T")


class Saver:
    """At most one save is being finished. All ranks of a job start theirs together."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._ranks: Ranks | None = None
        self._latest: Future[Any] | None = None

    def start(self, finish: Callable[[Ranks], T], what: str) -> Future[T]:
        """Call `finish` on the thread. If that fails, it is logged, too, for those who drop the future."""
        self._pool = self._pool or ThreadPoolExecutor(1, "hytrain-saver")
        ranks = self._ranks = self._ranks or Ranks.of_job().apart()

        def run() -> T:
            try:
                return finish(ranks)
            except Exception as error:
                _log.error("%s was not saved: %s", what, error)
                raise

        future = self._latest = self._pool.submit(run)
        return future

    def wait(self) -> None:
        """Return once nothing is being finished, however that ended."""
        if self._latest is not None:
            wait([self._latest])

    def close(self) -> None:
        """Like `wait`, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
