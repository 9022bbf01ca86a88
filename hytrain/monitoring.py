"""Live runs from outside: which there are, and a connection to one. For programs; `hytrain-monitor` is made with it.

    <tempdir>/hytrain-*/cluster.json ─▶ find ─▶ Client ─ StatusRequest, Command ─▶ coordinator
                                                  ▲──── Status, again each step ──┘

A client cannot slow a run down: the coordinator never waits for it, and the feed drops frames that it does not read.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from hytrain.config import Cluster
from hytrain.errors import ClusterTimeout, ConfigError
from hytrain.run.live import find, live_runs
from hytrain.run.trace import FILE, identity
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Network, Outbox, Subscriber
from protocol.messages import Status
from protocol.metrics import records

__all__ = ["Client", "LayerPlace", "Status", "find", "live_runs"]

#: After this long without news from the feed, check that the coordinator lives, and ask it.
LOOK_S: Final = 0.5
#: How long after a reply the feed may still bring statuses that were published before it.
LAG_S: Final = 0.2
ANSWER_S: Final = 10.0
#: While a run is followed, a coordinator that has not replied for so long is shown as silent.
SILENT_S: Final = 3.0
#: Of the end of each log, and of the records, so much is looked at.
TAIL_BYTES: Final = 1 << 16
HISTORY_BYTES: Final = 8 << 20

T = TypeVar("T", Status, m.CommandReply)
Question = m.StatusRequest | m.Command


class LayerPlace(NamedTuple):
    """A layer, and where its parts are.

    Attributes:
        lid: Its ID, from 0 on.
        name: Its module's name in the model.
        numel: How many parameters it has, on this rank.
        weights: Where its weights rest between uses: "gpu", which stands for the trainer's device, or "host".
        state: Where its optimizer state rests: "gpu" or "host".
        updated_by: Who updates it: "gpu" or "cpu".
    """

    lid: int
    name: str
    numel: int
    weights: str
    state: str
    updated_by: str


class Client(AbstractContextManager["Client"]):
    """A connection to a live run of this user on this machine, which sees it and can steer it.

        with hytrain.monitoring.Client() as run:
            print(run.history()[-1]["loss"], run.layers())
            for status in run.statuses():  # one per step, until the run ends
                print(json.loads(status.record)["step_s"])

    It follows the run to another coordinator, if the first one dies. One thread may use it.
    """

    _last: Status | None = None

    def __init__(self, run: Cluster | str | None = None) -> None:
        """Connect.

        Args:
            run: The run's name, its folder or its socket folder. None stands for the newest one.

        Raises:
            ConfigError: There is no such live run; the message names those that there are.
        """
        self.run = run if isinstance(run, Cluster) else find(run)
        try:
            self._launcher = os.pidfd_open(self.run.launcher_pid)
        except ProcessLookupError:
            raise ConfigError(f"the run {self.run.run_name} has ended") from None
        self._network = Network(self.run.socket_dir, token=self.run.token, address=Address("monitor", os.getpid()))
        self._feed = Subscriber(self._network)
        self._outbox = self._connected()

    def close(self) -> None:
        """Disconnect. The run goes on."""
        self._network.close()
        os.close(self._launcher)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ended(self) -> bool:
        """Whether the run has ended, or its processes are being started again."""
        try:
            self.run = Cluster.read(self.run.socket_dir)  # it may have another coordinator
        except ConfigError:
            return True
        return bool(select.select([self._launcher], [], [], 0)[0])

    def status(self) -> Status:
        """The newest record, the layers and their placements, the plan and its reason, and the processes.

        Raises:
            ConfigError: The run has ended.
            ClusterTimeout: Its coordinator lives, but has not replied for 10 s.
        """
        return self.require(m.StatusRequest(), Status)

    def statuses(self) -> Iterator[Status]:
        """The current status, then each new one, until the run ends.

        While no step ends, the last status comes again, at least every 4 s. If the coordinator does not reply, this
        status says so: its first process is the coordinator, whose `silent_s` grows. A caller that is slower than the
        run misses statuses.

        Raises:
            ClusterTimeout: The coordinator lives, but has not replied to the first question for 10 s.
        """
        newest_s = 0.0
        while (status := self._current()) is not None:
            # The reply may overtake statuses in the feed. Yield those first, except before the first reply.
            while 0.0 < newest_s < _recorded_at_s(status) and (news := self._next(newest_s, LAG_S)) is not None:
                newest_s = _recorded_at_s(news)
                yield news
            if _recorded_at_s(status) >= newest_s:
                newest_s = _recorded_at_s(status)
                self._last = status
                yield status
            while (news := self._next(newest_s, LOOK_S)) is not None:
                newest_s = _recorded_at_s(news)
                self._last = news
                yield news

    def history(self, points: int = 500) -> list[dict[str, Any]]:
        """The records of the first rank of this machine, the newest one last, evenly spaced if there are more.

        They are read from the end of `metrics.jsonl` in the run's folder, at most 8 MiB of it: no process is asked.

        Args:
            points: How many at most.

        Raises:
            ValueError: `points` is less than 1.
        """
        if points < 1:
            raise ValueError(f"{points} points, not 1 or more")
        found = list[dict[str, Any]]()
        with suppress(FileNotFoundError):  # before the first step
            found += records(_end_of(Path(self.run.run_dir, "metrics.jsonl"), HISTORY_BYTES))
        points = min(points, len(found))
        return [found[(index + 1) * len(found) // points - 1] for index in range(points)]

    def layers(self) -> list[LayerPlace]:
        """The layers of the first rank of this machine by ID, as they are placed now; none if no trainer has joined.

        Raises:
            ConfigError: The run has ended.
            ClusterTimeout: Its coordinator lives, but has not replied for 10 s.
        """
        status = self.status()
        layers = zip(status.layer_names, status.layer_numels, status.places, strict=True)
        return [
            LayerPlace(lid, name, numel, placed.weights, placed.state, placed.updates)
            for lid, (name, numel, placed) in enumerate(layers)
        ]

    def log_tail(self, lines: int = 20) -> dict[str, list[str]]:
        """The last lines of each log of the run's processes on this machine, by the log's name.

        They are read from the run's folder, 64 KiB of each at most: neither a process nor its log waits for a reader.
        """
        logs = sorted(Path(self.run.run_dir, "logs").glob("*.log"))
        return {path.name: _end_of(path, TAIL_BYTES)[-lines:] if lines else [] for path in logs}

    def command(self, name: str, value: str) -> str:
        """Change the plan, as `hytrain-monitor --set-k` and the like do: the coordinator's answer, a sentence.

        Args:
            name: "k", "threads", "policy", "objective", "gpu_memory_limit" or "host_memory_limit"; also "trace" and
                "checkpoint", which have methods.
            value: As on the command line, such as "0.3" or "auto".

        Raises:
            ConfigError: The coordinator refuses it and says why, or the run has ended.
            ClusterTimeout: Its coordinator lives, but has not replied for 10 s.
        """
        reply = self.require(m.Command(name=name, value=value), m.CommandReply)
        if not reply.ok:
            raise ConfigError(reply.text)
        return reply.text

    def trace(self, steps: int, told: Callable[[str], object] = lambda answer: None) -> Path:
        """Draw the timeline of the next steps, as `hytrain-monitor --trace` does, and wait until it is there.

        Args:
            steps: How many, up to 1000. 0 ends a timeline that is being drawn, and waits for its file.
            told: Gets the coordinator's answer, a sentence, before the steps are waited for.

        Returns:
            The file, `trace.json` in the run's folder. The next timeline takes its place.

        Raises:
            ConfigError: The coordinator refuses it, or the timeline cannot be written, and why; or the run has ended
                and left none.
            ClusterTimeout: Its coordinator lives, but has not replied for 10 s.
        """
        folder = Path(self.run.run_dir)
        before = identity(folder)
        told(self.command("trace", str(steps)))
        while identity(folder) == before and (status := self._ask(m.StatusRequest(), Status)) is not None:
            if status.no_timeline:
                raise ConfigError(f"the timeline cannot be written: {status.no_timeline}")
            time.sleep(LOOK_S)
        select.select([self._launcher], [], [], 0 if identity(folder) != before else ANSWER_S)  # it writes one at last
        if identity(folder) == before:
            raise ConfigError("the run has ended, and left no timeline")
        return folder / FILE

    def checkpoint(self) -> str:
        """Ask for a checkpoint after one of the next steps, as `hytrain-monitor --checkpoint` does.

        Returns:
            The coordinator's answer, a sentence. The checkpoint is not waited for.

        Raises:
            ConfigError: The loop cannot save on command, or the run has ended.
            ClusterTimeout: Its coordinator lives, but has not replied for 10 s.
        """
        return self.command("checkpoint", "")

    def require(self, question: Question, kind: type[T]) -> T:
        """The coordinator's reply to one of the protocol's questions. Raises as `status` does."""
        answer = self._ask(question, kind)
        if answer is None:
            raise ConfigError(f"the run {self.run.run_name} has ended")
        return answer

    def _ask(self, question: Question, kind: type[T], patience_s: float = ANSWER_S) -> T | None:
        """The coordinator's reply, or None if it is gone. Raises `ClusterTimeout` if it lives but does not reply."""
        self._outbox.send(question)
        asked, deadline = self.run.coordinator_pid, time.monotonic() + patience_s
        while time.monotonic() < deadline:
            answer = self._outbox.receive(LOOK_S)
            if isinstance(answer, kind):
                return answer
            if self.ended:
                return None
            if self.run.coordinator_pid != asked:
                self._reconnect()
                self._outbox.send(question)
                asked = self.run.coordinator_pid
        self._reconnect()
        raise ClusterTimeout(f"the coordinator of {self.run.run_name} (PID {self.run.coordinator_pid}) does not reply")

    def _connected(self) -> Outbox:
        name = f"{self._network.address}-{secrets.token_hex(4)}"
        return self._network.outbox(COORDINATOR, linger_s=0.0, name=name)

    def _reconnect(self) -> None:
        """An answer that comes late, through the connection of its question, must not be taken for the next one's."""
        self._network.drop(self._outbox)
        self._outbox = self._connected()

    def _current(self) -> Status | None:
        """The coordinator's reply, or the last status with how long it has not replied; None once it is gone."""
        if self._last is None:
            return self._ask(m.StatusRequest(), Status)
        began_s = time.monotonic()
        try:
            return self._ask(m.StatusRequest(), Status, SILENT_S)
        except ClusterTimeout:
            first, *others = self._last.processes
            first = replace(first, silent_s=first.silent_s + time.monotonic() - began_s)
            return replace(self._last, processes=(first, *others))

    def _next(self, newest_s: float, timeout_s: float) -> Status | None:
        """The feed's next status with a newer record, or None after `timeout_s` seconds without a status."""
        while (news := self._feed.receive(timeout_s)) is not None:
            if isinstance(news, Status) and _recorded_at_s(news) > newest_s:
                return news
        return None


def _recorded_at_s(status: Status) -> float:
    """When the status's record was made, in seconds of the node's monotonic clock; 0 before the first record."""
    return float(json.loads(status.record).get("at_s", 0.0))


def _end_of(path: Path, nbytes: int) -> list[str]:
    """The lines in the last so many bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - nbytes, 0))
        return file.read().decode(errors="replace").splitlines()
