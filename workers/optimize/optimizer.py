"""The optimizer process: updates the layers that it owns, in host memory.

    pin cores ─▶ join ─▶ READY
    inbox ─▶ Session._handle ─▶ UpdateQueue ─▶ one tile ─▶ look at the inbox again ─▶ … ─▶ WeightsReady
                    └─▶ Arenas ─▶ one piece of new memory after each tile ─▶ … ─▶ its descriptor

Nothing imported here loads OpenMP. The kernel loads it, after the cores have been pinned, since OpenMP reads the
affinity mask when it loads. One thread calls the kernel. ZeroMQ's threads start before OpenMP binds this thread to a
core. With nothing to update, the process sleeps on its inbox. It serves one trainer at a time, until its Goodbye.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Final

from hytrain.kernels.backend import Backend
from hytrain.kernels.choice import load
from hytrain.kernels.scalars import scalars
from hytrain.memory.arena import allow_descriptors, arena_socket
from hytrain.run.ownership import OwnershipError, PlanBook
from hytrain.run.trace import EVERY_STEP, NO_STEP, TraceWriter
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Inbox, Network, Outbox, PeerDied, PeerNotReading
from protocol.placement import Placement
from workers import affinity
from workers.optimize.arenas import Arenas, accept
from workers.optimize.update_queue import Tile, UpdateQueue
from workers.optimize.update_rate import seconds_per_parameter
from workers.optimize.work_log import Progress
from workers.worker import begin_worker, say_ready

ACCEPT_TIMEOUT_S: Final = 30.0

_log = logging.getLogger("optimizer")


def main() -> int:
    """Run until the launcher or the trainer is gone; return the process's exit status."""
    arguments = begin_worker(__doc__)
    address = Address("optimizer", arguments.rank)
    pinning = affinity.choose(arguments.cores, arguments.threads, rank=arguments.rank, ranks=arguments.ranks)
    affinity.pin(pinning)
    _log.info("pinned: %s", pinning.describe())
    trace = TraceWriter(arguments.run_dir, address, EVERY_STEP if arguments.trace else NO_STEP)
    with Network(arguments.socket_dir, token=arguments.token, address=address) as network:
        return Server(network, pinning, trace, life_fd=arguments.life_fd).serve(arguments.ready_fd)


