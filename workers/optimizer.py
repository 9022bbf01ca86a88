"""The optimizer process: AdamW in host memory over the layers that it owns.

    pin cores ─▶ join ─▶ READY
    inbox ─▶ Session._handle ─▶ UpdateQueue ─▶ one tile ─▶ look at the inbox again ─▶ … ─▶ WeightsReady
                    └─▶ Arenas ─▶ one piece of new memory after each tile ─▶ … ─▶ its descriptor

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
import sys
import time
import traceback
from dataclasses import astuple
from functools import lru_cache
from typing import Final

from hytrain.errors import ClusterTimeout
from hytrain.kernels.backend import Backend
from hytrain.kernels.choice import load
from hytrain.kernels.scalars import Hyper, Scalars, scalars
from hytrain.memory.arena import allow_descriptors, arena_socket
from hytrain.run.ownership import OwnershipError, PlanBook
from hytrain.run.trace import TraceWriter
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Inbox, Network, Outbox, PeerDied
from protocol.handshake import WorkerHandshake
from workers import affinity
from workers.arenas import Arenas, accept
from workers.process import ignore_terminal_signals, read_token, say_ready, worker_logging
from workers.update_queue import Tile, UpdateQueue
from workers.update_rate import seconds_per_parameter
from workers.work_log import Progress

ACCEPT_TIMEOUT_S: Final = 30.0
WELCOME_TIMEOUT_S: Final = 60.0

_log = logging.getLogger("optimizer")


def main() -> int:
    """Run until the launcher or the trainer is gone; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.optimizer", description=__doc__.splitlines()[0])
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--trace", metavar="RUN_DIR")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    arguments = parser.parse_args()
    worker_logging()
    ignore_terminal_signals()
    address = Address("optimizer", arguments.rank)
    pinning = affinity.choose(arguments.cores, arguments.threads)
    affinity.pin(pinning)
    _log.info("pinned: %s", pinning.describe())
    trace = None if arguments.trace is None else TraceWriter(arguments.trace, address)
    return serve(arguments.socket_dir, address, pinning, trace, ready_fd=arguments.ready_fd, life_fd=arguments.life_fd)


def serve(
    socket_dir: str,
    address: Address,
    pinning: affinity.Pinning,
    trace: TraceWriter | None,
    *,
    ready_fd: int,
    life_fd: int,
) -> int:
    """Join the run and serve its trainers, one after the other."""
    token = read_token(socket_dir)
    with Network(socket_dir, token=token, address=address) as network:
        inbox = network.inbox()
        inbox.watch_descriptor("the launcher", life_fd)
        coordinator = network.outbox(COORDINATOR)
        try:
            with _listen(arena_socket(socket_dir, address.rank)) as arenas:
                _join(inbox, coordinator, address, pinning)
                say_ready(ready_fd, pinning.describe())
                while True:
                    _serve_trainer(network, inbox, coordinator, arenas, address, pinning, token, trace)
        except PeerDied as death:
            _log.info("%s is gone, leaving", death.name)
            return 0


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    listener.settimeout(ACCEPT_TIMEOUT_S)
    return listener


def _join(inbox: Inbox, coordinator: Outbox, address: Address, pinning: affinity.Pinning) -> None:
    handshake = WorkerHandshake(address, pid=os.getpid(), inbox=str(address))
    coordinator.send(handshake.hello())
    incoming = inbox.receive(WELCOME_TIMEOUT_S)
    if incoming is None or not isinstance(incoming.message, m.Welcome):
        raise ClusterTimeout(f"the coordinator answered Hello with {incoming}")
    handshake.on_welcome(incoming.message)
    coordinator.send(handshake.ready(pinning.describe_place()))  # how many threads: each report says so


def _serve_trainer(
    network: Network,
    inbox: Inbox,
    coordinator: Outbox,
    arenas: socket.socket,
    address: Address,
    pinning: affinity.Pinning,
    token: str,
    trace: TraceWriter | None,
) -> None:
    """One trainer, from its layer table to its Goodbye. Whatever fails is told to both before it is raised."""
    incoming = inbox.receive(None)
    if incoming is None or not isinstance(incoming.message, m.LayerTable):
        _log.warning("no trainer is here: dropped %s", incoming)
        return
    table = incoming.message
    trainer = network.outbox(table.inbox)
    session: Session | None = None
    try:
        most = len(pinning.cores)
        backend, reason = load(table.backend, min(table.threads or pinning.threads, most))
        _log.info("backend %s", reason)
        peers = trainer, coordinator, arenas
        session = Session(table, backend, *peers, token=token, address=address, max_threads=most, trace=trace)
        coordinator.send(m.Calibration(cpu_update_s=seconds_per_parameter(backend, table.layers)))
        session.run(inbox)
        coordinator.send(m.SessionEnded())
    except Exception as error:
        if not isinstance(error, PeerDied):
            step, lid = session.place if session is not None else (None, None)
            text = f"{type(error).__name__}: {error}"
            for outbox in (trainer, coordinator):
                outbox.send(m.Failure(step=step, lid=lid, error=text, traceback=traceback.format_exc()))
        raise
    finally:
        if session is not None:
            session.close()
        network.drop(trainer)


