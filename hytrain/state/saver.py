"""The threads of saving: one that finishes saves while training goes on, and several where somebody waits for files.

While the interpreter ends, no thread can start: then all is done where it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from hytrain.run.ranks import Ranks

_log = logging.getLogger(__name__)


T = TypeVar("T")
Item = TypeVar("Item")


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

        future = self._latest = _started(self._pool, run)
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


def each(
    call: Callable[[Item], T], items: Iterable[Item], workers: int | None = None, *, in_parallel: bool = True
) -> list[T]:
    """What `call` returns for each of the items: on several threads, or, behind a training, one after the other."""
    if not in_parallel:
        return [*map(call, items)]
    with ThreadPoolExecutor(workers, "hytrain-files") as pool:
        return [future.result() for future in [_started(pool, partial(call, item)) for item in items]]


def _started(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    try:
        return pool.submit(call)
    except RuntimeError:  # the interpreter is ending
        future = Future[T]()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future
