"""What is fuzzed in one process. A target draws input and hands it over; an undeclared exception is a finding.

    codec         bytes ─▶ decode ─▶ a message, which comes back as it was, or WireError
    handshake     messages in any order ─▶ who has joined and is ready, or HandshakeError
    arena         datagrams with descriptors ─▶ receive_arena: an arena or a refusal, or ValueError, EOFError, OSError
    coordinator   a worker that misbehaves ─▶ commands, or HandshakeError, OwnershipError, ValueError
    strangers     messages with the token ─▶ the same commands as without them

A target returns how many inputs it has handed over. It draws them from any `random.Random`.
"""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hytrain.memory.arena import Arena, receive_arena
from hytrain.run.ownership import OwnershipError
from protocol import handles
from protocol import messages as m
from protocol.address import Address
from protocol.codec import MAX_FRAME_BYTES, WireError, decode, encode
from protocol.handles import ArenaLayout
from protocol.placement import Places
from tests.fuzz.frames import EDGES, Maker
from workers.coordinate.coordinator_state import CoordinatorState
from workers.coordinate.members import HandshakeError, Members
from workers.effects import Answer, Command, Note, Publish, Send

TOKEN: Final = "0123456789abcdef"
#: Inputs for each state machine before it starts anew.
LENGTH: Final = 200
LAYERS: Final = 3
TRAINER, OPTIMIZER, TRAINER_INBOX = Address("trainer", 0), Address("optimizer", 0), "trainer-0-12ab34cd"
STATE: Final[dict[str, Any]] = {
    "run_name": "run",
    "run_dir": "/run",
    "pid": 1,
    "host": "host",
    "replan_every": 1,
    "ranks": 1,
}


class Exhausted(Exception):
    """The bytes are used up."""


