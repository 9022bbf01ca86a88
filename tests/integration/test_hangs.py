"""A process hangs: the log and the monitor name it, what can go on goes on, and the rest ends once, with its name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import DEADLINE_S, adamw, process, train
from programs import CLUSTER, ROOT, SCRIPTS, cluster, environment, go_on, read_until, roles_below, started
from small_models import perceptron, square_loss

import hytrain
from hytrain.config import ClusterConfig
from hytrain.errors import WorkerDied
from hytrain.monitoring import Client
from workers.launch.process import start_program
from workers.launch.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("own_run")
MONITOR = ROOT / "bin" / "hytrain-monitor"


def read_until_log(log: Path, pattern: str) -> str:
    """What the log says, as soon as it says that."""
    ends_s = time.monotonic() + DEADLINE_S
    while (found := re.search(pattern, log.read_text())) is None:
        assert time.monotonic() < ends_s, log.read_text()
        time.sleep(0.05)
    return found[0]


def silent(opt: hytrain.AdamW) -> dict[str, float]:
    """Which processes the coordinator knows as silent."""
    with Client(str(opt.run_dir)) as client:
        return {known.address.role: known.silent_s for known in client.status().processes if known.silent_s}


def test_a_stopped_optimizer_is_named_and_may_go_on() -> None:
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        log, optimizer = opt.run_dir / "logs" / "coordinator-0.log", process(opt, "optimizer")
        optimizer.suspend()
        read_until_log(log, "optimizer-0 has not answered for 4 s")
        assert [*silent(opt)] == ["optimizer"]
        optimizer.resume()
        read_until_log(log, "optimizer-0 answers again")
        assert silent(opt) == {}
        train(model, opt, range(3, 6), square_loss)


def test_an_optimizer_that_hangs_ends_the_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYTRAIN_HANG_TIMEOUT_S", "5")
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        logs, optimizer = opt.run_dir / "logs", process(opt, "optimizer")
        optimizer.suspend()
        with pytest.raises(WorkerDied, match=rf"optimizer-0 \(process {optimizer.pid}\) was killed by SIGABRT"):
            train(model, opt, range(3, 6), square_loss)
        said = (logs / "coordinator-0.log").read_text()
        assert "trainer-0 waits for the update of layer" in said
        assert f"optimizer-0 (process {optimizer.pid}) has not answered for 5 s: it is ended" in said
        assert "workers/optimize/optimizer.py" in (logs / "optimizer-0.log").read_text(), "where it was"
        with pytest.raises(WorkerDied):
            opt.synchronize()


def test_a_coordinator_that_hangs_ends_nothing_and_loses_nothing(tmp_path: Path) -> None:
    """It is stopped in the middle, and still stopped when the trainer has ended."""
    command = (sys.executable, CLUSTER, "--run-dir", tmp_path / "run", SCRIPTS / "plain.py", "hytrain", "30", "--pause")
    with started(*command) as launcher:
        read_until(launcher, "paused")
        roles_below(psutil.Process(launcher.pid))["coordinator"].suspend()
        go_on(launcher)
        assert launcher.wait(DEADLINE_S) == 0
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == [*range(1, 31)]


def test_a_stopped_coordinator_is_told_to_the_trainer_and_by_the_monitor(tmp_path: Path) -> None:
    with (
        (tmp_path / "steps").open("w") as output,
        started(sys.executable, SCRIPTS / "endless.py", stdout=output, stderr=subprocess.PIPE) as first,
    ):
        read_until_log(tmp_path / "steps", "step 5")
        [launcher] = [
            each for each in psutil.Process(first.pid).children() if "workers.launch.launcher" in each.cmdline()
        ]
        coordinator = roles_below(launcher)["coordinator"]
        with started(sys.executable, MONITOR, "--follow") as monitor:
            read_until(monitor, "step")
            coordinator.suspend()
            read_until(monitor, f"coordinator-0 (process {coordinator.pid}) is stopped")
            assert first.stderr is not None
            assert f"the coordinator (process {coordinator.pid}) has not been heard" in first.stderr.readline()
            coordinator.resume()
            read_until(monitor, "step")
            assert "the coordinator is heard again" in first.stderr.readline()
            monitor.terminate()
        first.send_signal(signal.SIGKILL)


def test_a_stopped_trainer_is_named_and_never_ended(tmp_path: Path) -> None:
    environ = environment(HYTRAIN_HANG_TIMEOUT_S="1")
    with started(sys.executable, CLUSTER, "--run-dir", tmp_path / "run", SCRIPTS / "endless.py", env=environ) as first:
        read_until(first, "step 5")
        trainer = roles_below(psutil.Process(first.pid))["endless"]
        trainer.suspend()
        log = tmp_path / "run" / "logs" / "coordinator-0.log"
        read_until_log(log, "trainer-0 has not answered for 4 s")
        trainer.resume()
        read_until_log(log, "trainer-0 answers again")
        read_until(first, "step")
        first.terminate()
        first.wait(DEADLINE_S)


def test_a_trainer_that_hangs_is_ended_by_the_launcher_that_has_started_it(tmp_path: Path) -> None:
    """It holds Python's lock, so that none of its threads runs, as a deadlock in a library does."""
    script = tmp_path / "hangs.py"
    lines = (
        (SCRIPTS / "endless.py")
        .read_text()
        .replace('print("step", step, flush=True)', "if step == 3:\n        ctypes.PyDLL(None).sleep(600)")
    )
    script.write_text(f"import ctypes\n{lines}")
    ran = cluster("--run-dir", tmp_path / "run", script, env=environment(HYTRAIN_HANG_TIMEOUT_S="5"))
    assert ran.returncode == 128 + signal.SIGABRT
    assert re.search(r"trainer-0 \(process \d+\) was killed by SIGABRT", ran.stderr), ran.stderr
    said = (tmp_path / "run" / "logs" / "coordinator-0.log").read_text()
    assert re.search(r"trainer-0 \(process \d+\) has not answered for 5 s: it is ended", said)


def test_who_had_to_be_killed_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    children = []
    for code in (deaf, "print(flush=True); input()"):
        reading, writing = os.pipe()
        command = [sys.executable, "-c", code]
        children.append(start_program("it", command, log=tmp_path, environment={}, stdout=writing, stderr=os.dup(2)))
        os.read(reading, 1)
        os.close(reading)
    children[0].process.send_signal(signal.SIGSTOP)
    children[0].name = "coordinator-0"
    supervisor = Supervisor(ClusterConfig(run_dir=str(tmp_path / "run")), default_name="run")
    supervisor.cluster.children = children
    supervisor.close()
    who = f"coordinator-0 (process {children[0].process.pid})"
    assert [line for line in capsys.readouterr().err.splitlines() if "killed" in line] == [
        f"hytrain-cluster: {who} hung and was killed: the last records are missing in {tmp_path / 'run'}"
    ]
