"""What is fuzzed in one process. A target draws input and hands it over; an undeclared exception is a finding.

    codec         bytes ─▶ decode ─▶ a message, which comes back as it was, or WireError
    handshake     messages in any order ─▶ both sides' state machines, or HandshakeError
    handles       layers, sizes and handles ─▶ layouts within bounds, or HandleError
    arena         datagrams with descriptors ─▶ receive_arena: an arena or a refusal, or ValueError, EOFError, OSError
    coordinator   a run's messages, and others in between ─▶ commands, or HandshakeError, OwnershipError, ValueError

A target returns how many inputs it has handed over. It draws them from any `random.Random`.
"""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hytrain.memory.arena import ArenaFile, receive_arena
from hytrain.run.ownership import OwnershipError
from protocol import handles
from protocol import messages as m
from protocol.address import Address
from protocol.codec import MAX_FRAME_BYTES, WireError, decode, encode
from protocol.handles import ArenaLayout, HandleError, TensorHandle
from protocol.handshake import HandshakeError, RunHandshake, WorkerHandshake
from tests.fuzz.frames import EDGES, Maker
from workers.coordinator_state import CoordinatorState
from workers.effects import Answer, Publish, Send

TOKEN: Final = "0123456789abcdef"
#: Inputs for each state machine before it starts anew.
LENGTH: Final = 200
LAYERS: Final = 3
TRAINER, OPTIMIZER = Address("trainer", 0), Address("optimizer", 0)


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
    run = RunHandshake(run_name="run", pid=1)
    worker = WorkerHandshake(TRAINER, pid=1, inbox="trainer-0")
    for _ in range(LENGTH):
        address = maker.address()
        acts: list[Callable[[], object]] = [
            partial(run.on_hello, address, _of(maker, m.Hello)),
            partial(run.on_ready, address, _of(maker, m.Ready)),
            partial(run.leave, address),
            partial(run.detail, address),
            worker.hello,
            partial(worker.on_welcome, _of(maker, m.Welcome)),
            partial(worker.ready, "ready"),
        ]
        with suppress(HandshakeError):
            drawn.choice(acts)()
        run.check()
    return LENGTH


def _of(maker: Maker, kind: type[Any]) -> Any:
    return maker.message(kind)


def layouts(drawn: random.Random) -> int:
    maker = Maker(drawn, token=TOKEN)
    layer = drawn.choice(_of(maker, m.LayerTable).layers)
    known = handles.layout(layer, drawn.choice([1, 2]))
    assert 0 < known.shared_nbytes <= known.nbytes
    end = 0
    for plane in handles.planes_of(known.banks):
        for handle in filter(None, known.handles[plane]):
            assert handle.offset >= end, "planes overlap"
            end = handle.offset + handle.nbytes
            handles.check_handle(handle, known)
    assert end <= known.nbytes
    for _ in range(LENGTH):
        plane = drawn.choice([*known.handles, "", "weights''"])
        row = [handle for handle in known.handles.get(plane, ()) if handle is not None]
        base = drawn.choice(row) if row else TensorHandle(lid=0, plane="", segment=0, offset=0, numel=1, dtype="int16")
        name = drawn.choice(["lid", "segment", "offset", "numel", "plane", "dtype"])
        value = drawn.choice(["", "float32", "int16", "grads"] if name in ("plane", "dtype") else [-1, *EDGES])
        wrong = replace(base, **{name: value})
        try:
            handles.check_handle(wrong, known)
        except HandleError:
            pass
        else:
            assert wrong in known.handles[wrong.plane], f"{wrong} was accepted"
        announced, file_bytes = drawn.choice([known.nbytes, *EDGES]), drawn.choice([known.nbytes, *EDGES])
        with suppress(HandleError):
            handles.check_arena(known, lid=drawn.choice([known.lid, *EDGES]), nbytes=announced, file_bytes=file_bytes)
            assert announced == file_bytes == known.nbytes
    return LENGTH


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
            right = encode(m.PlanesReady(lid=lid, nbytes=nbytes), token=TOKEN, sender=OPTIMIZER, seq=0)
            frame = right if drawn.random() < 0.5 else maker.frame()[:4096]
            files = [os.memfd_create("fuzz") for _ in range(drawn.choice([0, 1, 1, 1, 2, 5]))]
            for file in files:
                os.ftruncate(file, drawn.choice([nbytes % 2**20, 0, 4096]))
            socket.send_fds(theirs, [frame or b"\0"], files)
            for file in files:
                os.close(file)
            with suppress(ValueError, EOFError, OSError):
                found = receive_arena(ours, _KNOWN, token=TOKEN)
                if isinstance(found, ArenaFile):
                    assert os.fstat(found.descriptor).st_size == found.layout.nbytes
                    assert not os.get_inheritable(found.descriptor)
                    found.close()
            assert len(os.listdir("/proc/self/fd")) == before, "a descriptor has stayed open"
    return LENGTH // 10


def coordinator(drawn: random.Random) -> int:
    """A run whose processes behave, and others who send what they like in the name of any process."""
    maker = Maker(drawn, token=TOKEN, layers=LAYERS)
    state = CoordinatorState(run_name="run", run_dir="/run", pid=1, host="host", replan_every=1)
    table = next(t for t in iter(lambda: _of(maker, m.LayerTable), None) if len(t.layers) == LAYERS)
    due = deque[tuple[Address, m.Message]](
        [
            (OPTIMIZER, m.Hello(pid=2, inbox="optimizer-0")),
            (OPTIMIZER, m.Ready(detail="ready")),
            (TRAINER, m.Hello(pid=3, inbox="trainer-0")),
            (TRAINER, table),
            (TRAINER, m.Calibration(d2h_s=1e-9, h2d_s=1e-9, gpu_update_s=1e-9)),
            (OPTIMIZER, m.Calibration(cpu_update_s=1e-8)),
        ]
    )
    plan: m.Plan | None = None
    for count in range(LENGTH):
        if due and drawn.random() < 0.8:
            sender, message = due.popleft()
        elif drawn.random() < 0.3:
            sender, message = TRAINER, _of(maker, m.TrainerReport)
            maker.step += 1
        else:
            sender, message = drawn.choice([TRAINER, OPTIMIZER, maker.address()]), maker.message()
        try:
            match drawn.randrange(60):
                case 0:
                    commands = state.lose(sender, "trainer-0")
                case 1:
                    state.hear(message, sender)
                    commands = []
                case _:
                    commands = state.handle(message, sender, float(count))
        except HandshakeError:
            commands = []
        except (OwnershipError, ValueError):
            return count + 1  # the coordinator process would report it, and end
        state.check()
        for command in commands:
            if isinstance(command, (Send, Answer, Publish)):
                answer = command.status if isinstance(command, Publish) else command.message
                assert len(encode(answer, token=TOKEN, sender=OPTIMIZER, seq=0)) < MAX_FRAME_BYTES
            if isinstance(command, Send) and isinstance(command.message, m.Plan):
                plan = command.message
                due.append((command.to, m.PlanAck(plan_id=plan.plan_id, accepted=drawn.random() < 0.9, reason="")))
            if isinstance(command, Send) and isinstance(command.message, m.Reassign) and plan is not None:
                applied = m.PlanApplied(
                    plan_id=plan.plan_id, step=maker.step, placements=plan.placements, moved=1, handover_s=0.0
                )
                due.append((TRAINER, applied))
    return LENGTH


TARGETS: Final[dict[str, Callable[[random.Random], int]]] = {
    "codec": codec,
    "handshake": handshake,
    "handles": layouts,
    "arena": arena,
    "coordinator": coordinator,
}