class Drawn(random.Random):
    """Draws from given bytes, so that a fuzzer that changes bytes changes what is drawn. Raises `Exhausted`."""

    def __new__(cls, data: bytes) -> Drawn:
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self.data, self._at = data, 0

    def _take(self, count: int) -> int:
        if self._at + count > len(self.data):
            raise Exhausted
        self._at += count
        return int.from_bytes(self.data[self._at - count : self._at], "big")

    def random(self) -> float:
        return self._take(2) / 65536.0

    def getrandbits(self, k: int) -> int:
        count = -(-k // 8)
        return self._take(count) >> (8 * count - k)

    def randbytes(self, n: int) -> bytes:
        return self._take(n).to_bytes(n, "big")


def codec(drawn: random.Random) -> int:
    """The bytes themselves, if they are given."""
    if isinstance(drawn, Drawn):
        _decoded(drawn.data)
        return 1
    maker = Maker(drawn, token=TOKEN)
    for _ in range(LENGTH):
        _decoded(maker.frame())
    return LENGTH


def _decoded(frame: bytes) -> None:
    try:
        envelope = decode(frame, token=TOKEN)
    except WireError:
        return
    again = encode(envelope.message, token=TOKEN, sender=envelope.sender, seq=envelope.seq)
    back = decode(again, token=TOKEN)
    assert encode(back.message, token=TOKEN, sender=back.sender, seq=back.seq) == again, "not the same message"


def handshake(drawn: random.Random) -> int:
    maker = Maker(drawn, token=TOKEN)
    run = Members(ranks=2, limit_s=60.0)
    for _ in range(LENGTH):
        address = maker.address()
        acts: list[Callable[[], object]] = [
            partial(run.join, address, _of(maker, m.Hello)),
            partial(run.ready, address, _of(maker, m.Ready).detail),
            partial(run.leave, address),
            partial(run.detail, address),
        ]
        with suppress(HandshakeError):
            drawn.choice(acts)()
    return LENGTH


def _of(maker: Maker, kind: type[Any]) -> Any:
    return maker.message(kind)


_KNOWN: Final[dict[int, ArenaLayout]] = {
    lid: handles.layout(
        m.Layer(
            lid=lid,
            position=lid,
            name="layer",
            segments=(m.Segment(name="w", numel=100 + lid, dtype="float32", grads_dtype="float32", group=0),),
        )
    )
    for lid in range(LAYERS)
}


def arena(drawn: random.Random) -> int:
    """What may come over the socket for descriptors. None stays open, except for that of an arena."""
    maker = Maker(drawn, token=TOKEN, layers=LAYERS)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10.0)
    with ours, theirs:
        for _ in range(LENGTH // 10):
            before = len(os.listdir("/proc/self/fd"))
            lid = drawn.randrange(LAYERS + 1)
            nbytes = _KNOWN[lid].nbytes if lid in _KNOWN and drawn.random() < 0.8 else drawn.choice(EDGES) or 1
            right = encode(m.PlanesReady(lid=lid), token=TOKEN, sender=OPTIMIZER, seq=0)
            frame = right if drawn.random() < 0.5 else maker.frame()[:4096]
            files = [os.memfd_create("fuzz") for _ in range(drawn.choice([0, 1, 1, 1, 2, 5]))]
            for file in files:
                os.ftruncate(file, drawn.choice([nbytes % 2**20, 0, 4096]))
            socket.send_fds(theirs, [frame or b"\0"], files)
            for file in files:
                os.close(file)
            with suppress(ValueError, EOFError, OSError):
                found = receive_arena(ours, _KNOWN, token=TOKEN)
                if isinstance(found, Arena):
                    assert os.fstat(found.descriptor).st_size == found.layout.nbytes
                    assert not os.get_inheritable(found.descriptor)
                    found.close()
            assert len(os.listdir("/proc/self/fd")) == before, "a descriptor has stayed open"
    return LENGTH // 10


def coordinator(drawn: random.Random) -> int:
    """A worker that misbehaves: it sends what its role may send, at any time."""
    maker = Maker(drawn, token=TOKEN, layers=LAYERS)
    run = Honest(maker)
    for count in range(LENGTH):
        if drawn.random() < 0.6:
            sender, message = run.next()
        else:
            sender = drawn.choice([TRAINER, OPTIMIZER, maker.address()])
            message = maker.message()
        try:
            if drawn.randrange(60):
                commands = run.state.handle(message, sender, float(count))
            else:
                commands = run.state.lose(sender, TRAINER_INBOX)
        except HandshakeError:
            continue
        except (OwnershipError, ValueError):
            return count + 1  # the coordinator process would report it, and end
        run.state.check()
        run.take(commands)
    return LENGTH


def strangers(drawn: random.Random) -> int:
    """Strangers with the token, and with any name but a worker's, change nothing that anybody gets, nor the records.

    They come when the workers have joined: before, they could take their places.
    """
    maker = Maker(drawn, token=TOKEN, layers=LAYERS)
    run, count, waiting = Honest(maker), 0, [f"{TRAINER}-0"]
    alone = CoordinatorState(**STATE)
    while count < LENGTH:
        while run.has_joined and drawn.random() < 0.8:
            count += 1
            address = maker.address()
            maker.inbox = connection = f"{drawn.choice([address, TRAINER])}-{drawn.getrandbits(32):x}"
            message = maker.message()
            if (
                address.role != "monitor"  # whose commands do change something
                and address.owns(connection)
                and address.role in message.by
                and run.state.admits(message, address, connection)
            ):
                with suppress(HandshakeError):
                    commands = run.state.handle(message, address, 0.0)
                    assert all(isinstance(command, Note) for command in commands), commands
                run.state.check()
                if isinstance(message, m.Hello) and address == TRAINER:
                    waiting.append(connection)
            if drawn.random() < 0.1:  # one that has waited, or still does, is gone
                commands = run.state.lose(TRAINER, waiting.pop(drawn.randrange(len(waiting))) if waiting else "x-1")
                assert all(isinstance(command, Note) for command in commands), commands
        sender, message = run.next()
        inbox = TRAINER_INBOX if sender == TRAINER else str(sender)
        assert run.state.admits(message, sender, inbox)
        commands = run.state.handle(message, sender, 0.0)
        assert commands == alone.handle(message, sender, 0.0), "strangers have changed what follows"
        run.take(commands)
        count += 1
    return count


class Honest:
    """A run's trainer and optimizer as they should be, and the coordinator that they talk to."""

    def __init__(self, maker: Maker) -> None:
        self.state = CoordinatorState(**STATE)
        self._maker, self._places, self._plan = maker, Places(("cpu",) * LAYERS), dict[int, m.Plan]()
        table = next(t for t in iter(lambda: _of(maker, m.LayerTable), None) if len(t.layers) == LAYERS)
        table = replace(table, inbox=TRAINER_INBOX, device="cpu", policy="random", k=None)
        self._due = deque[tuple[Address, m.Message]](
            [
                (OPTIMIZER, m.Hello(pid=2, inbox=str(OPTIMIZER))),
                (OPTIMIZER, m.Ready(detail="ready")),
                (TRAINER, m.Hello(pid=3, inbox=TRAINER_INBOX)),
                (TRAINER, table),
                (TRAINER, m.Calibration(d2h_s=1e-9, h2d_s=1e-9, gpu_update_s=1e-9)),
                (OPTIMIZER, m.Calibration(cpu_update_s=1e-8)),
            ]
        )

    @property
    def has_joined(self) -> bool:
        return not any(isinstance(message, m.Hello) for _, message in self._due)

    def next(self) -> tuple[Address, m.Message]:
        """What is due, or the report of the next step."""
        if self._due:
            return self._due.popleft()
        self._maker.step = step = self._maker.step + 1
        times = tuple(m.LayerTimes(lid=lid, forward_s=1e-3, backward_s=2e-3) for lid in range(LAYERS))
        report = m.TrainerReport(
            step=step,
            number=step,
            at_s=float(step),
            wall_time=float(step),
            step_s=self._maker.drawn.uniform(0.01, 0.02),
            measured=step - 1 if step > 1 else None,
            stall_s=0.0,
            exposed_s=0.0,
            middle_s=0.0,
            starved=0.0,
            gather_s=None,
            k=0.5,
            moving=False,
            places=self._places,
            gpu_usable_bytes=None,
            gpu_needed_bytes=None,
            host_free_bytes=None,
            waited_bytes=0,
            activation_bytes=0,
            to_device_bytes=0,
            to_host_bytes=0,
            layers=times,
        )
        return TRAINER, report

    def take(self, commands: Sequence[Command]) -> None:
        """Answer as the workers do. What is sent can be encoded."""
        for command in commands:
            if isinstance(command, (Send, Answer, Publish)):
                answer = command.status if isinstance(command, Publish) else command.message
                assert len(encode(answer, token=TOKEN, sender=OPTIMIZER, seq=0)) < MAX_FRAME_BYTES
            if not isinstance(command, Send):
                continue
            if isinstance(plan := command.message, m.Plan):
                self._plan[plan.plan_id] = plan
                self._due.append((command.to, m.PlanAck(plan_id=plan.plan_id, accepted=True, reason="")))
            if isinstance(command.message, m.Reassign):
                plan = self._plan[command.message.plan_id]
                self._places = plan.places
                applied = m.PlanApplied(
                    plan_id=plan.plan_id, step=plan.step, places=plan.places, moved=1, handover_s=0.0
                )
                self._due.append((TRAINER, applied))


TARGETS: Final[dict[str, Callable[[random.Random], int]]] = {
    "codec": codec,
    "handshake": handshake,
    "arena": arena,
    "coordinator": coordinator,
    "strangers": strangers,
}
