"""Channels over real `ipc://` sockets: what is refused, what ends a wait, and who never waits."""

from __future__ import annotations

import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import channel
from protocol.address import COORDINATOR, ROLES, Address
from protocol.channel import (
    HIGH_WATER_MARK,
    MAX_IPC_PATH_BYTES,
    MONITOR_HIGH_WATER_MARK,
    Inbox,
    Incoming,
    Network,
    PeerDied,
    PeerNotReading,
    Publisher,
    Subscriber,
    endpoint,
)
from protocol.codec import MAX_FRAME_BYTES, MESSAGES, encode
from protocol.messages import CommandReply, GiveUp, Message, StatusRequest, WeightsReady
from protocol.quiet import AT_MOST, PERIOD_S, RateLimit

TOKEN = "token"
HERE, MONITOR = Address("optimizer", 0), Address("monitor", 7)
SOON_S = 60.0  # for what must come: far longer than it takes

pytestmark = pytest.mark.spawns  # looks for descriptors and sockets that were left behind


@pytest.fixture
def folder(no_leaks: None, tmp_path: Path) -> Iterator[str]:
    """A socket folder with a short name, whatever pytest's own is called."""
    short = Path(os.environ["TMPDIR"]) / "s"
    short.mkdir()
    yield str(short)
    for socket in short.iterdir():
        socket.unlink()
    short.rmdir()


@pytest.fixture
def network(folder: str) -> Iterator[Network]:
    with Network(folder, token=TOKEN, address=HERE) as network:
        yield network


