"""What shows a live run: `hytrain-monitor` on a terminal, its page, TensorBoard. The run goes on without them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import DEADLINE_S, adamw, process, records, train, train_until
from programs import read_until, started
from small_models import perceptron, square_loss
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hytrain.errors import MissingPackage, UsageError
from hytrain.monitoring import Client
from hytrain.run import link
from hytrain.trackers import Trackers
from protocol.channel import Outbox
from protocol.messages import Pong
from protocol.metrics import BY_NAME
from workers.watch.monitor import EXIT_INTERRUPTED

MONITOR = Path(__file__).resolve().parents[2] / "bin" / "hytrain-monitor"


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


@pytest.mark.usefixtures("own_run")
def test_runs_are_served_and_interrupting_the_page_leaves_them_alone(tmp_path: Path) -> None:
    """Although a browser is still connected. A run that is named twice is there once."""
    pytest.importorskip("uvicorn")
    model, another = perceptron(), perceptron()
    with adamw(model, k=0.5) as opt, adamw(another, k=0.5) as other:
        train(model, opt, range(8), square_loss)
        train(another, other, range(8), square_loss)
        (token := tmp_path / "token").write_text("a token of 18 letters\n")
        token.chmod(0o600)
        runs = opt.run_dir, other.run_dir, opt.run_dir
        with started(sys.executable, MONITOR, *runs, "--web", "0", "--web-token-file", token) as page:
            address = read_until(page, "http://").strip()
            assert address.endswith("/?token=a+token+of+18+letters")
            assert f"<h1>{opt.run_dir.name}, {other.run_dir.name}</h1>" in read(address)
            train(model, opt, range(8, 16), square_loss)
            with urllib.request.urlopen(address.replace("/?", "/events?"), timeout=DEADLINE_S) as events:
                assert b'"records"' in events.readline() + events.readline()
                told = ""
                while told.count("\nhytrain_step_seconds{") < 2:  # one for each run, once it has told a step
                    told = read(address.replace("/?", "/metrics?"))
                assert len(set(re.findall(r'^hytrain_up\{run="(.+)"\} 1$', told, re.M))) == 2
                assert told.count("\nhytrain_step_seconds{") == 2
                page.send_signal(signal.SIGINT)
                assert page.wait(DEADLINE_S) == EXIT_INTERRUPTED
        train(model, opt, range(16, 20), square_loss)
        assert opt.statistics().step == 20


@pytest.mark.usefixtures("own_run")
def test_a_terminal_shows_a_run_and_a_key_changes_its_plan() -> None:
    pytest.importorskip("textual")
    model = perceptron()
    ours, theirs = pty.openpty()
    seen = b""

    def watch(reached: Callable[[], object]) -> None:
        """Read the terminal all the time: the screen waits for whoever does not."""
        nonlocal seen
        seen, ends_s = b"", time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < ends_s, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 1 << 16)

    def press(keys: bytes, until: bytes) -> None:
        os.write(ours, keys)
        watch(lambda: until in seen)

    with adamw(model, k=0.5) as opt:
        train(model, opt, range(8), square_loss)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        with started(sys.executable, MONITOR, opt.run_dir, env=env, **streams) as screen:
            press(b"", b"trainer-0")
            press(b"k", b"Escape: leave it")
            press(b"0\r", b"k=0 from the next plan on")
            os.write(ours, b"q")
            watch(lambda: screen.poll() is not None)
            assert screen.returncode == 0
        os.close(theirs)
        os.close(ours)
        train_until(lambda: opt.statistics().k == 0.0, model, opt, 8, square_loss)


@pytest.mark.usefixtures("own_run")
def test_a_loops_numbers_reach_tensorboard() -> None:
    """Step 1's before it, step 2's after it, step 3's after step 4; HyTrain's own are of the steps that have ended."""
    model = perceptron()
    with adamw(model, k=0.5, log_to=["tensorboard"]) as opt:
        for step, logged in enumerate(([1], [2], [], [3, 4]), start=1):
            if step == 1:
                opt.log(1, loss=1.0)
            train(model, opt, range(step - 1, step), square_loss)
            for number in logged[step == 1 :]:
                opt.log(number, loss=float(number))
        k = opt.statistics().k
    events = EventAccumulator(str(opt.run_dir / "tensorboard"))
    events.Reload()
    found = {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found["loss"] == [(step, float(step)) for step in range(1, 5)]
    assert found["k"] == [(2, pytest.approx(k)), (4, pytest.approx(k))]
    assert found.keys() == {"loss", "k", "step_s", "stall_s"} <= BY_NAME.keys()


def test_the_numbers_of_a_step_are_given_once_for_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(Trackers, "write", lambda self, step, numbers: given.append((step, [*numbers])))
    model = perceptron()
    with adamw(model) as opt:
        for step in range(1, 3):
            train(model, opt, range(step - 1, step), square_loss)
            for name in ("loss", "error"):
                opt.log(step, **{name: 1.0})
    own = ["step_s", "stall_s", "k"]
    assert given == [(step, names) for step in (1, 2) for names in (["loss"], own, ["error"])]


@pytest.mark.usefixtures("own_run")
def test_numbers_logged_one_by_one_arrive_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, at and after their step: each record has all of them. They leave when something is sent, or is asked."""
    send, left, asked = Outbox.send, Counter[str](), list[object]()
    monkeypatch.setattr(
        Outbox, "send", lambda self, message: left.update([type(message).__name__]) or send(self, message)
    )
    monkeypatch.setattr(link, "_pong", lambda listener: asked.append(listener) or Pong())
    model, steps, numbers = perceptron(), 6, 1500
    with adamw(model, k=0.5) as opt:
        for step in range(1, steps + 1):
            for number in range(numbers):
                opt.log(step, **{f"ahead{number}": number, "again": number})
            train(model, opt, range(step - 1, step), square_loss)
            for number in range(numbers):
                opt.log(step, **{f"after{number}": number, "again": -1.0})
        for step in range(1, steps + 1):
            opt.log(step, late=step)
    found = records(opt, steps)
    assert [(record["step"], record["late"], record["again"]) for record in found] == [
        (step, step, numbers - 1.0) for step in range(1, steps + 1)
    ]
    expected = {f"{when}{number}": number for number in range(numbers) for when in ("ahead", "after")}
    assert all(record | expected == record for record in found)
    assert left["Log"] <= 3 * steps + len(asked)


