"""Tells the first machine of a job the status of the ranks on the others, through the store of `torch.distributed`.

    each coordinator ── Ping: its rank's status ──▶ trainer ── set ──▶ the job's store
    rank 0 ◀── get ── the job's store               rank 0 ── NodeStatus ──▶ its coordinator, for monitors

Training does not need it: a thread of its own waits for the store, and whatever fails here is a line in the log.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from hytrain.run.ranks import Ranks
from protocol.address import Address
from protocol.codec import decode, encode
from protocol.messages import NodeStatus, RankStatus

#: At the end, an answer of the store is waited for so long.
END_S: Final = 5.0

_log = logging.getLogger(__name__)


class Nodes:
    """A rank's end. It does nothing in a job on one machine, and for ranks other than 0 on the first machine."""

    def __init__(self, ranks: Ranks) -> None:
        """All ranks call this."""
        self._newest: tuple[RankStatus, Callable[[NodeStatus], None]] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if len(ranks.node) == ranks.world:
            return
        self._token, self._rank = ranks.gather(secrets.token_hex(16))[0], ranks.rank
        self._store: Any = self._joined() if self._rank == 0 or 0 not in ranks.node else None
        there = ranks.gather(self._store is not None)
        self._keys = [self._key(rank) for rank, is_there in enumerate(there) if rank and is_there]  # of other machines
        if self._store is not None:
            self._thread = threading.Thread(target=self._exchange, name="hytrain-nodes", daemon=True)
            self._thread.start()

    def _key(self, rank: int) -> str:
        return f"hytrain/{self._token}/{rank}"

    def _joined(self) -> Any:
        """The store over a connection of our own, in which this rank has a key; None, if that cannot be."""
        try:
            default: Any = dist.distributed_c10d._get_default_store()
            store = default.clone()
            store.set(self._key(self._rank), b"")
        except Exception as error:  # of stores of other kinds, too
            return self._fails(error)
        return store

    def tell(self, status: RankStatus, hear: Callable[[NodeStatus], None]) -> None:
        """This rank's newest status. Rank 0 hears those of other machines in return, on a thread."""
        self._newest = status, hear
        self._wake.set()

    def _exchange(self) -> None:
        try:
            while self._wake.wait() and (newest := self._newest) is not None:
                self._wake.clear()
                status, hear = newest
                if self._rank:
                    own, sender = NodeStatus(ranks=(status,)), Address("trainer", self._rank)
                    self._store.set(self._key(self._rank), encode(own, token=self._token, sender=sender, seq=0))
                    continue
                frames = filter(None, self._store.multi_get(self._keys) if self._keys else [])
                told = [decode(frame, token=self._token).message for frame in frames]
                hear(NodeStatus(ranks=tuple(rank for one in told if isinstance(one, NodeStatus) for rank in one.ranks)))
        except Exception as error:
            self._fails(error)

    def _fails(self, error: Exception) -> None:
        _log.warning("monitors will not see the ranks of other machines: %s", error)

    def close(self) -> None:
        """End the thread, unless the store hangs."""
        self._newest = None
        self._wake.set()
        if self._thread is not None:
            self._thread.join(END_S)