@pytest.fixture
def dropped(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log, in which other tests have not used up what this one may write."""
    monkeypatch.setattr(logging.getLogger("protocol.channel"), "filters", [RateLimit()])
    caplog.set_level(logging.INFO, logger="protocol.channel")
    return caplog


def ready(lid: int = 0) -> WeightsReady:
    return WeightsReady(step=0, lid=lid, banks=(0,))


def status(text: str) -> CommandReply:
    return CommandReply(ok=True, text=text)


class RawPeer:
    """A peer that writes whatever it likes, over one connection."""

    def __init__(self, folder: str, name: str = "optimizer-0-raw") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(endpoint(folder, HERE))

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def good(self, seq: int, lid: int = 0) -> None:
        self.send(encode(ready(lid), token=TOKEN, sender=HERE, seq=seq))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def raw(folder: str) -> Iterator[RawPeer]:
    peer = RawPeer(folder)
    yield peer
    peer.close()


def received(inbox: Inbox) -> Message:
    incoming = inbox.receive(SOON_S)
    assert incoming is not None
    return incoming.message


def test_an_answer_comes_back_to_who_asked(folder: str, network: Network) -> None:
    inbox = Inbox(network)
    with (
        Network(folder, token=TOKEN, address=MONITOR, name="monitor-7-one") as one,
        Network(folder, token=TOKEN, address=MONITOR, name="monitor-7-two") as two,
    ):
        asking, other = one.outbox(HERE), two.outbox(HERE)
        inbox.reply("who has left", status("lost"))
        asking.send(StatusRequest())
        assert inbox.receive(SOON_S) == Incoming("monitor-7-one", MONITOR, StatusRequest())
        inbox.reply("monitor-7-one", status("done"))
        assert asking.receive(SOON_S) == status("done")
        assert other.receive(0.01) is None and inbox.receive(0.01) is None


GOOD = encode(ready(), token=TOKEN, sender=HERE, seq=5)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "not msgpack"),
        ([GOOD, GOOD], "3 frames where 2 were expected"),
        ([encode(ready(), token="other run", sender=HERE, seq=1)], "wrong run token"),
        ([b"\x00" * (MAX_FRAME_BYTES + 1)], f"frame of {MAX_FRAME_BYTES + 1} bytes"),
    ],
    ids=["empty", "two parts", "token", "too large"],
)
def test_what_is_no_message_is_logged_and_dropped(
    network: Network, raw: RawPeer, dropped: pytest.LogCaptureFixture, frames: list[bytes], reason: str
) -> None:
    """One wait takes in the bad and the good: a bad frame must not end it."""
    inbox = Inbox(network)
    raw.send(*frames)
    raw.good(seq=6, lid=3)
    assert received(inbox) == ready(3)
    assert re.search(f"dropped a message from 'optimizer-0-raw': .*{reason}", dropped.text)


def test_a_number_that_came_before_is_dropped(
    folder: str, network: Network, raw: RawPeer, dropped: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(network)
    for seq, lid in ((0, 0), (1, 1), (1, 2), (0, 3), (7, 4)):
        raw.good(seq, lid)
    assert [received(inbox) for _ in range(3)] == [ready(lid) for lid in (0, 1, 4)]
    assert "sequence number 1 after 1" in dropped.text and "sequence number 0 after 1" in dropped.text
    other = RawPeer(folder, "optimizer-0-other")
    other.good(seq=0, lid=9)
    assert received(inbox) == ready(9), "numbers are each sender's own"
    other.close()


@pytest.mark.parametrize(
    ("sender", "message", "reason"),
    [
        (HERE, StatusRequest(), "StatusRequest is for other roles than optimizer to send"),
        (MONITOR, ready(), "WeightsReady of monitor-7 over another's connection"),
        (Address("optimizer", 1), ready(), "WeightsReady of optimizer-1 over another's connection"),
    ],
    ids=["role", "other role", "other rank"],
)
def test_what_a_sender_may_not_send_is_dropped(
    network: Network,
    raw: RawPeer,
    dropped: pytest.LogCaptureFixture,
    sender: Address,
    message: Message,
    reason: str,
) -> None:
    inbox = Inbox(network)
    raw.send(encode(message, token=TOKEN, sender=sender, seq=0))
    raw.good(seq=1, lid=3)
    assert received(inbox) == ready(3)
    assert reason in dropped.text


def test_each_message_has_a_role_that_sends_it() -> None:
    assert all(kind.by and set(kind.by) <= set(ROLES) for kind in MESSAGES.values())


def test_who_is_not_admitted_is_dropped(
    folder: str, network: Network, raw: RawPeer, dropped: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(network)
    inbox.admit("optimizer-0-friend")
    raw.good(seq=0)
    while not dropped.text:
        assert inbox.receive(0.01) is None
    friend = RawPeer(folder, "optimizer-0-friend")
    friend.good(seq=0, lid=9)
    assert received(inbox) == ready(9)
    friend.close()


def test_a_flood_ends_no_wait_late_and_fills_no_log(
    network: Network, dropped: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Junk that never ends keeps neither a wait without time from ending, nor a death from being noticed."""
    inbox, left = Inbox(network), iter(range(10**6))

    def junk() -> list[bytes]:
        next(left)  # raises in the end
        return [b"stranger", b"junk"]

    monkeypatch.setattr(inbox, "_next_frames", junk)
    assert inbox.receive(0) is None
    reading, writing = os.pipe()
    inbox.watch_descriptor("the peer", reading)
    os.close(writing)
    with pytest.raises(PeerDied, match="the peer died"):
        inbox.receive(None)
    assert 0 < len(dropped.records) <= AT_MOST


def test_the_next_period_says_what_was_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("protocol.quiet.time.monotonic", lambda: now[0])
    limit = RateLimit()

    def logged(text: str) -> str | None:
        record = logging.LogRecord("name", logging.WARNING, "", 0, text, (), None)
        return record.getMessage() if limit.filter(record) else None

    assert [logged("junk") for _ in range(AT_MOST + 3)] == ["junk"] * AT_MOST + [None] * 3
    assert logged("other") == "other"
    now[0] = PERIOD_S
    assert logged("junk") == "junk (and 3 more before, not logged)"
    assert logged("junk") == "junk"


def test_the_feed_drops_what_is_no_status(folder: str, dropped: pytest.LogCaptureFixture) -> None:
    with (
        Network(folder, token="other run", address=COORDINATOR) as theirs,
        Network(folder, token=TOKEN, address=MONITOR) as ours,
    ):
        publisher, subscriber = Publisher(theirs), Subscriber(ours)
        while "wrong run token" not in dropped.text:  # the subscription takes a moment to arrive
            publisher.send(StatusRequest())
            assert subscriber.receive(0.01) is None


def child(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_death_is_seen_though_a_forked_child_lives_on(network: Network) -> None:
    """The child holds every descriptor of the dead process, a pipe's end too: its end would show nothing."""
    code = "import os, sys\nif os.fork():\n    print(flush=True)\nsys.stdin.read()\nos._exit(0)"
    process = child(code)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    inbox = Inbox(network)
    inbox.watch("the trainer", process.pid)
    assert inbox.receive(0) is None
    process.kill()
    with pytest.raises(PeerDied, match="the trainer died") as caught:
        inbox.receive(SOON_S)
    assert caught.value.name == "the trainer"
    inbox.unwatch("the trainer")
    assert inbox.receive(0) is None
    process.stdin.close()  # now the child leaves
    assert process.stdout.read() == b""
    process.stdout.close()
    process.wait()


LAST_WORDS = """
import sys
from protocol.channel import Network
from protocol.address import Address
from protocol.messages import GiveUp
with Network(sys.argv[1], token="token", address=Address("trainer", 0)) as network:
    outbox = network.outbox("optimizer-0", linger_s=20)
    for lid in range(30):
        outbox.send(GiveUp(plan_id=0, lid=lid, step=0))
"""


def test_what_a_peer_said_before_its_death_is_heard_first(
    folder: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the thread is that its words pass through."""
    monkeypatch.setattr(channel, "LAST_WORDS_S", SOON_S)
    inbox = Inbox(network)
    with child(LAST_WORDS, folder) as process:
        inbox.watch("the child", process.pid)
        ended = os.pidfd_open(process.pid)
        assert select.select([ended], [], [], SOON_S)[0]
        os.close(ended)
        for lid in range(30):
            assert received(inbox) == GiveUp(plan_id=0, lid=lid, step=0)
        monkeypatch.setattr(channel, "LAST_WORDS_S", 0.0)
        inbox.unwatch("the child")
        inbox.watch("the child", process.pid)
        with pytest.raises(PeerDied):
            inbox.receive(SOON_S)


def test_what_has_arrived_is_heard_before_a_death_that_is_noticed_late(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a reader that has other things to do, or gets no core for longer than last words have."""
    inbox = Inbox(network)
    network.outbox(HERE).send(ready())
    assert inbox._socket.poll(SOON_S * 1e3)
    reading, writing = os.pipe()
    inbox.watch_descriptor("the peer", reading)
    os.close(writing)
    monkeypatch.setattr(channel, "LAST_WORDS_S", 0.0)
    assert received(inbox) == ready()
    with pytest.raises(PeerDied, match="the peer died"):
        inbox.receive(SOON_S)


def test_an_end_that_leaves_no_words_is_told_at_once(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one's own."""
    monkeypatch.setattr(channel, "LAST_WORDS_S", math.inf)
    inbox = Inbox(network)
    reading, writing = os.pipe()
    inbox.watch_descriptor("stop", reading, last_words_s=0.0)
    os.close(writing)
    with pytest.raises(PeerDied, match="stop died"):
        inbox.receive(SOON_S)


def test_a_reader_that_never_reads_is_an_error_and_no_wait(network: Network) -> None:
    outbox = network.outbox(HERE)
    with pytest.raises(PeerNotReading, match="optimizer-0 does not read"):
        for lid in range(HIGH_WATER_MARK + 1):
            outbox.send(ready(lid))


def test_a_monitor_that_stalls_holds_nobody_up(network: Network) -> None:
    """It loses frames, and reads on later."""
    publisher, stalled = Publisher(network), Subscriber(network)
    while stalled.receive(0.01) is None:  # the subscription takes a moment to arrive
        publisher.send(status("hello"))
    rounds = 20 * MONITOR_HIGH_WATER_MARK
    for number in range(rounds):
        publisher.send(status(str(number) + "x" * 20_000))
    kept = 0
    while (frame := stalled.receive(0.01)) != status("last"):
        kept += frame is not None
        publisher.send(status("last"))  # of which those are lost that come while it is still behind
    assert 0 < kept < rounds


def test_a_path_that_is_too_long_for_a_socket_is_refused() -> None:
    fits = "/" + "f" * (MAX_IPC_PATH_BYTES - len("//optimizer-0"))
    assert endpoint(fits, HERE) == f"ipc://{fits}/optimizer-0"
    with pytest.raises(ValueError, match="longer than 107 bytes; set a shorter TMPDIR"):
        endpoint(fits + "f", HERE)
    with pytest.raises(ValueError, match="longer than 107 bytes"):
        endpoint("/" + "ü" * 50, HERE)


def test_a_socket_that_was_dropped_can_be_bound_again(network: Network) -> None:
    first = Inbox(network)
    network.drop(first)
    second = Inbox(network)
    network.outbox(HERE).send(ready())
    assert received(second) == ready()


def test_a_signal_while_the_sockets_close_leaves_nothing_open(folder: str) -> None:
    """As that of a DataLoader's worker that ends, which torch handles. `no_leaks` looks for descriptors."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        network = Network(folder, token=TOKEN, address=HERE)
        network.outbox("nobody", linger_s=1.0).send(ready())
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1])
        timer.start()
        network.close()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
