"""The optimizer process: AdamW in host memory over the layers that it owns.

    pin cores ─▶ join ─▶ READY
    inbox ─▶ Session.handle ─▶ UpdateQueue ─▶ one tile ─▶ look at the inbox again ─▶ … ─▶ WeightsReady

Nothing imported here loads OpenMP: the kernel does when it is loaded, after the cores have been pinned, and reads
the affinity mask only then. One thread calls the kernel; ZeroMQ's own threads were started before OpenMP bound this
one to a core. With nothing to update it sleeps on its inbox. It serves one trainer at a time, and the next when that
one says Goodbye.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import struct
import sys
import time
import traceback
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from hytrain.arena import HostArena, send_arena
from hytrain.errors import ClusterTimeout
from hytrain.kernels.backend import Backend, load
from hytrain.kernels.scalars import Hyper, Scalars, scalars
from hytrain.ownership import OwnershipError, PlanBook
from hytrain.update_queue import Tile, UpdateQueue
from protocol import messages as m
from protocol.channel import Inbox, Network, Outbox, PeerDied
from protocol.handles import layout
from protocol.handshake import WorkerHandshake
from workers import affinity
from workers.process import ignore_terminal_signals, read_token, say_ready, worker_logging

ACCEPT_TIMEOUT_S: Final = 30.0
WELCOME_TIMEOUT_S: Final = 60.0

_log = logging.getLogger("optimizer")


def main() -> int:
    """Run until the launcher or the trainer is gone; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.optimizer", description=__doc__.splitlines()[0])
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    arguments = parser.parse_args()
    worker_logging()
    ignore_terminal_signals()
    pinning = affinity.choose(arguments.cores, arguments.threads)
    affinity.pin(pinning)
    _log.info("pinned: %s", pinning.describe())
    return serve(arguments.socket_dir, pinning, ready_fd=arguments.ready_fd, life_fd=arguments.life_fd)


def serve(socket_dir: str, pinning: affinity.Pinning, *, ready_fd: int, life_fd: int) -> int:
    """Join the run and serve its trainers, one after the other."""
    token = read_token(socket_dir)
    with Network(socket_dir, token=token, name="optimizer-0") as network:
        inbox = network.inbox("optimizer")
        inbox.watch_descriptor("the launcher", life_fd)
        coordinator = network.outbox("coordinator")
        try:
            with _listen(socket_dir) as arenas:
                _join(inbox, coordinator, pinning)
                say_ready(ready_fd, pinning.describe())
                while True:
                    _serve_trainer(network, inbox, coordinator, arenas, pinning, token)
        except PeerDied as death:
            _log.info("%s is gone, leaving", death.name)
            return 0


def _listen(socket_dir: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(Path(socket_dir) / "arena"))
    listener.listen(1)
    listener.settimeout(ACCEPT_TIMEOUT_S)
    return listener


def _join(inbox: Inbox, coordinator: Outbox, pinning: affinity.Pinning) -> None:
    handshake = WorkerHandshake(role="optimizer", rank=0, pid=os.getpid())
    coordinator.send(handshake.hello())
    incoming = inbox.receive(WELCOME_TIMEOUT_S)
    if incoming is None or not isinstance(incoming.message, m.Welcome):
        raise ClusterTimeout(f"the coordinator answered Hello with {incoming}")
    handshake.on_welcome(incoming.message)
    coordinator.send(handshake.ready(pinning.describe()))


def _serve_trainer(
    network: Network,
    inbox: Inbox,
    coordinator: Outbox,
    arenas: socket.socket,
    pinning: affinity.Pinning,
    token: str,
) -> None:
    """One trainer, from its layer table to its Goodbye. Whatever fails is told to both before it is raised."""
    incoming = inbox.receive(None)
    if incoming is None or not isinstance(incoming.message, m.LayerTable):
        _log.warning("no trainer is here: dropped %s", incoming)
        return
    trainer = network.outbox("trainer")
    session: Session | None = None
    try:
        backend, reason = load(incoming.message.backend, pinning.threads)
        _log.info("backend %s", reason)
        session = Session(incoming.message, backend, pinning.threads, trainer, coordinator, arenas, token)
        session.run(inbox)
        coordinator.send(m.SessionEnded(rank=0))
    except Exception as error:
        if not isinstance(error, PeerDied):
            step, lid = session.place if session is not None else (None, None)
            text = f"{type(error).__name__}: {error}"
            for outbox in (trainer, coordinator):
                outbox.send(
                    m.Failure(
                        role="optimizer",
                        rank=0,
                        step=step,
                        lid=lid,
                        error=text,
                        traceback=traceback.format_exc(),
                    )
                )
        raise
    finally:
        if session is not None:
            session.close()
        network.drop(trainer)


@dataclass(slots=True)
class _Progress:
    """What has been done since the last report."""

    busy_s: float = 0.0
    update_s: dict[int, float] = field(default_factory=dict)
    arrived_s: dict[int, float] = field(default_factory=dict)
    queued_s: dict[int, float] = field(default_factory=dict)