class Server:
    """Joins the run and serves its trainers, one after the other."""

    def __init__(self, network: Network, pinning: affinity.Pinning, trace: TraceWriter, *, life_fd: int) -> None:
        self.network, self.pinning, self.trace = network, pinning, trace
        self.inbox = Inbox(network)
        self.inbox.watch_descriptor("the launcher", life_fd)
        self.inbox.admit(str(COORDINATOR))
        self.coordinator = network.outbox(COORDINATOR)
        self._calibration: m.Calibration | None = None  # while there is a trainer

    def serve(self, ready_fd: int) -> int:
        """Serve until the launcher or the trainer is gone."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(arena_socket(self.network.socket_dir, self.network.address.rank))
                listener.listen()
                listener.settimeout(ACCEPT_TIMEOUT_S)
                self.join()
                say_ready(ready_fd)
                while True:
                    self._serve_trainer(listener)
        except PeerDied as death:
            _log.info("%s is gone, exiting", death.name)
            return 0

    def join(self, attempt: int = 0) -> None:
        """Tell the coordinator who this is; or, at an attempt of another one to find out, what the first one knew."""
        if attempt:
            _log.warning("another coordinator has been started")
        self.coordinator.send(m.Hello(pid=os.getpid(), inbox=str(self.network.address), attempt=attempt))
        self.coordinator.send(
            m.Ready(detail=self.pinning.describe_place(), cores=len(self.pinning.cores))
        )  # each report has the thread count
        if self._calibration is not None:
            self.coordinator.send(self._calibration)

    def _serve_trainer(self, listener: socket.socket) -> None:
        """Serve one trainer, from its layer table to its Goodbye. Before raising an error, send both a `Failure`."""
        incoming = self.inbox.receive(None)
        if incoming is not None and isinstance(incoming.message, m.Introduce):
            return self.join(incoming.message.attempt)
        if incoming is None or not isinstance(incoming.message, m.LayerTable):
            if incoming is None or not isinstance(incoming.message, m.Ping | m.Welcome):  # a Ping may cross a Goodbye
                _log.warning("there is no trainer: dropped %s", incoming)
            return
        table, coordinator = incoming.message, self.coordinator
        self.inbox.admit(str(COORDINATOR), table.inbox)
        trainer = self.network.outbox(table.inbox)
        session: Session | None = None
        try:
            pinning = self.pinning
            backend, reason = load(table.backend, min(table.threads or pinning.threads, len(pinning.cores)))
            _log.info("backend %s", reason)
            session = Session(self, table, backend, trainer, listener)
            layers = [layer for layer in table.layers if not layer.stays_on_device]
            self._calibration = m.Calibration(cpu_update_s=seconds_per_parameter(backend, layers) if layers else None)
            coordinator.send(self._calibration)
            session.run(self.inbox)
            coordinator.send(m.Goodbye())
        except Exception as error:
            if not isinstance(error, PeerDied):
                step, lid = session.place if session is not None else (None, None)
                text = f"{type(error).__name__}: {error}"
                for outbox in (trainer, coordinator):
                    outbox.send(m.Failure(step=step, lid=lid, error=text, traceback=traceback.format_exc()))
            raise
        finally:
            self._calibration = None
            if session is not None:
                session.close()
            self.network.drop(trainer)
            self.inbox.admit(str(COORDINATOR))


class Session:
    """The optimizer's part of one trainer's run. At most one thread per core updates at a time."""

    def __init__(
        self, server: Server, table: m.LayerTable, backend: Backend, trainer: Outbox, listener: socket.socket
    ) -> None:
        self._backend, self._max_threads = backend, len(server.pinning.cores)
        allow_descriptors(len(table.layers))
        self._server, self._trainer, self._coordinator = server, trainer, server.coordinator
        self._queue = UpdateQueue(table.layers, speculate=table.banks == 2)
        self._plans = PlanBook("optimizer", len(table.layers))
        # The trainer connected before it sent its table. Accept now, or the next trainer's arenas would go to this one.
        connection, token, address = accept(listener), server.network.token, server.network.address
        self._arenas = Arenas(table.layers, backend, connection, token=token, address=address, banks=table.banks)
        self._progress = Progress(server.trace, [layer.name for layer in table.layers])
        self._working_on: int | None = None

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The current step and layer, for a `Failure`."""
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
            elif isinstance(incoming.message, m.Ping):
                inbox.reply(incoming.sender, m.Pong())
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
                if self._progress.begins(message.step):
                    self._tell(m.Traced())
                self._queue.begin(message)
            case m.TraceSteps(first=first, steps=steps):
                self._progress.trace(range(first, first + steps))
                if not steps:
                    self._tell(m.Traced())
            case m.Plan():
                self._coordinator.send(self._plans.on_plan(message))
            case m.AllocatePlanes(lid=lid):
                self._working_on = lid
                self._arenas.request(lid)
                self._working_on = None
            case m.ReleasePlanes(lid=lid):
                if lid in self._queue.banks:
                    raise OwnershipError(f"the planes of layer {lid} are in use")
                if lid in self._arenas:  # or else they were refused
                    self._arenas.release(lid)
            case m.Evicted(lid=lid):
                self._arenas.adopt(lid)
            case m.TakeOver(lid=lid, banks=banks):
                self._planned(message, "cpu")
                self._queue.take_over(lid, banks)
            case m.Counted(lid=lid, counts=counts):
                self._queue.counted(lid, counts)
            case m.GiveUp(lid=lid):
                planned = self._planned(message, "gpu")
                if lid in self._queue.banks:  # or else its state has visited the GPU
                    self._queue.give_up(lid)
                if planned.state == "gpu":
                    self._arenas.release(lid)
            case m.PositionsLearned(positions=positions):
                self._queue.learn_positions(positions)
            case m.SetMode(speculate=speculate):
                self._queue.speculate = speculate and self._arenas.banks == 2
                _log.info("updates %s", "run ahead of the verdict" if speculate else "wait for the verdict")
            case m.SetThreads(threads=threads):
                self._backend.threads = min(threads, self._max_threads)
                _log.info("updating with %d threads", self._backend.threads)
            case m.PlanApplied():
                self._plans.forget(message.plan_id)
                _log.info("plan %d holds from step %d on", message.plan_id, message.step)
            case m.Introduce(attempt=attempt):
                self._server.join(attempt)
            case m.Welcome():
                pass  # it has joined again
            case _:
                raise TypeError(f"the optimizer cannot handle {type(message).__name__}")

    def _planned(self, handover: m.TakeOver | m.GiveUp, updates: str) -> Placement:
        """The placement of a layer that is handed over.

        Raises `OwnershipError` unless an acknowledged plan contains this handover, before the next step.
        """
        lid = handover.lid
        planned = self._plans.planned(handover.plan_id, lid)
        if planned is None or planned.updates != updates or lid not in self._arenas:
            raise OwnershipError(f"layer {lid} cannot go to the {updates}: it is in no plan, or it has no planes")
        if handover.step != self._queue.step + 1:
            raise OwnershipError(f"a handover before step {handover.step} came after step {self._queue.step}")
        return planned

    def _work(self) -> None:
        """Update one tile of the most urgent layer, and touch one piece of new memory; both are short.

        At the start, when nothing else is to be done, a whole layer's memory is touched.
        """
        if (tile := self._queue.next_tile()) is not None:
            self._working_on = tile.lid
            self._update(tile)
        if (lid := self._arenas.pending) is not None:
            self._working_on = lid
            began_s, threads = time.monotonic(), self._backend.threads
            if is_first := self._queue.step < 0:  # the trainer waits for its first memory, and leaves it all cores
                self._backend.threads = self._max_threads
            self._arenas.touch_next(whole=is_first)
            self._backend.threads = threads
            self._progress.touched(lid, began_s, time.monotonic())
        self._working_on = None

    def _update(self, tile: Tile) -> None:
        """Update one tile, and send WeightsReady if it was the layer's last."""
        planes = self._arenas.segments[tile.lid][tile.segment]
        began_s = time.monotonic()
        self._backend.float_mode = tile.float_mode
        scale = {"by" if tile.rounds else "scale": tile.scale}
        numbers = scalars(tile.hyper, tile.count, **scale)
        planes.update(self._backend, tile.start, tile.stop, numbers, source=tile.source, target=tile.target)
        if tile.begins:
            self._progress.undone(tile.lid)
        self._progress.updated(tile.lid, tile.step, began_s, time.monotonic())
        if (done := self._queue.tile_done(tile)) is not None:
            self._send(done)

    def _send(self, *finished: m.WeightsReady) -> None:
        for done in finished:
            sent_s = time.monotonic()  # read before sending: the trainer may have handled it when `send` returns
            self._trainer.send(done)
            self._progress.sent(done.lid, done.step, sent_s)
        if finished and self._queue.idle:
            self._tell(self._progress.report(self._queue.step, self._backend.threads))

    def _tell(self, message: m.Message) -> None:
        with suppress(PeerNotReading):  # the coordinator hangs; training goes on
            self._coordinator.send(message)

    def close(self) -> None:
        """Free all memory and write the rest of the timeline."""
        self._arenas.close()
        self._progress.close()


if __name__ == "__main__":
    sys.exit(main())
