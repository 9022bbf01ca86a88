"""The coordinator as the trainer knows it. It may be silent, or die and be replaced, while training goes on.

    Coordinator   watch ─▶ there ─ Welcome ─▶ known      dies: lose ─▶ another one asks: follow ─▶ there
    Unrecorded    reports and logs ─▶ kept until they are recorded, so that another one can be told again

The link calls both: the first one before it has threads, and then on its receiver thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from hytrain.config import Cluster
from hytrain.errors import ConfigError
from hytrain.run.cluster import has_ended
from protocol.channel import Inbox, PeerDied
from protocol.messages import Log, Message, TrainerReport

PROCESS: Final = "the coordinator process"
#: It is heard at least once a second. After this long without it, it is called silent.
SILENCE_S: Final = 4.0
LOOK_S: Final = 1.0
RETRY_S: Final = 0.05
#: Another coordinator is there after a second, on a busy machine later.
START_TIMEOUT_S: Final = 60.0
#: So many reports and logs are kept while nobody records them; then the oldest ones go.
KEPT: Final = 100_000
#: A message has a step's numbers up to so many bytes. More follow in another one.
LOG_BYTES: Final = 4 << 20
#: What a number takes, beside its name.
NUMBER_BYTES: Final = 16

_log = logging.getLogger(__name__)


class Coordinator:
    """The coordinator's process as the trainer knows it. `is_there`: it is watched. `is_known`: it knows us, too."""

    def __init__(self, cluster: Cluster, inbox: Inbox) -> None:
        self._cluster, self._inbox = cluster, inbox
        self.pid = cluster.coordinator_pid
        self.is_there = self.is_known = False
        self._looked_s, self._quiet_s, self._is_silent = time.monotonic(), 0.0, False

    def watch(self) -> None:
        """Raises `PeerDied` if there is none. If one has just died, the launcher starts another one."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not self.is_there:
            with contextlib.suppress(ConfigError):
                self.pid = Cluster.read(self._cluster.socket_dir).coordinator_pid
            try:
                self._inbox.watch(PROCESS, self.pid)
                self.is_there = True
            except PeerDied:
                if time.monotonic() >= ends_s or has_ended(self._cluster.launcher_pid):
                    raise
                time.sleep(RETRY_S)

    def lose(self) -> None:
        self._forget()
        _log.warning("the coordinator (process %d) died; training goes on, and waits for no plan", self.pid)

    def _forget(self) -> None:
        self._inbox.unwatch(PROCESS)
        self.is_there = self.is_known = False

    def follow(self, pid: int) -> None:
        """Another one has been started, and is there unless it has died, too. Then there will be another one."""
        self._forget()
        self._quiet_s, self._is_silent = 0.0, False
        with contextlib.suppress(PeerDied):
            self._inbox.watch(PROCESS, pid)
            self.is_there = True
            if pid != self.pid:
                _log.warning("another coordinator (process %d) has been started", pid)
            self.pid = pid

    def ends_the_run(self, death: PeerDied) -> bool:
        """Whether the launcher ends after this death. In the place of a coordinator, it starts another one."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while death.name == PROCESS and not has_ended(self._cluster.launcher_pid):
            with contextlib.suppress(ConfigError):
                if Cluster.read(self._cluster.socket_dir).coordinator_pid != self.pid:
                    return False
            if time.monotonic() >= ends_s:
                return False
            time.sleep(RETRY_S)
        return True

    def look(self) -> None:
        """Time has passed, without that in which this process was stopped: say once if it has been silent for long."""
        now_s = time.monotonic()
        self._quiet_s += min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        if not self._is_silent and self._quiet_s >= SILENCE_S:
            self._is_silent = True
            _log.warning(
                "the coordinator (process %d) has not been heard for %.0f s; training goes on", self.pid, SILENCE_S
            )

    def hear(self) -> None:
        if self._is_silent:
            _log.warning("the coordinator is heard again")
        self._quiet_s, self._is_silent = 0.0, False


class Unrecorded:
    """Reports and logs in the order in which they go to the coordinator, by `send`. Any thread may call it.

    Logs of one step are one message, sent before the next one to the coordinator or when that pings.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._kept: deque[TrainerReport | Log] = deque(maxlen=KEPT)
        self.recorded_s = -math.inf
        self._log: Log | None = None  # the numbers of a step that have not been sent yet
        self._log_bytes = 0

    def add(self, log: Log) -> None:
        """The loop's numbers. The caller hands `log` over.

        A loop may log each number by itself, and thousands of them in a step.
        """
        nbytes = log_bytes(log.numbers)
        with self._lock:
            known = self._log
            if known is not None and log.renames is None and (known.step, known.ahead) == (log.step, log.ahead):
                if self._log_bytes + nbytes <= LOG_BYTES:
                    for name, number in log.numbers.items():
                        if log.ahead or name not in known.numbers:  # as the coordinator's records take them one by one
                            known.numbers[name] = number
                    self._log_bytes += nbytes
                    return
            self._flush()
            self._log, self._log_bytes = log, nbytes

    def flush(self) -> None:
        """Send the numbers so far."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            self._kept.append(log)
            self._send(log)

    def keep(self, report: TrainerReport) -> None:
        """Keep a report, which the caller sends. Those that are recorded go, with the logs before them."""
        with self._lock:
            self._kept.append(report)
            while (first := next(self._reports(), None)) is not None and first.at_s <= self.recorded_s:
                while self._kept.popleft() is not first:
                    pass

    def _reports(self) -> Iterator[TrainerReport]:
        return (message for message in self._kept if isinstance(message, TrainerReport))

    def send_again(self, *before: Message | None) -> None:
        """Send all that is not recorded, behind other messages."""
        with self._lock:
            for message in (*before, *self._kept):
                if message is not None:
                    self._send(message)

    @property
    def steps(self) -> int:
        """The number of reports that nobody has recorded."""
        with self._lock:
            return sum(report.at_s > self.recorded_s for report in self._reports())


def log_bytes(numbers: Mapping[str, float]) -> int:
    """About how much these take in a message."""
    return sum(len(name.encode(errors="backslashreplace")) + NUMBER_BYTES for name in numbers)
