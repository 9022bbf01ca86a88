"""The CPU trainer as the trainer sees it: its process, the memory that they share, and what they tell each other.

    lend ─ weights ─▶ compute ─ inputs ─▶ …  forward, backward  … ─ gradients ─▶ receive ─▶ add, to the step's sums

It is this process's child, and talks to it alone, over a Unix socket: of several ranks, to the first. Whatever happens
to it, training goes on: `lost` then says why, and `receive` returns None. `shares` calls this.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, Final

from examples.studies.cotraining import numerics
from examples.studies.cotraining.whole import Shared
from examples.studies.cotraining.wire import (
    GRADIENTS,
    INPUTS,
    MAX_DATAGRAM_BYTES,
    OTHERS,
    Compute,
    Computed,
    Failed,
    LendMemory,
    Message,
    Ready,
    TakeBack,
    WeightsAt,
    read,
    written,
)
from examples.studies.cotraining.work import Packed
from hytrain.config import ClusterConfig, workers_environment
from hytrain.errors import ClusterError
from hytrain.memory.arena import Memory, SharedMemory
from hytrain.memory.lending import Lent
from protocol.handles import PAGE_BYTES

#: The module that the process runs, and the folder from which it is imported.
WORKER: Final = "examples.studies.cotraining.cpu_trainer"
ROOT: Final = Path(__file__).resolve().parents[3]
#: It imports torch and Transformers, which takes long on a busy machine.
START_TIMEOUT_S: Final = 120.0
#: A process whose socket has closed is about to end. Only a hang takes longer.
END_S: Final = 60.0
#: The longest wait for an answer, where any is allowed.
LONGEST_S: Final = 1e6
#: Places are told in messages of at most so many parameters, each of which fits into a datagram.
MOST_PLACES: Final = 2000


def hang_s() -> float:
    """How long the CPU trainer may not answer, in seconds."""
    return min(ClusterConfig.resolve().hang_timeout_s, LONGEST_S)


class Partner:
    """A CPU trainer for all parameters of a model.

    `work` is what the process needs to build the model and to compute its loss, as JSON. `gradients` has the memory
    with a slot for each part of a batch, `others` the tensors that the model has besides the parameters. `cores` are
    those that it may use. `lost` says why the process is lost; "" if it is not.
    """

    def __init__(
        self,
        work: Mapping[str, Any],
        gradients: Shared,
        others: Shared,
        *,
        cores: Sequence[int],
        threads: int,
        log: Path,
    ) -> None:
        """Return once the process is ready. Raises `ClusterError` if it does not start."""
        assert gradients.made is not None and others.made is not None, "of several ranks, the first one has made them"
        self.lost = ""
        self._names = [*gradients.layout.like]
        self._timeout_s = hang_s()
        self._jobs = 0
        self._answers: dict[int, Computed] = {}
        self._open = set[int]()
        self._memories: dict[Memory, int] = {}  # that are lent, and their numbers
        self._next_memory = OTHERS + 1
        self._places: list[tuple[int, int]] = [(-1, -1)] * len(self._names)  # what the process was told last
        self._gradients, self._others = gradients.made, others.made
        self._inputs = SharedMemory("inputs", PAGE_BYTES)
        settings = {
            "trainer": os.getpid(),
            "parameters": gradients.layout.described(),
            "others": others.layout.described(),
            "slot_bytes": gradients.layout.nbytes,
            "cores": list(cores),
            "threads": threads,
            "work": dict(work),
        }
        self._start(settings, log)
        try:
            if not isinstance(self._heard(START_TIMEOUT_S), Ready):
                reason = self.lost or f"it was not ready within {START_TIMEOUT_S:.0f} s"
                raise ClusterError(f"the CPU trainer did not start: {reason}; its log is {log}")
        except BaseException:
            self.close()
            raise

    def _start(self, settings: dict[str, Any], log: Path) -> None:
        """Start the process with what it needs: on its input, and as open descriptors."""
        memories = {GRADIENTS: self._gradients, INPUTS: self._inputs, OTHERS: self._others}
        environment = workers_environment()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(self._timeout_s)
        settings["memories"] = [[each.descriptor, each.mapping.nbytes] for _, each in sorted(memories.items())]
        settings["socket"] = theirs.fileno()
        with log.open("ab") as output, theirs:
            self._process = Popen(
                [sys.executable, "-P", "-m", WORKER],
                stdin=PIPE,
                stdout=output,
                stderr=output,
                env=environment
                | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join((str(ROOT), environment["PYTHONPATH"]))},
                pass_fds=(theirs.fileno(), *(each.descriptor for each in memories.values())),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._poll = select.poll()  # `select.select` cannot take descriptors above 1023
        for descriptor in (self._socket.fileno(), self._pidfd):
            self._poll.register(descriptor, select.POLLIN)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(settings).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def hand_over(self, lent: Mapping[str, Lent], parts: Sequence[Sequence[tuple[Packed, int]]]) -> list[int]:
        """Have parts computed with the weights that are lent. Returns their jobs.

        Each part has one micro-batch or several, each with its seed of torch. The means of their gradients are going to
        be in slot 0 for the first part, and so on. Nobody may still copy out of the slots.
        """
        for job in [*self._open]:  # an exception came before somebody received it
            self.receive(job)
        self._tell_places([lent[name] for name in self._names])
        self._make_room(sum(each.nbytes for part in parts for each, _ in part))
        at, jobs, settings = 0, [], numerics.present()
        for slot, part in enumerate(parts):
            micro_batches = []
            for each, seed in part:
                self._inputs.mapping.buffer[at : at + len(each.data)] = each.data
                micro_batches.append((at, each.text_bytes, seed))
                at += each.nbytes
            self._jobs += 1
            jobs.append(self._jobs)
            self._open.add(self._jobs)
            self._send(Compute(job=self._jobs, slot=slot, micro_batches=micro_batches, numerics=settings))
        return jobs

    def _tell_places(self, lent: Sequence[Lent]) -> None:
        """Lend the memory that is new, say which weights are elsewhere now, and take back what has none any more."""
        for memory in dict.fromkeys(each.memory for each in lent):
            if memory not in self._memories:
                self._memories[memory], self._next_memory = self._next_memory, self._next_memory + 1
                self._send(LendMemory(memory=self._memories[memory], nbytes=memory.nbytes), memory.descriptor)
        places = [(self._memories[each.memory], each.offset) for each in lent]
        moved = [index for index, place in enumerate(places) if place != self._places[index]]
        for number in sorted({places[index][0] for index in moved}):
            there = [index for index in moved if places[index][0] == number]
            for first in range(0, len(there), MOST_PLACES):
                some = there[first : first + MOST_PLACES]
                self._send(WeightsAt(memory=number, parameters=some, offsets=[places[index][1] for index in some]))
        for memory in self._memories.keys() - {each.memory for each in lent}:
            self._send(TakeBack(memory=self._memories.pop(memory)))
        self._places = places

    def _make_room(self, nbytes: int) -> None:
        """Lend other memory for inputs, if there is too little. Nobody computes with those before."""
        if nbytes > self._inputs.mapping.nbytes:
            self._inputs.close()
            self._inputs = SharedMemory("inputs", nbytes)
            self._send(LendMemory(memory=INPUTS, nbytes=nbytes), self._inputs.descriptor)

    def receive(self, job: int, *, wait: bool = True) -> Computed | None:
        """The job's answer. None if the process is lost, or if there is no answer yet and it need not `wait`."""
        while job not in self._answers and not self.lost:
            message = self._heard(self._timeout_s if wait else 0.0)
            if isinstance(message, Computed):
                self._answers[message.job] = message
            elif message is not None:
                self._lose(f"it sent {type(message).__name__}")
            elif not wait:
                break
            elif not self.lost:
                self._lose(f"it has not answered for {self._timeout_s:.0f} s")
        answer = self._answers.pop(job, None)
        if answer is not None or self.lost:
            self._open.discard(job)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        self._socket.close()
        self._inputs.close()

    def _send(self, message: Message, descriptor: int | None = None) -> None:
        """Nothing happens if the process is lost: `receive` says it."""
        try:
            socket.send_fds(self._socket, [written(message)], [] if descriptor is None else [descriptor])
        except TimeoutError:
            self._lose(f"it has not read for {self._timeout_s:.0f} s")
        except (BrokenPipeError, ConnectionResetError):
            return

    def _heard(self, timeout_s: float) -> Message | None:
        """The next message. None if none comes in this time, or if the process is lost."""
        readable = {descriptor for descriptor, _ in self._poll.poll(timeout_s * 1e3)}
        if self._socket.fileno() in readable and (frame := self._received()):
            message = read(frame)
            if not isinstance(message, Failed):
                return message
            self._lose(message.error)
        elif readable:
            self._lose(self._how_it_ended())
        return None

    def _received(self) -> bytes:
        """A datagram, or b"" if the other end is closed. If it closed before it had read all, that is told first."""
        with contextlib.suppress(ConnectionResetError):
            return self._socket.recv(MAX_DATAGRAM_BYTES)
        return self._socket.recv(MAX_DATAGRAM_BYTES)

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(END_S)
        except TimeoutExpired:
            return "it closed its socket"
        return f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self._process.kill()
