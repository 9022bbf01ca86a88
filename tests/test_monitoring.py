"""A connection to a live run: what it asks and gets, and that one who asks and does not read costs little."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_monitor import status

from hytrain import monitoring
from hytrain.config import Cluster
from hytrain.errors import ClusterTimeout, ConfigError
from hytrain.monitoring import TAIL_BYTES, Client, LayerPlace
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import REPLIES_HIGH_WATER_MARK, Inbox, Network
from protocol.placement import Places
from workers.coordinate.records import SHOWN_BYTES

TOKEN = "token"


class Run:
    """A run of which there is only a coordinator's inbox, with what it is asked."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.inbox, self.network = Inbox(network), network
        pids = {"launcher_pid": os.getpid(), "coordinator_pid": os.getpid(), "optimizer_pids": (os.getpid(),)}
        self.cluster = Cluster(run_name="demo", run_dir=str(folder), socket_dir=network.socket_dir, token=TOKEN, **pids)
        self.cluster.write()

    @contextmanager
    def answering(self, *answers: m.Message) -> Iterator[list[m.Message]]:
        """It gives these answers in turn."""
        asked: list[m.Message] = []

        def answer() -> None:
            for message in answers:
                incoming = self.inbox.receive(60)
                assert incoming is not None
                asked.append(incoming.message)
                self.inbox.reply(incoming.sender, message)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield asked
        finally:
            thread.join()


@pytest.fixture
def run(no_leaks: None, tmp_path: Path) -> Iterator[Run]:
    (sockets := Path(os.environ["TMPDIR"]) / "s").mkdir()
    with Network(str(sockets), token=TOKEN, address=COORDINATOR) as network:
        yield Run(tmp_path, network)
    for left in sockets.iterdir():
        left.unlink()
    sockets.rmdir()


@pytest.mark.spawns
def test_a_client_asks_and_tells_in_words_what_was_refused(run: Run, tmp_path: Path) -> None:
    placed = status(places=Places(("gpu", "visit-offloaded")))
    answers = (
        placed,
        m.CommandReply(ok=True, text="k=0.3 from the next plan on"),
        m.CommandReply(ok=False, text="k is '9': give a number in [0, 1], or \"auto\""),
        m.CommandReply(ok=True, text="a checkpoint is saved"),
    )
    with run.answering(*answers) as asked, Client(run.cluster) as client:
        first, second = client.layers()
        assert first == LayerPlace(0, "a", 1, weights="gpu", state="gpu", updated_by="gpu")
        assert second == LayerPlace(1, "b", 3, weights="host", state="host", updated_by="gpu")
        assert client.command("k", "0.3") == "k=0.3 from the next plan on"
        with pytest.raises(ConfigError, match="give a number"):
            client.command("k", "9")
        assert client.checkpoint() == "a checkpoint is saved"
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "trainer-0.log").write_text("long ago\n" + "x" * TAIL_BYTES + "\none\ntwo\n")
        (tmp_path / "logs" / "optimizer-0.log").write_bytes(b"\xff one\n")
        tails = client.log_tail(3)
        assert tails["optimizer-0.log"] == ["\ufffd one"] and tails["trainer-0.log"][1:] == ["one", "two"]
    assert asked == [
        m.StatusRequest(),
        m.Command(name="k", value="0.3"),
        m.Command(name="k", value="9"),
        m.Command(name="checkpoint", value=""),
    ]


@pytest.mark.spawns
def test_records_are_read_from_the_file_evenly_spaced(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few come whole, the newest always. Of a file that is large, its end is read; a line that is cut off is none."""
    metrics = tmp_path / "metrics.jsonl"

    def steps(count: int, points: int) -> list[int]:
        metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, count + 1)) + '{"step": 9')
        return [record["step"] for record in client.history(points)]

    with Client(run.cluster) as client:
        assert client.history() == [], "no step has ended"
        assert steps(5, 5) == [1, 2, 3, 4, 5] and steps(5, 1) == [5]
        assert steps(100, 10) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
        assert steps(7, 3) == [2, 4, 7]
        monkeypatch.setattr(monitoring, "HISTORY_BYTES", 45)
        assert steps(99, 500) == [98, 99]
        with pytest.raises(ValueError, match="0 points, not 1 or more"):
            client.history(0)


@pytest.mark.spawns
def test_a_timeline_is_waited_for(run: Run, tmp_path: Path) -> None:
    """Until another file has the place of the last one."""
    (file := tmp_path / "trace.json").write_text("the last one")
    said: list[str] = []

    def drawn(answer: str) -> None:
        said.append(answer)
        (tmp_path / "new").write_text("another")
        (tmp_path / "new").replace(file)

    begun = m.CommandReply(ok=True, text="the next 3 steps")
    answers = begun, m.CommandReply(ok=False, text="it is drawn already"), begun, status(no_timeline="No space left")
    with run.answering(*answers) as asked, Client(run.cluster) as client:
        assert client.trace(3, drawn) == file and said == ["the next 3 steps"]
        with pytest.raises(ConfigError, match="it is drawn already"):
            client.trace(1)
        with pytest.raises(ConfigError, match="the timeline cannot be written: No space left"):
            client.trace(2)
    orders = [m.Command(name="trace", value=steps) for steps in "312"]
    assert asked == [*orders, m.StatusRequest()]


@pytest.mark.spawns
def test_an_answer_that_comes_late_is_not_the_next_questions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "LOOK_S", 0.01)
    with Client(run.cluster) as client:
        with pytest.raises(ClusterTimeout):
            client._ask(m.Command(name="k", value="9"), m.CommandReply, patience_s=0.05)
        late, refused = run.inbox.receive(60), m.CommandReply(ok=False, text="k is '9'")
        assert late is not None
        run.inbox.reply(late.sender, refused)
        with run.answering(m.CommandReply(ok=True, text="k=0.3 from the next plan on")):
            assert client.command("k", "0.3") == "k=0.3 from the next plan on"


@pytest.mark.spawns
def test_one_who_asks_and_does_not_read_gets_few_answers_and_others_theirs(run: Run) -> None:
    """However many it asks for, and however large they are: nobody waits for it, and little is kept for it."""
    asks, answer = 500, status(record="x" * SHOWN_BYTES)
    with Network(run.network.socket_dir, token=TOKEN, address=Address("monitor", 7), name="monitor-7-stalled") as other:
        stalled = other.outbox(COORDINATOR)
        for _ in range(asks):
            stalled.send(m.StatusRequest())
        for _ in range(asks):
            incoming = run.inbox.receive(60)
            assert incoming is not None
            run.inbox.reply(incoming.sender, answer)
        with run.answering(status()), Client(run.cluster) as client:
            assert client.status().run_name == "demo"
        assert stalled.receive(60) == answer
        got = 1
        while stalled.receive(0.5) is not None:
            got += 1
    assert got <= 2 * REPLIES_HIGH_WATER_MARK + 2, "of those that were sent, the first"
