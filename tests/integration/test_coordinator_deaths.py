"""A coordinator dies: another one takes its place, training goes on, and neither a bit nor a record is lost."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import DEADLINE_S, LR, Reference, adamw, differing, process, train, wait_for, weights
from programs import CLUSTER, ROOT, SCRIPTS, read_until, roles_below, run, started
from small_models import perceptron, square_loss
from torch import nn
from variants import every_second

import hytrain
from hytrain.monitoring import Client
from hytrain.run import link
from hytrain.run.coordinator import Coordinator
from hytrain.run.link import Link
from protocol.channel import Inbox, Incoming
from protocol.messages import Goodbye, Hello, Introduce, Pong, Welcome
from workers.coordinate.members import BEAT_S, SILENT_S
from workers.launch.cluster import COORDINATORS

pytestmark = pytest.mark.usefixtures("own_run")
MONITOR = ROOT / "bin" / "hytrain-monitor"


class Training:
    """A loop that goes on until something has happened."""

    def __init__(self, opt: hytrain.AdamW, model: nn.Module, loss: Any = square_loss) -> None:
        self._opt, self._model, self._loss, self.steps = opt, model, loss, 0

    def until(self, happened: Callable[[], bool]) -> None:
        wait_for(happened, self._step)

    def _step(self) -> None:
        """Not as fast as it can: a coordinator that gets no core would never catch up with it."""
        train(self._model, self._opt, [self.steps], self._loss)
        self.steps += 1
        time.sleep(0.005)

    def until_layers_move(self) -> None:
        moved = self._opt.statistics().moved
        self.until(lambda: self._opt.statistics().moved > moved)

    def kill_coordinator(self) -> None:
        """Train on until another one has taken its place."""
        dead = process(self._opt, "coordinator")
        dead.kill()
        self.until(lambda: coordinator(self._opt) not in (None, dead.pid))


def coordinator(opt: hytrain.AdamW) -> int | None:
    """The process that is known as the coordinator; None if it is dead."""
    try:
        return process(opt, "coordinator").pid
    except psutil.NoSuchProcess:
        return None


def records(run_dir: Path) -> list[dict[str, Any]]:
    *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")  # the last one may be half written
    return [json.loads(line) for line in lines]


def has_recorded(run_dir: Path, after: int) -> bool:
    return any(record["step"] > after for record in records(run_dir))


def has_planned(run_dir: Path, after: int) -> bool:
    """Whether the coordinator has planned after this step: it then knows how long one should take."""
    return any(record["step"] > after and record["predicted_step_s"] is not None for record in records(run_dir))


def test_layers_go_on_moving_and_nothing_is_lost() -> None:
    ours, theirs = perceptron(), perceptron()
    with adamw(ours, policy="random") as opt:
        training = Training(opt, ours)
        for _ in range(2):
            training.until_layers_move()
            training.kill_coordinator()
        training.until_layers_move()
        last = process(opt, "coordinator")
        last.kill()
        last.wait(DEADLINE_S)  # closing waits for the next one, which gets the last records
    train(theirs, Reference(theirs, lr=LR), range(training.steps), square_loss)
    assert differing(weights(ours), weights(theirs)) == []
    found = records(opt.run_dir)
    assert [record["step"] for record in found] == [*range(1, training.steps + 1)]
    assert not (opt.run_dir / "metrics-replaced.jsonl").exists()
    assert sorted(record["moved"] for record in found) == [record["moved"] for record in found]


def test_closing_waits_until_another_coordinator_knows_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has only just asked takes longer than to record what it is told."""
    looks, welcomed, on_welcome = [0], threading.Event(), Link._on_welcome
    has_ended, usual_s = link.has_ended, link.LINGER_S
    model = perceptron()
    with adamw(model) as opt:
        training = Training(opt, model)
        training.until(partial(has_recorded, opt.run_dir, after=2))
        dead = process(opt, "coordinator")

        def late(self: Link, welcome: Welcome) -> None:
            assert welcomed.wait(DEADLINE_S)
            on_welcome(self, welcome)

        def look(pid: int) -> bool:
            ended = has_ended(pid)
            looks[0] += not ended and pid != dead.pid
            if looks[0] == 3:
                monkeypatch.setattr(link, "LINGER_S", usual_s)
                welcomed.set()
            return ended

        monkeypatch.setattr(Link, "_on_welcome", late)
        monkeypatch.setattr(link, "LINGER_S", 0.0)
        dead.suspend()  # it records no more; and no welcome comes until the steps are over, which need that thread
        steps = training.steps
        training.until(lambda: training.steps == steps + 3)
        monkeypatch.setattr(link, "has_ended", look)
        dead.kill()
        dead.wait(DEADLINE_S)
    assert [record["step"] for record in records(opt.run_dir)] == [*range(1, training.steps + 1)]


