"""The CPU trainer as the trainer sees it: its process, the memory that they share, and what they tell each other.

    lend ─ weights ─▶ compute ─ inputs ─▶ …  forward, backward  … ─ gradients ─▶ receive ─▶ add, to the step's sums

It is this process's child, and talks to it alone, over a Unix socket. Whatever happens to it, training goes on: `lost`
then says why, and `receive` returns None. `shares` calls this.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, Final

from torch import Tensor

from hytrain.cotraining import numerics
from hytrain.cotraining.lending import COPIES, GRADIENTS, INPUTS, MAX_DATAGRAM_BYTES, OTHERS, Lending, spread, views
from hytrain.cotraining.work import Packed
from hytrain.errors import CapacityError, ClusterError
from hytrain.memory.arena import SharedMemory
from hytrain.memory.transfer import Transfer, Transfers
from hytrain.model.layers import clean
from hytrain.model.trained import TrainedParameter
from hytrain.run.cluster import workers_environment
from hytrain.step.engine import Engine
from protocol.address import Address
from protocol.codec import WireError, decode, encode
from protocol.handles import PAGE_BYTES
from protocol.messages import Compute, Computed, Failure, LendMemory, Message, Ready

ADDRESS: Final = Address("cpu_trainer", 0)
#: The module that the process runs.
WORKER: Final = "workers.train.cpu_trainer"
_TRAINER: Final = Address("trainer", 0)
#: It imports torch and Transformers, which takes long on a busy machine.
START_TIMEOUT_S: Final = 120.0
#: A process whose socket has closed is about to end. Only a hang takes longer.
END_S: Final = 60.0
#: The longest wait for an answer, where any is allowed.
LONGEST_S: Final = 1e6


class Partner:
    """A CPU trainer for all of `parameters`. Each part of a batch has a slot for its gradients.

    `work` is what the process needs to build the model and to compute its loss, as JSON. `others` are the tensors that
    the model has besides, by name: the process gets their values. The attribute `others` are the copies that it has.
    `cores` are those that it may use. `lost` says why the process is lost; "" if it is not.
    """

    def __init__(
        self,
        work: Mapping[str, Any],
        parameters: Sequence[TrainedParameter],
        others: Mapping[str, Tensor],
        *,
        engine: Engine,
        transfers: Transfers,
        slots: int,
        cores: Sequence[int],
        threads: int,
        log: Path,
        answer_timeout_s: float,
    ) -> None:
        """Return once the process is ready. Raises `ClusterError` if it does not start."""
        self.lost = ""
        self._pid = os.getpid()
        self._engine, self._parameters = engine, parameters
        self._timeout_s = min(answer_timeout_s, LONGEST_S)
        self._token, self._seq, self._jobs = secrets.token_hex(16), 0, 0
        self._answers: dict[int, Computed] = {}
        self._open = set[int]()
        self._lending = Lending(parameters)
        starts, nbytes = spread(others.values())
        self._gradients = SharedMemory("gradients", slots * self._lending.nbytes)
        self._inputs = SharedMemory("inputs", PAGE_BYTES)
        self._others = SharedMemory("others", max(nbytes, 1))
        self.others = dict(zip(others, views(self._others.mapping, starts, others.values()), strict=True))
        for name, other in others.items():
            self.others[name].copy_(other.detach())
        self._transfers, self._pinned = transfers, set[int]()  # slots
        self._taken: Transfer | None = None  # the last copy out of a slot
        settings = {
            "trainer": self._pid,
            "token": self._token,
            "parameters": _described({clean(known.name): known.own for known in parameters}, self._lending.offsets),
            "others": _described(others, starts),
            "slot_bytes": self._lending.nbytes,
            "cores": list(cores),
            "threads": threads,
            "work": dict(work),
        }
        self._start(settings, log)
        try:
            if not isinstance(self._next(START_TIMEOUT_S), Ready):
                reason = self.lost or f"it was not ready within {START_TIMEOUT_S:.0f} s"
                raise ClusterError(f"the CPU trainer did not start: {reason}; its log is {log}")
        except BaseException:
            self.close()
            raise

    def _start(self, settings: dict[str, Any], log: Path) -> None:
        """Start the process with what it needs: on its input, and as open descriptors."""
        memories = {
            COPIES: self._lending.copies,
            GRADIENTS: self._gradients,
            INPUTS: self._inputs,
            OTHERS: self._others,
        }
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
                env={**workers_environment(), "CUDA_VISIBLE_DEVICES": ""},
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

    def hand_over(self, parts: Sequence[tuple[Any, int]]) -> list[int]:
        """Wait for all updates, and have micro-batches computed, each with its seed of torch. Returns their jobs.

        The gradients of the first one are going to be in slot 0, and so on. Raises `UnsupportedError` if a micro-batch
        cannot be sent.
        """
        packed = [Packed(batch) for batch, _ in parts]
        self._engine.import_written()
        for job in [*self._open]:  # an exception came before somebody received it
            self.receive(job)
        if self._taken is not None:
            self._taken.synchronize()
        for message, descriptor in self._lending.orders():
            self._send(message, descriptor)
        self._make_room(sum(each.nbytes for each in packed))
        at, jobs, settings = 0, [], numerics.present()
        for slot, (each, (_, seed)) in enumerate(zip(packed, parts, strict=True)):
            each.write(self._inputs.mapping, at)
            self._jobs += 1
            jobs.append(self._jobs)
            self._open.add(self._jobs)
            text_bytes = each.text_bytes
            self._send(Compute(job=self._jobs, slot=slot, at=at, text_bytes=text_bytes, seed=seed, numerics=settings))
            at += each.nbytes
        return jobs

    def _make_room(self, nbytes: int) -> None:
        """Lend other memory for inputs, if there is too little. Nobody computes with those before."""
        if nbytes > self._inputs.mapping.nbytes:
            self._inputs.close()
            self._inputs = SharedMemory("inputs", nbytes)
            self._send(LendMemory(memory=INPUTS, nbytes=nbytes), self._inputs.descriptor)

    def receive(self, job: int, *, wait: bool = True) -> Computed | None:
        """The job's answer. None if the process is lost, or if there is no answer yet and it need not `wait`."""
        while job not in self._answers and not self.lost:
            message = self._next(self._timeout_s if wait else 0.0)
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

    def add(self, slot: int, computed: Computed) -> bool:
        """Add the gradients in `slot` to the step's sums, as a backward that is not the last one does.

        Returns whether they are there. They are not if their memory cannot be pinned: then the process is lost.
        """
        at, nbytes = slot * self._lending.nbytes, self._lending.nbytes
        if slot not in self._pinned:
            try:
                self._transfers.pin(self._gradients.mapping.address + at, nbytes, gently=True)
            except CapacityError as error:
                self._lose(str(error))
                return False
            self._pinned.add(slot)
        like = (known.own for known in self._parameters)
        gradients = views(self._gradients.mapping, self._lending.offsets, like, at)
        taken = self._engine.add_gradients(
            [gradient if has else None for gradient, has in zip(gradients, computed.has_gradient, strict=True)]
        )
        self._taken = taken or self._taken
        return True

    def close(self) -> None:
        """End the process, and free the memory. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        self._socket.close()
        self._lending.close()
        self.others = {}
        if self._taken is not None:
            self._taken.synchronize()
        for slot in self._pinned:
            self._transfers.unpin(self._gradients.mapping.address + slot * self._lending.nbytes, self._lending.nbytes)
        for memory in (self._gradients, self._inputs, self._others):
            memory.close()

    def _send(self, message: Message, descriptor: int | None = None) -> None:
        """Nothing happens if the process is lost: `receive` says it."""
        self._seq += 1
        frame = encode(message, token=self._token, sender=_TRAINER, seq=self._seq)
        try:
            socket.send_fds(self._socket, [frame], [] if descriptor is None else [descriptor])
        except TimeoutError:
            self._lose(f"it has not read for {self._timeout_s:.0f} s")
        except (BrokenPipeError, ConnectionResetError):
            return

    def _next(self, timeout_s: float) -> Message | None:
        """The next message. None if none comes in this time, or if the process is lost."""
        readable = {descriptor for descriptor, _ in self._poll.poll(timeout_s * 1e3)}
        if self._socket.fileno() in readable and (frame := self._received()):
            try:
                message = decode(frame, token=self._token).message
            except WireError as error:
                self._lose(str(error))
                return None
            if not isinstance(message, Failure):
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


def _described(tensors: Mapping[str, Tensor], starts: Sequence[int]) -> list[list[Any]]:
    """Name, first byte, dtype and shape of each."""
    dtypes = (str(each.dtype).removeprefix("torch.") for each in tensors.values())
    rows = zip(tensors.items(), starts, dtypes, strict=True)
    return [[name, at, dtype, list(each.shape)] for (name, each), at, dtype in rows]