class Session:
    """The optimizer's part in one trainer's run. At most `max_threads` update at a time."""

    def __init__(
        self,
        table: m.LayerTable,
        backend: Backend,
        trainer: Outbox,
        coordinator: Outbox,
        arenas: socket.socket,
        *,
        token: str,
        address: Address,
        max_threads: int,
        trace: TraceWriter | None,
    ) -> None:
        self._backend, self._max_threads = backend, max_threads
        allow_descriptors(len(table.layers))
        self._trainer, self._coordinator = trainer, coordinator
        self._queue = UpdateQueue(table.layers, speculate=table.banks == 2)
        self._plans = PlanBook("optimizer", len(table.layers))
        # The trainer connected before it sent its table. Accepted now, lest the next one's arenas go to this one.
        connection = accept(arenas)
        self._arenas = Arenas(table.layers, backend, connection, token=token, address=address, banks=table.banks)
        self._progress = Progress(trace, [layer.name for layer in table.layers])
        self._working_on: int | None = None

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The step and layer at work, for a failure's report."""
        return (self._queue.step if self._queue.step >= 0 else None), self._working_on

    def run(self, inbox: Inbox) -> None:
        """Serve until the trainer says Goodbye."""
        while True:
            if idle := self._queue.idle and self._arenas.pending is None:
                self._progress.rests()
            incoming = inbox.receive(None if idle else 0.0)
            if incoming is None:
                self._work()
            elif isinstance(incoming.message, m.Goodbye):
                return
            else:
                self._handle(incoming.message)

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.GradReady(lid=lid):
                self._progress.arrived(lid, time.monotonic())
                if (done := self._queue.grad_ready(message)) is not None:
                    self._send(done)
            case m.Verdict(skipped=skipped):
                done_now = self._queue.verdict(message)
                for done in done_now if skipped else ():
                    self._progress.undone(done.lid)
                self._send(*done_now)
            case m.StepBegin():
                self._queue.begin(message)
            case m.Plan():
                self._coordinator.send(self._plans.on_plan(message))
            case m.AllocatePlanes(lid=lid):
                self._working_on = lid
                self._arenas.request(lid)
                self._working_on = None
            case m.TakeOver(lid=lid):
                self._require_plan(message, "cpu")
                self._queue.take_over(lid)
            case m.GiveUp(lid=lid):
                self._require_plan(message, "gpu")
                self._queue.give_up(lid)
                self._arenas.release(lid)
            case m.PositionsLearned(positions=positions):
                self._queue.learn_positions(positions)
            case m.SetMode(speculate=speculate):
                self._queue.speculate = speculate and self._arenas.banks == 2
                _log.info("updates %s", "ahead of the verdict" if speculate else "wait for the verdict")
            case m.SetThreads(threads=threads):
                self._backend.threads = min(threads, self._max_threads)
                _log.info("updating with %d threads", self._backend.threads)
            case m.PlanApplied():
                self._plans.forget(message.plan_id)
                _log.info("plan %d holds from step %d on", message.plan_id, message.step)
            case _:
                raise TypeError(f"an optimizer has no use for {type(message).__name__}")

    def _require_plan(self, handover: m.TakeOver | m.GiveUp, updates: str) -> None:
        """Raise `OwnershipError` unless an acknowledged plan has this handover, before the step that comes next."""
        lid = handover.lid
        if not self._plans.allows(handover.plan_id, lid, updates) or lid not in self._arenas:
            raise OwnershipError(f"layer {lid} cannot go to the {updates}: no plan says so, or it has no planes")
        if handover.step != self._queue.step + 1:
            raise OwnershipError(f"a handover before step {handover.step}, after step {self._queue.step}")

    def _work(self) -> None:
        """One tile of the most urgent update; and one piece of new memory, which so never holds an update up long."""
        if (tile := self._queue.next_tile()) is not None:
            self._working_on = tile.lid
            self._update(tile)
        if (lid := self._arenas.pending) is not None:
            self._working_on = lid
            began_s = time.monotonic()
            self._arenas.touch_next()
            self._progress.touched(lid, began_s, time.monotonic())
        self._working_on = None

    def _update(self, tile: Tile) -> None:
        """One tile, and what follows from it."""
        planes = self._arenas.segments[tile.lid][tile.segment]
        began_s = time.monotonic()
        numbers = _scalars(tile.hyper, tile.count, tile.scale)
        planes.update(self._backend, tile.start, tile.stop, numbers, source=tile.source, target=tile.target)
        if tile.begins:
            self._progress.undone(tile.lid)
        self._progress.updated(tile.lid, tile.step, began_s, time.monotonic())
        if (done := self._queue.tile_done(tile)) is not None:
            self._send(done)

    def _send(self, *finished: m.WeightsReady) -> None:
        for done in finished:
            sent_s = time.monotonic()  # before it is: the trainer may have taken it in when `send` returns
            self._trainer.send(done)
            self._progress.sent(done.lid, done.step, sent_s)
        if finished and self._queue.idle:
            self._coordinator.send(self._progress.report(self._queue.step, self._backend.threads))

    def close(self) -> None:
        """Give all memory back."""
        self._arenas.close()
        self._progress.close()


@lru_cache(maxsize=256)
def _scalars(hyper: m.GroupHyper, count: int, scale: float) -> Scalars:
    return scalars(Hyper(**dict(zip(type(hyper).__slots__, astuple(hyper), strict=True))), count, scale)


if __name__ == "__main__":
    sys.exit(main())