def test_skipped_steps_are_counted_on() -> None:
    """All of them are: also those of which no coordinator, or the dead one, was told."""
    model = perceptron()
    with adamw(model, on_nonfinite="skip", k=0.5) as opt:
        training = Training(opt, model, lambda model, step: square_loss(model, step) * math.nan)
        for _ in range(2):
            training.kill_coordinator()
            training.until(partial(has_recorded, opt.run_dir, after=training.steps))
    found = records(opt.run_dir)
    assert [record["step"] for record in found] == [*range(1, training.steps + 1)]
    assert found[-1]["skipped_steps"] == opt.skipped_steps == training.steps


def unhurried_loss(model: nn.Module, step: int) -> Any:
    """Steps that leave a timeline of 1,000 of them room for whatever a busy machine takes."""
    time.sleep(0.1)
    return square_loss(model, step)


def test_what_a_monitor_has_ordered_stays() -> None:
    """Also a timeline, which can be ended."""
    model = perceptron()
    with adamw(model, k=0.0) as opt, Client(str(opt.run_dir)) as client:
        training = Training(opt, model, unhurried_loss)
        client.command("trace", "1000")
        for k in ("0.5", "1.0"):
            client.command("k", k)
        training.until(lambda: opt.statistics().k == 1.0)
        training.kill_coordinator()
        steps = training.steps
        training.until(lambda: has_planned(opt.run_dir, steps))
        steps = training.steps
        training.until(lambda: training.steps == steps + 20)
        assert opt.statistics().k == 1.0
        assert "is written into trace.json" in client.command("trace", "0")
        assert client.status().policy == "fixed"
        assert {layer.updated_by for layer in client.layers()} == {"gpu"}
        client.command("k", "0")
        training.until(lambda: opt.statistics().k == 0.0)


def test_the_launcher_says_so_and_a_monitor_follows(tmp_path: Path) -> None:
    command = (sys.executable, CLUSTER, "--run-dir", tmp_path / "run", SCRIPTS / "endless.py")
    with ExitStack() as stack:
        launcher = stack.enter_context(started(*command, stderr=subprocess.PIPE))
        read_until(launcher, "step")
        assert launcher.stderr is not None and "starting" in launcher.stderr.readline()
        monitor = stack.enter_context(started(sys.executable, MONITOR, "--follow"))
        dead = []
        for _ in range(COORDINATORS + 1):  # as many as one likes, with steps between
            read_until(monitor, "step")
            dead.append(roles_below(psutil.Process(launcher.pid))["coordinator"].pid)
            psutil.Process(dead[-1]).kill()
            said = next(line for line in launcher.stderr if line.startswith("hytrain-cluster"))
            expected = (
                rf"coordinator-0 \(process {dead[-1]}\) was killed by SIGKILL after step \d+; training goes on, and"
            )
            assert re.search(expected, said)
            steps = len(records(tmp_path / "run"))
            while len(records(tmp_path / "run")) <= steps:
                read_until(launcher, "step")
        assert len({*dead}) == len(dead)
        launcher.send_signal(signal.SIGTERM)
        for each in (launcher, monitor):
            assert each.stdout is not None
            each.stdout.read()
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert monitor.wait(DEADLINE_S) == 0
    found = records(tmp_path / "run")
    assert [record["step"] for record in found] == [*range(1, len(found) + 1)]


def test_the_fourth_death_without_a_step_ends_the_run(tmp_path: Path) -> None:
    command = (sys.executable, CLUSTER, "--run-dir", tmp_path / "run", SCRIPTS / "endless.py")
    with started(*command, stderr=subprocess.PIPE) as launcher:
        read_until(launcher, "step 5")
        family = roles_below(psutil.Process(launcher.pid))
        family["endless"].suspend()
        wait_for(lambda: family["endless"].status() == psutil.STATUS_STOPPED)  # it reports no further step
        for _ in range(COORDINATORS + 1):
            dead = roles_below(psutil.Process(launcher.pid))["coordinator"]
            dead.kill()
            wait_for(lambda dead=dead: launcher.poll() is not None or lives_another(launcher.pid, dead.pid))
        _, said = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert said.count("training goes on") == COORDINATORS
    assert "4 coordinators have died, without a step between" in said


def lives_another(launcher: int, dead: int) -> bool:
    """Whether the launcher has another coordinator than the dead one."""
    with suppress(psutil.Error, LookupError, AssertionError):  # one is being started
        return roles_below(psutil.Process(launcher))["coordinator"].pid != dead
    return False