class Session:
    """The optimizer's part in one trainer's run."""

    def __init__(
        self,
        table: m.LayerTable,
        backend: Backend,
        threads: int,
        trainer: Outbox,
        coordinator: Outbox,
        arenas: socket.socket,
        token: str,
    ) -> None:
        from hytrain.update_queue import UpdateQueue

        self._table, self._backend, self._threads = table, backend, threads
        self._trainer, self._coordinator = trainer, coordinator
        self._queue: UpdateQueue = UpdateQueue(table.layers)
        self._plans = PlanBook("optimizer", len(table.layers))
        self._arenas: dict[int, HostArena] = {}
        self._listener, self._token = arenas, token
        # The trainer connected before it sent its table. Accepted now, lest the next one's arenas go to this one.
        self._descriptors = self._accept()
        self._progress = _Progress()
        self._working_on: int | None = None

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The step and layer at work, for a failure's report."""
        return (self._queue.step if self._queue.step >= 0 else None), self._working_on

    def run(self, inbox: Inbox) -> None:
        """Serve until the trainer says Goodbye."""
        while True:
            incoming = inbox.receive(None if self._queue.idle else 0.0)
            if incoming is None:
                self._work()
            elif isinstance(incoming.message, m.Goodbye):
                return
            else:
                self._handle(incoming.message)

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.GradReady():
                self._queue.grad_ready(message)
                self._progress.arrived_s[message.lid] = time.monotonic()
            case m.StepBegin():
                self._queue.begin(message)
            case m.Plan():
                self._coordinator.send(self._plans.on_plan(message))
            case m.AllocatePlanes(lid=lid):
                self._allocate(lid)
            case m.TakeOver(lid=lid):
                self._require_plan(message, "cpu")
                self._queue.take_over(lid)
            case m.GiveUp(lid=lid):
                self._require_plan(message, "gpu")
                self._queue.give_up(lid)
                self._arenas.pop(lid).close()
            case m.RanksLearned(ranks=ranks):
                self._queue.learn_ranks(ranks)
            case m.PlanApplied():
                self._plans.forget(message.plan_id)
                _log.info("plan %d %s", message.plan_id, "holds" if message.applied else "came too late")
            case _:
                raise TypeError(f"an optimizer has no use for {type(message).__name__}")

    def _require_plan(self, handover: m.TakeOver | m.GiveUp, owner: str) -> None:
        """Raise `OwnershipError` unless an acknowledged plan has this handover, before the step that comes next."""
        lid = handover.lid
        if not self._plans.allows(handover.plan_id, lid, owner) or lid not in self._arenas:
            raise OwnershipError(f"layer {lid} cannot go to the {owner}: no plan says so, or it has no planes")
        if handover.step != self._queue.step + 1:
            raise OwnershipError(f"a handover before step {handover.step}, after step {self._queue.step}")

    def _allocate(self, lid: int) -> None:
        """Make the layer's planes, touch them under this process's affinity, and hand the descriptor over."""

        if not 0 <= lid < len(self._table.layers) or lid in self._arenas:
            raise ValueError(f"planes for layer {lid}, which is unknown or has them")
        self._working_on = lid
        arena = HostArena(layout(self._table.layers[lid]))
        self._arenas[lid] = arena
        self._backend.touch(arena.address, arena.layout.nbytes)
        send_arena(self._descriptors, arena, token=self._token)
        self._working_on = None

    def _accept(self) -> socket.socket:
        """The trainer's connection for descriptors; the kernel vouches for the user behind it."""
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            connection.close()
            raise PermissionError(f"user {user} asked for the arenas of user {os.getuid()}")
        return connection

    def _work(self) -> None:
        """One tile of the most urgent update, and what follows from it."""
        tile = self._queue.next_tile()
        if tile is None:
            return
        self._working_on = tile.lid
        began_s = time.perf_counter()
        self._update(tile)
        took_s = time.perf_counter() - began_s
        progress = self._progress
        progress.busy_s += took_s
        progress.update_s[tile.lid] = progress.update_s.get(tile.lid, 0.0) + took_s
        self._working_on = None
        done = self._queue.tile_done(tile)
        if done is not None:
            self._trainer.send(done)
            progress.queued_s[tile.lid] = time.monotonic() - progress.arrived_s.pop(tile.lid)
        if self._queue.idle:
            self._report()

    def _update(self, tile: Tile) -> None:
        arena = self._arenas[tile.lid]
        segment = self._table.layers[tile.lid].segments[tile.segment]

        def address(plane: str) -> int:
            handle = arena.layout.handles[plane][tile.segment]
            if handle is None:
                return 0
            return arena.address_of(handle) + tile.start * (handle.nbytes // handle.numel)

        self._backend.update(
            weights=address("weights"),
            grads=address("grads"),
            remainder=address("remainder"),
            exp_avg=address("exp_avg"),
            exp_avg_sq=address("exp_avg_sq"),
            numel=tile.stop - tile.start,
            weights_dtype=segment.dtype,
            grads_dtype=segment.grads_dtype,
            scalars=_scalars(tile.hyper, tile.count),
        )

    def _report(self) -> None:
        progress, self._progress = self._progress, _Progress()
        updates = tuple(
            m.CpuUpdate(lid=lid, update_s=progress.update_s[lid], queued_s=queued_s)
            for lid, queued_s in sorted(progress.queued_s.items())
            if lid in progress.update_s
        )
        report = m.OptimizerReport(
            step=self._queue.step, threads=self._threads, busy_s=progress.busy_s, updates=updates
        )
        self._coordinator.send(report)

    def close(self) -> None:
        """Give all memory back."""
        self._descriptors.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()


@lru_cache(maxsize=256)
def _scalars(hyper: m.GroupHyper, count: int) -> Scalars:
    return scalars(Hyper(**dict(zip(type(hyper).__slots__, astuple(hyper), strict=True))), count)


if __name__ == "__main__":
    sys.exit(main())
