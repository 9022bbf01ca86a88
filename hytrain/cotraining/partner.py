"""The CPU trainer as the trainer sees it: its process, the memory that they share, and what they tell each other.

    lend ─ weights ─▶ compute ─ inputs ─▶ …  forward, backward  … ─ gradients ─▶ receive ─▶ add, to the step's sums

It is this process's child, and talks to it alone, over a Unix socket. Whatever happens to it, training goes on: `lost`
then says why, and `receive` returns None. `recipe.cotraining` calls this.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from hytrain.cotraining.lending import BUFFERS, COPIES, GRADIENTS, INPUTS, MAX_DATAGRAM_BYTES, Lending, spread, views
from hytrain.errors import ClusterError
from hytrain.memory.arena import SharedMemory
from hytrain.model.trained import TrainedParameter
from hytrain.run.cluster import workers_environment
from hytrain.step.engine import Engine
from protocol.address import Address
from protocol.codec import WireError, decode, encode
from protocol.messages import Compute, Computed, Failure, Message, Ready

ADDRESS: Final = Address("cpu_trainer", 0)
_TRAINER: Final = Address("trainer", 0)
#: It imports torch and Transformers, which takes long on a busy machine.
START_TIMEOUT_S: Final = 120.0
#: A process whose socket has closed ends within this time.
END_S: Final = 1.0


class Partner:
    """A CPU trainer for all of `parameters`. Each part of a batch has a slot: for its inputs, and for its gradients.

    `model` is what the process needs to build the model, as JSON; it gets the values of `buffers`. `cores` are those
    that it may use. `lost` says why the process is lost; "" if it is not.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[TrainedParameter],
        *,
        engine: Engine,
        slots: int,
        input_bytes: int,
        cores: Sequence[int],
        threads: int,
        log: Path,
        answer_timeout_s: float,
    ) -> None:
        """Return once the process is ready. `input_bytes` is for each slot.

        Raises `ClusterError` if it does not start.
        """
        self.lost = ""
        self._engine, self._parameters, self._timeout_s = engine, parameters, answer_timeout_s
        self._token, self._seq, self._jobs = secrets.token_hex(16), 0, 0
        self._answers: dict[int, Computed] = {}
        self._lending, self._input_bytes = Lending(parameters), input_bytes
        starts, buffer_bytes = spread(buffers.values())
        self._gradients = SharedMemory("gradients", slots * self._lending.nbytes)
        self._inputs = SharedMemory("inputs", slots * input_bytes)
        self._buffers = SharedMemory("buffers", max(buffer_bytes, 1))
        for view, buffer in zip(views(self._buffers.mapping, starts, buffers.values()), buffers.values(), strict=True):
            view.copy_(buffer)
        settings = {
            "token": self._token,
            "parameters": _described({known.name: known.own for known in parameters}, self._lending.offsets),
            "buffers": _described(buffers, starts),
            "slot_bytes": self._lending.nbytes,
            "cores": list(cores),
            "threads": threads,
            "model": dict(model),
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
            BUFFERS: self._buffers,
        }
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(self._timeout_s)
        settings["memories"] = [[each.descriptor, each.mapping.nbytes] for _, each in sorted(memories.items())]
        settings["socket"] = theirs.fileno()
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.cpu_trainer"],
                stdin=subprocess.PIPE,
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

    def lend(self) -> None:
        """Wait for all updates, and tell the CPU trainer where the current weights are."""
        self._engine.import_written()
        for message, descriptor in self._lending.orders():
            self._send(message, descriptor)

    def compute(self, slot: int, inputs: Mapping[str, Tensor], divisor: float, seed: int) -> int:
        """Have one part of a batch computed, and return the job's number.

        `inputs` are those of the model's forward: int64, shape (rows, length) each. Its loss is divided by `divisor`.
        `seed` is torch's for this part.
        """
        first, *_ = inputs.values()
        at = slot * self._input_bytes
        starts = range(0, len(inputs) * first.nbytes, first.nbytes)
        for view, tensor in zip(views(self._inputs.mapping, starts, inputs.values(), at), inputs.values(), strict=True):
            view.copy_(tensor)
        rows, length = first.shape
        self._jobs += 1
        self._send(
            Compute(
                job=self._jobs,
                slot=slot,
                fields=tuple(inputs),
                at=at,
                rows=rows,
                length=length,
                divisor=divisor,
                seed=seed,
            )
        )
        return self._jobs

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
        return self._answers.pop(job, None)

    def add(self, slot: int, computed: Computed) -> None:
        """Add the gradients in `slot` to the step's sums, as a backward that is not the last one does."""
        like = (known.own for known in self._parameters)
        gradients = views(self._gradients.mapping, self._lending.offsets, like, slot * self._lending.nbytes)
        self._engine.add_gradients(
            [gradient if has else None for gradient, has in zip(gradients, computed.has_gradient, strict=True)]
        )

    def close(self) -> None:
        """End the process, and free the memory."""
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        self._socket.close()
        self._lending.close()
        for memory in (self._gradients, self._inputs, self._buffers):
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
        except subprocess.TimeoutExpired:
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
