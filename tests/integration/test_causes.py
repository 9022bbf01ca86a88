"""Something is wrong with a live run: `hytrain-monitor` says what and why. Nothing here measures how soon.

Most ask as the monitor does, in this process; two start it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from helpers import adamw, process, train
from programs import CLUSTER, ROOT, SCRIPTS, environment, read_until, roles_below, started, write_recipe
from small_models import perceptron, square_loss

from hytrain.errors import ClusterTimeout
from hytrain.monitoring import Client
from workers.watch.observer import Observer

MONITOR = ROOT / "bin" / "hytrain-monitor"


def until_told(where: Path, is_told: Callable[[list[str]], bool]) -> list[str]:
    """What is wrong with a run, as soon as that is so. The test's own time limit ends it."""
    with Client(str(where)) as client:
        observer = Observer(client.run)
        while True:
            with suppress(ClusterTimeout):  # on a busy machine a coordinator may not get a core in time
                told = [trouble.text for trouble in observer.look(client.status()).troubles]
                if is_told(told):
                    return told
            time.sleep(0.05)


def has(words: str) -> Callable[[list[str]], bool]:
    return lambda told: any(words in text for text in told)


def has_not(words: str) -> Callable[[list[str]], bool]:
    return lambda told: not has(words)(told)


@contextmanager
def endless(folder: Path) -> Iterator[dict[str, psutil.Process]]:
    """A run that trains until it is ended, under the launcher; its processes by role."""
    command = (sys.executable, CLUSTER, "--run-dir", folder, "--threads", "1", SCRIPTS / "endless.py")
    with started(*command, env=environment(HYTRAIN_RUN_DIR=None)) as launcher:
        assert launcher.stdout is not None
        read_until(launcher, "step 5")
        reader = threading.Thread(target=launcher.stdout.read)  # or the pipe would fill up
        reader.start()
        yield roles_below(psutil.Process(launcher.pid))
        launcher.terminate()
        launcher.wait()
        reader.join()


@pytest.mark.usefixtures("own_run")
def test_a_stopped_optimizer() -> None:
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(8), square_loss)
        optimizer = process(opt, "optimizer")
        words = f"optimizer-0 (process {optimizer.pid}) is stopped"
        with started(sys.executable, MONITOR, opt.run_dir, "--follow") as monitor:
            read_until(monitor, "step")
            optimizer.suspend()
            read_until(monitor, words)
            until_told(opt.run_dir, has(words))
            optimizer.resume()
            until_told(opt.run_dir, has_not("optimizer-0"))
            monitor.terminate()
        train(model, opt, range(8, 11), square_loss)


def test_a_second_program_on_the_optimizers_cores(tmp_path: Path) -> None:
    with endless(tmp_path / "run") as roles:
        loop = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
        core = str(roles["optimizer"].cpu_affinity()[-1])
        with started(sys.executable, "-c", loop, core) as second:
            words = f"(process {second.pid}): "
            [told] = [text for text in until_told(tmp_path / "run", has(words)) if words in text]
            assert "since others use the optimizer's core" in told
            second.kill()
        until_told(tmp_path / "run", has_not(words))


@pytest.mark.usefixtures("own_run")
def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a save do not reach it, while training goes on."""
    model, at_last, sync = perceptron(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            at_last.wait()
        sync(descriptor)

    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        monkeypatch.setattr(os, "fsync", slow)
        saved = opt.async_save(tmp_path / "state")
        try:
            train(model, opt, range(3, 9), square_loss)
            until_told(opt.run_dir, has(f"has been writing {tmp_path / 'state'} for"))
        finally:
            at_last.set()
        saved.result()
        until_told(opt.run_dir, has_not("has been writing"))


@pytest.mark.usefixtures("own_run")
def test_a_loss_that_is_not_finite() -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(3), square_loss)
        opt.log(3, loss=math.nan)
        until_told(opt.run_dir, has("training diverges: the loss of step 3 is not finite"))
        train(model, opt, range(3, 4), square_loss)
        opt.log(4, loss=1.0)
        until_told(opt.run_dir, has_not("diverges"))


def test_a_recipe_that_diverges(tmp_path: Path) -> None:
    train = {"steps": 1_000_000, "lr": 1e30, "warmup_steps": 0, "on_divergence": "continue"}
    recipe = write_recipe(tmp_path, run={"dir": str(tmp_path), "name": "run"}, train=train)
    env = environment(HYTRAIN_RUN_DIR=None)
    with started(sys.executable, CLUSTER, recipe, env=env, stdout=subprocess.DEVNULL) as launcher:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or not metrics.stat().st_size:
            assert launcher.poll() is None
            time.sleep(0.02)
        with started(sys.executable, MONITOR, tmp_path / "run", "--follow") as monitor:
            assert "the loss of step" in read_until(monitor, "training has diverged at step")
            monitor.terminate()
        launcher.terminate()
        launcher.wait()
