"""The door at which other processes of this user ask for weights that are lent: a Unix socket in the run's folder.

    borrower ── take (token, numbers of memories that it has mapped) ──▶ lender      attach, renew
    borrower ◀── given (step, tensors, memories; descriptors), refused ── lender
    borrower ◀── moved (bytes of memories; the descriptor of a copy) ──── lender     before these bytes are written
    borrower ── seen ──▶ lender                                                      once the copy is mapped over them
    borrower ── release ──▶ lender, or the borrower is gone

`Lender` is a thread of the trainer's. It lends what `memory.lending` has; `hytrain.weights` is the borrower. Messages
are JSON. What may be long is in memory of its own, whose descriptor comes first.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hytrain.memory.arena import Memory
from hytrain.memory.lending import Lending, Loan, Moved
from hytrain.run.link import THREAD_PREFIX

#: More than the kernel takes in one datagram, and of descriptors as many as it takes.
MAX_BYTES: Final = 1 << 20
MAX_DESCRIPTORS: Final = 250
SEND_TIMEOUT_S: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")
_ANOTHER: Final = "the token is another run's"


def door(socket_dir: str, rank: int) -> str:
    """Where the trainer of this rank lends its weights."""
    return os.path.join(socket_dir, f"weights-{rank}")


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def send(connection: socket.socket, kind: str, body: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message with a body of any length, and descriptors."""
    text = json.dumps(body).encode()
    letter = os.memfd_create("hytrain-letter", os.MFD_CLOEXEC)
    try:
        with open(letter, "wb", closefd=False) as file:
            file.write(text)
        parts = [descriptors[at : at + MAX_DESCRIPTORS] for at in range(0, len(descriptors), MAX_DESCRIPTORS)]
        head = {"kind": kind, "parts": len(parts)}
        socket.send_fds(connection, [json.dumps(head).encode()], [letter])
        for part in parts:
            socket.send_fds(connection, [b"descriptors"], list(part))
    finally:
        os.close(letter)


def receive(connection: socket.socket) -> tuple[str, Any, list[int]] | None:
    """What `send` has sent; None if the other end is closed. Raises `OSError` or `ValueError` for anything else."""
    found = list[int]()
    try:
        frame, found, _, _ = socket.recv_fds(connection, MAX_BYTES, 1)
        if not frame:
            return None
        head = json.loads(frame)
        with open(found.pop(), "rb") as letter:
            letter.seek(0)
            body = json.load(letter)
        for _ in range(head["parts"]):
            _, more, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_DESCRIPTORS)
            found += more
        kind, received, found = head["kind"], found, []
        return kind, body, received
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no message of a lender: {error!r}") from None
    finally:
        for descriptor in found:
            os.close(descriptor)


class Connection:
    """A borrower, at this end."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises `OSError` if it has gone again."""
        self.socket = connection
        self.pid, self.user = peer(connection)
        self.pidfd = os.pidfd_open(self.pid)  # a child that it has forked may keep the connection open
        self.loan: Loan | None = None
        self.is_moving, self._told = False, 0

    def tell(self, moved: Sequence[Moved], into: Memory) -> None:
        """Its answer is waited for, unless it is gone. One that does not read has not answered."""
        self.is_moving, self._told = True, self._told + 1
        with contextlib.suppress(OSError):
            send(self.socket, "moved", [self._told, moved], [into.descriptor])

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)

    def has_seen(self, told: int) -> None:
        """It may have been told another time since."""
        if told == self._told:
            self.is_moving = False


class Lender:
    """Opens the door, and serves all who come until `close`."""

    def __init__(self, lending: Lending, *, socket_dir: str, token: str, rank: int) -> None:
        self._lending, self._token, self._path = lending, token, Path(door(socket_dir, rank))
        self._pid = os.getpid()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._path.unlink(missing_ok=True)  # of an earlier trainer
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._wakes, self._wake = socket.socketpair()
        self._connections = dict[int, Connection]()
        self._thread = threading.Thread(target=self._serve, name=THREAD_PREFIX + "lender", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poll = select.poll()
        for each in (self._listener, self._wakes):
            poll.register(each, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wakes.fileno():
                    return
                if descriptor == self._listener.fileno():
                    self._accept(poll)
                    continue
                borrower = self._connections[descriptor]
                if descriptor == borrower.pidfd or not self._heard(borrower):
                    for known in (borrower.socket.fileno(), borrower.pidfd):
                        poll.unregister(known)
                        del self._connections[known]
                    self._part_with(borrower)
                    break  # what else was polled may be of descriptors that are closed now

    def _accept(self, poll: select.poll) -> None:
        with contextlib.suppress(OSError):  # no descriptor is free
            connection, _ = self._listener.accept()
            connection.settimeout(SEND_TIMEOUT_S)
            try:
                known = Connection(connection)
            except OSError:
                connection.close()
                return
            if known.user != os.getuid():
                known.close()
                return
            for each in (connection.fileno(), known.pidfd):
                self._connections[each] = known
                poll.register(each, select.POLLIN)
            with self._lending.changed:
                self._lending.borrowers.add(known)

    def _heard(self, borrower: Connection) -> bool:
        """Do as it asks. Returns whether it is still there, and makes sense."""
        try:
            frame = borrower.socket.recv(MAX_BYTES)
            asked = json.loads(frame) if frame else {}
            match asked.get("kind"):
                case "take":
                    self._give(borrower, str(asked["token"]), int(asked["asked"]), asked["has"])
                case "seen":
                    with self._lending.changed:
                        borrower.has_seen(int(asked["told"]))
                        self._lending.changed.notify_all()
                case "release":
                    self._lending.give_back(borrower)
                case _:
                    return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def _give(self, borrower: Connection, token: str, asked: int, has: Sequence[int]) -> None:
        with self._lending.changed:  # what is given may not move before it was sent
            is_known = hmac.compare_digest(token.encode(), self._token.encode())
            loan = self._lending.take(borrower) if is_known else None
            if loan is None:
                why = "it lends no weights now: its trainer calls opt.lend_weights()" if is_known else _ANOTHER
                send(borrower.socket, "refused", {"asked": asked, "why": why})
                return
            memories = dict[Memory, None].fromkeys(lent.memory for lent in loan.values())
            new = [memory for memory in memories if memory.number not in has]
            body = {
                "asked": asked,
                "step": loan.step,
                "memories": [[memory.number, memory.nbytes] for memory in new],
                "kept": [memory.number for memory in memories if memory.number in has],
                "tensors": [
                    [name, each.kind, str(each.dtype).removeprefix("torch."), list(each.shape), each.memory.number]
                    + [each.offset]
                    for name, each in loan.items()
                ],
            }
            send(borrower.socket, "given", body, [loan.descriptor(memory) for memory in new])

    def _part_with(self, borrower: Connection) -> None:
        with self._lending.changed:
            self._lending.borrowers.discard(borrower)
            self._lending.give_back(borrower)
        borrower.close()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._wake.send(b"-")
        self._thread.join()
        for borrower in {*self._connections.values()}:
            self._part_with(borrower)
        self._path.unlink(missing_ok=True)
        for each in (self._listener, self._wakes, self._wake):
            each.close()
