"""The link between machines: what arrives, who is refused, and that nobody waits for a lost one."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import zmq

from hytrain.run.nodes import own_address
from protocol.address import Address
from protocol.codec import encode
from protocol.messages import NodeStatus, RankStatus
from protocol.nodes import HIGH_WATER_MARK, Collector, Keys, Reporter

SENDER = Address("coordinator", 4)
SOON_S = 60.0
SENT = 50 * HIGH_WATER_MARK
LONG = " " * 50_000

pytestmark = pytest.mark.spawns  # looks for descriptors, threads and sockets that were left behind


def news(step: int, padding: str = "") -> NodeStatus:
    record = f'{{"step": {step}}}{padding}'
    rank = RankStatus(rank=4, world=8, host="there", record=record, cores="on cores 0", gather_s=0.5)
    return NodeStatus(ranks=(rank,))


@pytest.fixture
def ours() -> Keys:
    return Keys()


@pytest.fixture
def collector(ours: Keys, no_leaks: None) -> Iterator[Collector]:
    with closing(Collector(ours, "127.0.0.1")) as collector:
        yield collector


def port_of(collector: Collector) -> int:
    return int(collector.endpoint.rpartition(":")[2])


def reporter(keys: Keys, port: int, theirs: str) -> closing[Reporter]:
    return closing(Reporter(keys, sender=SENDER, endpoint=f"tcp://127.0.0.1:{port}", key=theirs))


def arrives(reporting: Reporter, collector: Collector, start: int) -> NodeStatus:
    """Send until something from `start` on arrives; return the first."""
    ends_s = time.monotonic() + SOON_S
    for step in range(start, start + 10**6):
        assert time.monotonic() < ends_s, "nothing arrives"
        reporting.send(news(step))
        while (envelope := collector.try_receive()) is not None:
            assert envelope.sender == SENDER and isinstance(envelope.message, NodeStatus)
            if envelope.message in [news(sent) for sent in range(start, step + 1)]:
                return envelope.message
        time.sleep(0.005)
    raise AssertionError


class Relay:
    """Passes a connection on to a port, until it is cut."""

    def __init__(self, to: int) -> None:
        self._to, self._ends = to, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [one, other]
                for pair in ((one, other), (other, one)):
                    thread = threading.Thread(target=self._pass_on, args=pair)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        self.cut()

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(SOON_S)
        for end in (self._listener, *self._ends):
            end.close()


def test_a_status_arrives_and_a_lost_link_comes_back_by_itself(ours: Keys, collector: Collector) -> None:
    theirs = Keys()
    collector.admit([theirs.public])
    with closing(Relay(port_of(collector))) as relay, reporter(theirs, relay.port, ours.public) as reporting:
        arrives(reporting, collector, 0)
        relay.cut()
        for step in range(SENT):  # far more than what is kept, and without a wait
            reporting.send(news(step))
        arrives(reporting, collector, SENT)


def test_what_nobody_reads_is_dropped(ours: Keys, collector: Collector) -> None:
    theirs = Keys()
    collector.admit([theirs.public])
    with reporter(theirs, port_of(collector), ours.public) as reporting:
        arrives(reporting, collector, 0)
        for step in range(SENT):  # more than sockets hold
            reporting.send(news(step, LONG))
        read = 0
        while collector.try_receive() is not None:
            read += 1
        assert read < SENT


@pytest.mark.parametrize("stranger", ["unknown key", "wrong server", "no encryption"])
def test_a_stranger_is_not_heard(
    ours: Keys, collector: Collector, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="protocol.nodes")
    known = Keys()
    collector.admit([known.public])
    failed = {zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_DISCONNECTED}
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        if stranger != "no encryption":
            (known if stranger == "wrong server" else Keys()).put_on(socket)
            socket.curve_serverkey = (Keys() if stranger == "wrong server" else ours).public.encode()
        monitor = socket.get_monitor_socket()
        socket.connect(f"tcp://127.0.0.1:{port_of(collector)}")
        seen = set[int]()
        while not seen & failed:
            assert monitor.poll(SOON_S * 1e3), "it is neither let in nor refused"
            seen.add(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen
        socket.send(encode(news(1), token=ours.public, sender=SENDER, seq=0))
        socket.disable_monitor()
        monitor.close()
    assert collector.try_receive() is None
    assert ("of no machine of this job" in caplog.text) == (stranger == "unknown key")
    with reporter(known, port_of(collector), ours.public) as reporting:
        arrives(reporting, collector, 5)


def test_an_impossible_endpoint_is_named(ours: Keys, no_leaks: None) -> None:
    with pytest.raises(ValueError, match="no-such-transport://x"):
        Reporter(ours, sender=SENDER, endpoint="no-such-transport://x", key=Keys().public)


def test_it_listens_at_the_address_that_others_reach(ours: Keys, collector: Collector, no_leaks: None) -> None:
    assert collector.endpoint.startswith("tcp://127.0.0.1:")
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match="192.0.2.1"):  # reserved for documentation: nobody's
        Collector(ours, "192.0.2.1")
