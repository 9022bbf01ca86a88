"""Keeps a flood of warnings out of the logs."""

from __future__ import annotations

import logging
import time
from typing import Final

#: So many records of one kind are logged in each period. The next period's first one says how many were not.
AT_MOST: Final = 5
PERIOD_S: Final = 10.0


class RateLimit(logging.Filter):
    """Drops records, but for the first few of each kind in a period. Records with the same text template are a kind."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # when the period began, and how many came since

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        kind = str(record.msg)
        began_s, count = self._seen.get(kind, (now_s, 0))
        if now_s - began_s >= PERIOD_S:
            if (unsaid := count - AT_MOST) > 0:
                record.msg = f"{kind} (and {unsaid} more before, not logged)"
            began_s, count = now_s, 0
        self._seen[kind] = began_s, count + 1
        return count < AT_MOST


def rate_limited(name: str) -> logging.Logger:
    """The logger with this name, limited. For what others than this run's own processes can cause."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, RateLimit) for known in logger.filters):
        logger.addFilter(RateLimit())
    return logger
