"""The coordinator's end of the link between the machines of a job.

    KeyRequest ─▶ Key            the public key of this coordinator, made for this run
    Collect ─▶ Collecting        first machine: listen to the others, whose keys it names, at an endpoint
    ReportTo                     other machines: send the status of their ranks there, with each step

The trainers exchange the keys and the port through their process group (`hytrain.run.nodes`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from protocol import messages as m
from protocol.address import Address
from protocol.codec import Envelope
from protocol.nodes import Collector, Keys, Reporter

_log = logging.getLogger(__name__)


class Nodes:
    """What this coordinator hears from those of other machines, and tells the first one. Nothing in a single one."""

    def __init__(self) -> None:
        self._keys: Keys | None = None
        self._collector: Collector | None = None
        self._reporter: Reporter | None = None

    def handle(self, message: m.Message) -> m.Message | None:
        """The answer to a message about the link; None if it needs none, or is about something else."""
        match message:
            case m.KeyRequest():
                return m.Key(key=self._own_keys().public)
            case m.Collect():
                return m.Collecting(endpoint=self._collect(message))
            case m.ReportTo():
                self._report(message)
        return None

    def _collect(self, wanted: m.Collect) -> str:
        """Where the others are listened to; empty if that is not possible."""
        try:
            self._collector = self._collector or Collector(self._own_keys(), wanted.host)
        except ValueError as error:
            _log.warning("the status of other machines cannot be collected at %s", error)
            return ""
        self._collector.admit(wanted.keys)
        _log.info("collects the status of %d other machines at %s", len(wanted.keys), self._collector.endpoint)
        return self._collector.endpoint

    def _report(self, to: m.ReportTo) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
        sender = Address("coordinator", to.node)
        try:
            self._reporter = Reporter(self._own_keys(), sender=sender, endpoint=to.endpoint, key=to.key)
        except ValueError as error:
            _log.warning("the first machine will not hear of this one's ranks: %s", error)
        else:
            _log.info("reports to the first machine at %s", to.endpoint)

    def _own_keys(self) -> Keys:
        self._keys = self._keys or Keys()
        return self._keys

    def news(self) -> Iterator[Envelope]:
        """What has come from other machines."""
        while self._collector is not None and (envelope := self._collector.try_receive()) is not None:
            yield envelope

    def publish(self, status: m.Status) -> None:
        """Tell the first machine, if it is another one."""
        if self._reporter is not None:
            self._reporter.send(m.NodeStatus(ranks=status.ranks))

    def close(self) -> None:
        for end in (self._collector, self._reporter):
            if end is not None:
                end.close()
