"""Which workers still answer. The coordinator asks each of them once per beat.

    beat ─▶ Ping ─▶ the optimizer's loop, or the trainer's receiver thread ─▶ Pong ─▶ answered
    silent for SILENT_S ─▶ the log and the monitors say so      for the limit ─▶ the run ends

Beats are counted, not seconds: while the coordinator itself is stopped, or the whole machine, nobody becomes silent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from protocol.address import Address
from protocol.messages import Pong

BEAT_S: Final = 1.0
#: A process that has not answered for so long is called silent.
SILENT_S: Final = 4.0
#: Who has hung, and has not ended for it, is named again after this many beats.
AGAIN: Final = 60


class Heartbeats:
    """How long each asked worker has been silent, and what it said last."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit = max(limit_s, SILENT_S) / BEAT_S
        self._missed: dict[Address, int] = {}
        self._answered: set[Address] = set()
        self._pongs: dict[Address, Pong] = {}

    def answered(self, address: Address, pong: Pong) -> None:
        self._answered.add(address)
        self._pongs[address] = pong

    def silent_s(self, address: Address) -> float:
        """How long a worker has not answered; 0 if it is not called silent."""
        silent_s = self._missed.get(address, 0) * BEAT_S
        return silent_s if silent_s >= SILENT_S else 0.0

    def last(self, address: Address) -> Pong:
        """A worker's last answer; before the first, that it neither waits nor writes."""
        return self._pongs.get(address, Pong())

    def beat(self, asked: Collection[Address]) -> tuple[list[str], list[Address]]:
        """A beat has passed since these were asked, and is to begin anew. Returns news, and who is to be ended."""
        news, hung = list[str](), list[Address]()
        before = {address: self.silent_s(address) for address in asked}
        self._missed = {
            address: 0 if address in self._answered else self._missed.get(address, -1) + 1 for address in asked
        }
        self._answered.clear()
        self._pongs = {address: pong for address, pong in self._pongs.items() if address in self._missed}
        for address in asked:
            silent_s = self.silent_s(address)
            if before[address] and not silent_s:
                news.append(f"{address} answers again, after {before[address]:.0f} s")
            elif silent_s and not before[address]:
                news.append(f"{address} has not answered for {silent_s:.0f} s{self._waiting_for(address)}")
            beyond = self._missed[address] - self._limit
            if beyond >= 0 and int(beyond) % AGAIN == 0:
                hung.append(address)
        return news, hung

    def _waiting_for(self, silent: Address) -> str:
        """What the trainer that this optimizer serves waits for."""
        what = self.last(Address("trainer", silent.rank)).waits_for
        return f"; trainer-{silent.rank} waits for {what}" if what and silent.role == "optimizer" else ""