@pytest.mark.usefixtures("own_run")
def test_a_mistake_in_logging_costs_no_training() -> None:
    """What no record could have is refused at once. Records that are wider than a message leave nobody behind."""
    model, third = perceptron(), "x" * (3 << 20)
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(2), square_loss)
        coordinator = process(opt, "coordinator").pid
        for step in (-1, 2**53, 2**64):
            with pytest.raises(UsageError, match="a step is a whole number from"):
                opt.log(step, loss=1.0)
        with pytest.raises(UsageError, match="with 2 numbers takes 6291490 bytes, above 4194304"):
            opt.log(2, **{f"{name}{third}": 1.0 for name in "ab"})
        with pytest.raises(OverflowError):
            opt.log(2, loss=10**400)
        for name in "abcdef":
            opt.log(2, **{f"{name}{third}": 1.0})
        train(model, opt, range(2, 9), square_loss)
        assert process(opt, "coordinator").pid == coordinator
        with Client(str(opt.run_dir)) as client:
            assert all(len(name) < 100 for name in json.loads(client.status().record))
    found = records(opt, 9)
    assert [record["step"] for record in found] == [*range(1, 10)]
    assert {name[0] for name in found[1] if name.endswith(third)} == {*"abcdef"}


def test_a_tracker_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = r"log_to: \[tensorboard\] needs .*pip install '.*\[tensorboard\]'"
    with pytest.raises(MissingPackage, match=said), adamw(perceptron(), log_to=["tensorboard"]):
        pass
