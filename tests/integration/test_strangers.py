"""Who is not part of a run cannot change it, not even with its token: messages of all kinds, and a flood of junk."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from helpers import LR, Reference, adamw, differing, train, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from message_strategies import instances
from programs import read_until
from small_models import llama

import hytrain
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Network, Outbox
from protocol.codec import MESSAGES

pytestmark = pytest.mark.usefixtures("own_run")
ROLES = [Address(role, 0) for role in ("trainer", "optimizer", "coordinator", "monitor")]
#: More than a run writes of its own.
LOG_BYTES = 50_000

#: So many that they come all the time while a loop trains, unless that waits for a core: then they end before it does.
FLOOD = """
import signal, sys, zmq
context = zmq.Context()
sockets = []
for path in sys.argv[1:]:
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{path}")
    sockets.append(socket)
for number in range(30_000):
    for socket in sockets:
        try:
            socket.send(b"junk" * 50, zmq.NOBLOCK)
        except zmq.Again:
            pass
    if number == 1000:
        print("flooding", flush=True)
signal.pause()
"""


def inboxes(opt: hytrain.AdamW) -> list[str]:
    return [opt._session._link.name, "optimizer-0", str(COORDINATOR)]


@contextmanager
def strangers(opt: hytrain.AdamW) -> Iterator[dict[tuple[str, str], Outbox]]:
    """Connections to each inbox as each role, by someone who has the token."""
    cluster = opt._session.place.cluster
    with ExitStack() as stack:
        found = {}
        for address in ROLES:
            name = f"{address}-{secrets.token_hex(4)}"
            network = stack.enter_context(Network(cluster.socket_dir, token=cluster.token, address=address, name=name))
            for to in inboxes(opt):
                found[address.role, to] = network.outbox(to, linger_s=5.0)
        yield found


def test_messages_of_strangers_change_nothing() -> None:
    ours, theirs = llama(), llama()
    expected = train(theirs, Reference(theirs, lr=LR), range(12))
    with adamw(ours, k=0.5) as opt:
        losses = train(ours, opt, range(4))
        with strangers(opt) as outboxes:

            @settings(max_examples=20, derandomize=True, deadline=None, database=None)
            @given(st.data(), st.sampled_from(sorted(outboxes)))
            def send(data: st.DataObject, way: tuple[str, str]) -> None:
                for kind in MESSAGES.values():
                    message = data.draw(instances(kind))
                    if not isinstance(message, m.Command):
                        outboxes[way].send(message)

            send()
            losses += train(ours, opt, range(4, 12))
        opt.synchronize()
        assert losses == expected and differing(weights(ours), weights(theirs)) == []


def test_a_flood_of_junk_changes_nothing_and_fills_no_log() -> None:
    ours, theirs = llama(), llama()
    expected = train(theirs, Reference(theirs, lr=LR), range(6))
    with adamw(ours, k=0.5) as opt:
        paths = [os.path.join(opt._session.place.cluster.socket_dir, name) for name in inboxes(opt)]
        with subprocess.Popen([sys.executable, "-c", FLOOD, *paths], stdout=subprocess.PIPE, text=True) as flood:
            try:
                read_until(flood, "flooding")
                assert train(ours, opt, range(6)) == expected
            finally:
                flood.kill()
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
        logs = list((opt.run_dir / "logs").iterdir())
    said = {log.name: log.read_text() for log in logs}
    assert all("dropped a message" in said[f"{role}-0.log"] for role in ("optimizer", "coordinator"))
    assert sum(map(len, said.values())) < LOG_BYTES