@every_second(closes=[True, False], since=["before the death", "its notice of the death"])
def test_a_trainer_that_is_busy_meanwhile_is_asked_again(
    since: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inbox is not read while one coordinator takes another's place, and asks more than once.

    Then it may ignore a connection for good, or read one that is closed already.
    """
    busy, is_waiting = threading.Event(), threading.Event()

    def wait() -> None:
        if busy.is_set():
            is_waiting.set()
            wait_for(lambda: not busy.is_set())

    receive, lose, find = Inbox.receive, Coordinator.lose, Link._follow

    def late(self: Inbox, timeout_s: float | None) -> Incoming | None:
        wait()
        return receive(self, timeout_s)

    def lost(self: Coordinator) -> None:
        lose(self)
        wait()

    def asked(self: Link, by: Introduce) -> Hello:
        wait()
        return find(self, by)

    if since == "before the death":
        monkeypatch.setattr(Inbox, "receive", late)
    else:  # of which another coordinator may tell first
        monkeypatch.setattr(Coordinator, "lose", lost)
        monkeypatch.setattr(Link, "_follow", asked)
    model = perceptron()
    with adamw(model, policy="random") as opt:
        training = Training(opt, model)
        training.until_layers_move()
        dead = process(opt, "coordinator")
        launcher = dead.parent()
        assert launcher is not None
        busy.set()
        if since == "before the death":
            wait_for(is_waiting.is_set)
        dead.kill()
        wait_for(lambda: is_waiting.is_set() and lives_another(launcher.pid, dead.pid))
        log = opt.run_dir / "logs" / "coordinator-0.log"
        wait_for(lambda: re.search(rf"asks .*{opt._session._link.name}.*, attempt 3", log.read_text()))
        busy.clear()
        training.until(lambda: coordinator(opt) not in (None, dead.pid))
        if not closes:
            training.until_layers_move()
    assert [record["step"] for record in records(opt.run_dir)] == [*range(1, training.steps + 1)]


def test_a_trainer_that_joins_when_its_coordinator_dies_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    join = Link.join

    def killed(self: Link) -> None:
        psutil.Process(self.coordinator.pid).kill()
        join(self)

    monkeypatch.setattr(Link, "join", killed)
    model = perceptron()
    with adamw(model) as opt:
        train(model, opt, range(3), square_loss)
    assert [record["step"] for record in records(opt.run_dir)] == [1, 2, 3]


def test_a_trainer_between_two_steps_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its next step it has no plans, but it is asked whether it lives, and a command is refused for now."""
    model, answers = perceptron(), list[object]()
    monkeypatch.setattr(link, "_pong", lambda listener: answers.append(listener) or Pong())
    with adamw(model, k=0.0) as opt:
        training = Training(opt, model)
        training.until(lambda: training.steps == 5)
        dead = process(opt, "coordinator")
        dead.kill()
        wait_for(lambda: coordinator(opt) not in (None, dead.pid))
        answered, enough = len(answers), SILENT_S / BEAT_S + 2  # beats, after which who does not answer is silent
        wait_for(lambda: len(answers) >= answered + enough)
        refused = run(sys.executable, MONITOR, opt.run_dir, "--set-k", "1")
        assert refused.returncode == 2 and "gets a new coordinator after its next step" in refused.stderr
        log = opt.run_dir / "logs" / "coordinator-0.log"
        assert "has not answered" not in log.read_text()
        training.until(lambda: training.steps == 10)


def test_the_records_are_whole_without_a_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, it may come after the coordinator has stopped waiting for it."""
    model, post = perceptron(), Link.post
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(9), square_loss)
        lost = lambda self, to, what, **after: isinstance(what, Goodbye) or post(self, to, what, **after)  # noqa: E731
        monkeypatch.setattr(Link, "post", lost)
        metrics = opt.run_dir / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 10))


def test_deaths_of_two_coordinators_while_a_trainer_leaves_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has been sent everything, and has read nothing of it."""
    model, post, killed, steps = perceptron(), Link.post, list[int](), 60

    def deadly(self: Link, to: str, what: Any, **after: Any) -> None:
        if isinstance(what, Goodbye) and to == "coordinator" and len(killed) < 2:
            dead = psutil.Process(self.coordinator.pid)
            killed.append(dead.pid)
            dead.suspend()
            wait_for(lambda: dead.status() == psutil.STATUS_STOPPED)
            post(self, to, what, **after)
            dead.kill()
            dead.wait(DEADLINE_S)
        else:
            post(self, to, what, **after)

    monkeypatch.setattr(Link, "post", deadly)
    with adamw(model, k=1.0) as opt:
        for step in range(steps):
            train(model, opt, [step], square_loss)
            opt.log(step + 1, loss=step)
    assert len({*killed}) == 2
    assert [(record["step"], record["loss"]) for record in records(opt.run_dir)] == [
        (step + 1, step) for step in range(steps)
    ]


def test_a_coordinator_that_is_stopped_until_the_end_gets_all_records() -> None:
    """Also more than sockets hold. It may take longer than an instant until it reads them, as on a busy machine."""
    model, steps = perceptron(), 1500
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(3), square_loss)
        stopped = process(opt, "coordinator")
        stopped.suspend()
        train(model, opt, range(3, steps), square_loss)
        threading.Timer(1.0, stopped.resume).start()
    assert [record["step"] for record in records(opt.run_dir)] == [*range(1, steps + 1)]
