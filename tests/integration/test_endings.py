"""How runs end that are told to: a signal, a second one, a time limit; and that a resumed run does not show it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers import DEADLINE_S, bits, wait_for
from programs import (
    CLUSTER,
    SCRIPTS,
    cluster,
    environment,
    read_until,
    roles_below,
    run,
    started,
    train_recipe,
    write_recipe,
)
from safetensors.torch import load_file
from variants import slow

from hytrain.config import ClusterConfig
from hytrain.errors import ConfigError, HyTrainError
from hytrain.memory import host
from hytrain.monitoring import Client
from hytrain.run.saved import latest
from workers.launch import process, signals, time_limit
from workers.launch.attempts import Attempts
from workers.launch.cluster import STOP_GRACE_S
from workers.launch.process import Child
from workers.launch.signals import COPY_S, Signals
from workers.launch.supervisor import End, Supervisor

pytestmark = pytest.mark.usefixtures("own_run")
RANKS = ("--nproc-per-node", "2")
ENDED = re.compile(
    r"hytrain: ended after step (\d+), and saved a checkpoint; --set train.resume=latest resumes from (\S+)"
)


def recipe_in(folder: Path, **train: Any) -> Path:
    """One whose run's folder is `run`, with so many steps that it does not end before it is told to."""
    return write_recipe(
        folder,
        run={"dir": str(folder), "name": "run"},
        model={
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32,
            }
        },
        train={"steps": 1_000_000, **train},
    )


def undisturbed(folder: Path, steps: int) -> dict[str, Any]:
    """The results of a run that nobody has disturbed."""
    folder.mkdir()
    train_recipe(recipe_in(folder), folder / "run", f"train.stop_at={steps}")
    return results(folder / "run", steps)


def begin(recipe: Path, *options: str, later: Path | None = None, **variables: str) -> Any:
    """`bin/hytrain-cluster`. If a file is named, an hour has passed for it once that is there."""
    command = [CLUSTER] if later is None else [SCRIPTS / "later.py", later]
    job = environment(HYTRAIN_RUN_DIR=None, **variables)
    return started(sys.executable, *command, *options, recipe, env=job, stderr=subprocess.PIPE)


def wait_for_step(launcher: subprocess.Popen[str], run_dir: Path, step: int, since_s: float = 0.0) -> None:
    """Until a record shows it that was made after `since_s`."""

    def is_recorded() -> bool:
        assert launcher.poll() is None, launcher.stderr.read() if launcher.stderr else ""
        with suppress(FileNotFoundError):
            *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")  # the last one may be half written
            newest = json.loads(lines[-1]) if lines else {"step": 0, "wall_time": 0.0}
            return bool(newest["step"] >= step and newest["wall_time"] > since_s)
        return False

    wait_for(is_recorded)


def trains_anew(launcher: subprocess.Popen[str], before: psutil.Process) -> bool:
    """Whether it has started another trainer: then the last attempt's processes have ended."""
    with suppress(psutil.NoSuchProcess, AssertionError):  # processes come and go
        return roles_below(psutil.Process(launcher.pid)).get("trainer", before) != before
    return False


def wait_for_words(launcher: subprocess.Popen[str], words: str) -> str:
    """The line in which the launcher says this."""
    assert launcher.stderr is not None
    said = []
    for line in launcher.stderr:
        said.append(line)
        if words in line:
            return line
    raise AssertionError(f"it ended before it said {words!r}: {''.join(said)}")


def rest(launcher: subprocess.Popen[str]) -> str:
    """What it says until its end."""
    assert launcher.stderr is not None
    said = launcher.stderr.read()
    launcher.wait(DEADLINE_S)
    return said


def results(run_dir: Path, steps: int) -> dict[str, Any]:
    """The bits of weights and optimizer state in the checkpoint of the last step, and the losses of all steps."""
    last = run_dir / "checkpoints" / f"step-{steps}"
    files = [last / "model.safetensors", *last.glob("optimizer/**/*.safetensors")]
    assert len(files) > 1
    tensors = {f"{file.name} {name}": bits(one) for file in files for name, one in load_file(file).items()}
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    numbers = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return {**numbers, "losses": [record["loss"] for record in records]}


def ended(said: str, run_dir: Path) -> int:
    """After which step the run has ended, with its checkpoint."""
    [(step, folder)] = ENDED.findall(said)
    assert folder == str(run_dir / "checkpoints" / f"step-{step}") and latest(run_dir) == Path(folder)
    return int(step)


def end_by_a_signal(recipe: Path, *options: str) -> tuple[Path, int]:
    """Every process gets it, as from a batch system, and the run ends with a checkpoint: its folder and last step."""
    run_dir = recipe.parent / "run"
    with begin(recipe, *options, later=recipe.parent / "later") as launcher:
        wait_for_step(launcher, run_dir, 6)
        tree = psutil.Process(launcher.pid)
        others = tree.children(recursive=True)
        for process in others:  # so that it goes on until the launcher has got both of its own
            process.suspend()
        tree.terminate()
        wait_for_words(launcher, "SIGTERM: the run is told to end")
        for process in [tree, *others]:  # the launcher's second one is a copy, as from `timeout`
            process.terminate()
        for process in others:
            process.resume()
        said = rest(launcher)
    assert launcher.returncode == 128 + signal.SIGTERM, said
    step = ended(said, run_dir)
    assert step >= 6 and [path.name for path in (run_dir / "checkpoints").glob("*step*")] == [f"step-{step}"]
    return run_dir, step


def test_a_signal_ends_a_recipe_after_a_step_with_a_checkpoint(tmp_path: Path) -> None:
    """The resumed run is the one that nobody has disturbed."""
    recipe = recipe_in(tmp_path)
    run_dir, step = end_by_a_signal(recipe)
    overrides = ["--set", "train.resume=latest", "--set", f"train.stop_at={step + 20}"]
    again = cluster(recipe, *overrides, env=environment(HYTRAIN_RUN_DIR=None))
    assert again.returncode == 0, again.stderr
    assert results(run_dir, step + 20) == undisturbed(tmp_path / "undisturbed", step + 20)


def test_a_signal_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    run_dir, step = end_by_a_signal(recipe_in(tmp_path), *RANKS)
    last = [(run_dir / name).read_text().splitlines()[-1] for name in ("metrics.jsonl", "metrics-1.jsonl")]
    assert [json.loads(line)["step"] for line in last] == [step, step]


def test_a_second_signal_ends_a_recipe_at_once(tmp_path: Path) -> None:
    """Here the first would never end it, since its processes are stopped."""
    later, run_dir = tmp_path / "later", tmp_path / "run"
    with begin(recipe_in(tmp_path, checkpoint_every=5), later=later) as launcher:
        wait_for(lambda: latest(run_dir) is not None)
        for role in ("trainer", "optimizer"):
            roles_below(psutil.Process(launcher.pid))[role].suspend()
        launcher.send_signal(signal.SIGTERM)
        wait_for_words(launcher, "SIGTERM: the run is told to end; a second one ends it at once")
        assert launcher.poll() is None
        later.touch()
        launcher.send_signal(signal.SIGTERM)
        said = rest(launcher)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert re.search(
        r"a second signal has ended the run at once; --set train.resume=latest resumes from \S+step-\d+", said
    )


def test_a_recipe_ends_before_the_batch_job_does(tmp_path: Path) -> None:
    later, run_dir = tmp_path / "later", tmp_path / "run"
    job_end = int(time.time()) + 2 * 3600
    job = begin(recipe_in(tmp_path), "--save-before", "1h", later=later, SLURM_JOB_END_TIME=str(job_end))
    with job as launcher:
        wait_for_step(launcher, run_dir, 1)
        later.touch()
        said = rest(launcher)
    assert launcher.returncode == 75, said
    assert ended(said, run_dir) >= 1


@pytest.mark.parametrize("options", [(), slow(RANKS)], ids=["one rank", "two ranks"])
def test_a_program_has_the_time_that_it_takes(options: tuple[str, ...]) -> None:
    with started(sys.executable, CLUSTER, *options, SCRIPTS / "saves.py", str(STOP_GRACE_S + 1)) as launcher:
        for _ in range(2 if options else 1):
            read_until(launcher, "ready")
        launcher.send_signal(signal.SIGTERM)
        said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert "saved" in said and launcher.returncode == 128 + signal.SIGTERM


OUT_OF_TIME = """
import sys, time
from pathlib import Path
from hytrain.config import ClusterConfig
from workers.launch.supervisor import Supervisor

with Supervisor(ClusterConfig(run_dir=sys.argv[1]), default_name="run") as run:
    trains_nothing = [sys.executable, "-c", "import signal; signal.pause()"]
    sys.exit(run.supervise(trains_nothing, end_s=time.monotonic(), recipe_in=Path(sys.argv[1])))
"""


def test_a_recipe_that_has_no_time_is_not_to_be_started_again(tmp_path: Path) -> None:
    ran = run(sys.executable, "-c", OUT_OF_TIME, tmp_path / "run")
    assert ran.returncode == 1 and "hytrain-cluster: nothing was trained in this time" in ran.stderr


def test_a_program_s_time_is_up() -> None:
    ran = cluster("--time-limit", "1s", SCRIPTS / "saves.py", "1")
    assert ran.returncode == 75 and "hytrain-cluster: the time is up" in ran.stderr


def test_a_second_signal_ends_a_program_that_does_not_end(tmp_path: Path) -> None:
    later = tmp_path / "later"
    command = (sys.executable, SCRIPTS / "later.py", later, *RANKS, SCRIPTS / "saves.py", "600")
    with started(*command, stderr=subprocess.PIPE) as launcher:
        for start in ("ready", "ready"):
            read_until(launcher, start)
        launcher.send_signal(signal.SIGTERM)
        read_until(launcher, "saving")
        assert launcher.poll() is None, "the first alone does not end it"
        later.touch()
        launcher.send_signal(signal.SIGTERM)
        said, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 128 + signal.SIGTERM and "saved" not in said
    assert "a second signal has ended the run at once" in errors


def ask_for_a_checkpoint(run_dir: Path, dead: int) -> bool:
    """Whether the run has another optimizer than the dead one, and will save a checkpoint."""
    with suppress(HyTrainError), Client(str(run_dir)) as client:  # it is being started, or has not yet begun a step
        if dead not in client.run.optimizer_pids:
            client.checkpoint()
            return True
    return False


def test_a_run_whose_optimizer_is_killed_twice_is_started_again(tmp_path: Path) -> None:
    """Once before its first checkpoint, once after; it ends with the bits of a run that nobody has disturbed."""
    run_dir = tmp_path / "run"
    with begin(recipe_in(tmp_path), "--max-restarts", "2") as launcher:
        trainers = []

        def kill(after: int) -> psutil.Process:
            wait_for_step(launcher, run_dir, after)
            roles = roles_below(psutil.Process(launcher.pid))
            trainers.append(roles["trainer"])
            roles["optimizer"].kill()
            return roles["optimizer"]

        first = kill(after=4)
        wait_for_words(launcher, f"optimizer-0 (process {first.pid}) was killed by SIGKILL after step ")
        wait_for(lambda: ask_for_a_checkpoint(run_dir, first.pid))
        wait_for(lambda: latest(run_dir) is not None)
        saved = latest(run_dir)
        assert saved is not None
        saved_at = int(saved.name.removeprefix("step-"))
        second = kill(after=saved_at + 4)
        line = wait_for_words(launcher, f"; attempt 3 of 3 begins from {saved}; ")
        assert f"optimizer-0 (process {second.pid}) was killed by SIGKILL after step " in line
        wait_for(lambda: trains_anew(launcher, trainers[-1]))  # the last attempt's coordinator has written until then
        wait_for_step(launcher, run_dir, saved_at + 1, since_s=time.time())
        launcher.terminate()
        said = rest(launcher)
    assert launcher.returncode == 128 + signal.SIGTERM, said
    end = ended(said, run_dir)
    assert results(run_dir, end) == undisturbed(tmp_path / "undisturbed", end)
    replaced = [json.loads(line)["step"] for line in (run_dir / "metrics-replaced.jsonl").read_text().splitlines()]
    assert replaced.count(1) <= 1 and max(replaced) > saved_at, "the last attempt has begun anew"


@pytest.mark.parametrize("options", [(), RANKS], ids=["one rank", "two ranks"])
def test_a_program_is_started_again_until_it_succeeds(options: tuple[str, ...]) -> None:
    ran = cluster(*options, "--max-restarts", "2", SCRIPTS / "fails.py", "2", "7")
    assert ran.returncode == 0, ran.stderr
    assert {*ran.stdout.splitlines()} == {"start 0", "start 1", "start 2"}
    assert re.findall(r"; attempt (. of .) begins; ", ran.stderr) == ["2 of 3", "3 of 3"]


@pytest.mark.parametrize("options", [(), RANKS], ids=["one rank", "two ranks"])
def test_a_program_is_started_again_until_it_has_failed_too_often(options: tuple[str, ...]) -> None:
    ran = cluster(*options, "--max-restarts", "2", SCRIPTS / "fails.py", "9", "7")
    assert ran.returncode == 7 and "no further attempt: this was attempt 3 of 3" in ran.stderr
    named = r"rank . \(process \d+\)" if options else r"trainer-0 \(process \d+\)"
    assert len(re.findall(rf"hytrain-cluster: {named} ended with exit status 7", ran.stderr)) >= 3


def test_bad_input_is_not_tried_again() -> None:
    ran = cluster("--max-restarts", "2", SCRIPTS / "fails.py", "9", "2")
    assert ran.returncode == 2 and ran.stdout.split() == ["start", "0"]


def test_memory_that_has_run_out_is_named_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel counts whom it has killed."""
    supervisor = Supervisor(ClusterConfig(run_dir=str(tmp_path / "run")), default_name="run")
    monkeypatch.setattr(host, "sizes", lambda: "the machine has 4.0 GiB")
    for kills, refusal in ((7, None), (8, "it would run out of memory again")):
        supervisor._oom_kills = 7
        monkeypatch.setattr(host, "oom_kills", lambda kills=kills: kills)
        with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as killed:
            killed.kill()
            killed.wait()
        end = End(128 + signal.SIGKILL, Child("optimizer-0", killed, -1, tmp_path / "log", None, None))
        assert supervisor._report(end, Attempts(3, step=0, checkpoints=frozenset())) == refusal
        named = f"optimizer-0 (process {killed.pid}) was killed by SIGKILL"
        reason = ": the kernel killed a process because memory ran out; the machine has 4.0 GiB" if refusal else ""
        assert f"{named}{reason}; " in capsys.readouterr().err
    supervisor.close()


def test_attempts_that_reach_nothing_new_are_the_last() -> None:
    attempts = Attempts(9, step=10, checkpoints=frozenset())

    def refusal(step: int, *checkpoints: str, status: int = 1, is_recipe: bool = True) -> str | None:
        return attempts.refusal(status, step=step, checkpoints={*checkpoints}, is_recipe=is_recipe, out_of_memory=False)

    assert [refusal(10), refusal(12), refusal(12), refusal(12, "step-11"), refusal(12, "step-11")] == [None] * 5
    assert refusal(11) == "2 attempts in a row have reached no new step and no new checkpoint"
    assert refusal(11, is_recipe=False) is None and refusal(13, status=3, is_recipe=False) is None
    for status in (0, 2, 3, 75, 130, 138, 143):
        assert refusal(99, status=status) == "it has ended by itself"


@pytest.mark.parametrize(
    ("arguments", "job_end", "left"),
    [
        ((None, None), None, None),
        ((None, "1d2h3m4s"), None, 93784),
        (("5m", "1h"), None, 3300),
        (("5m", None), 3600, 3300),
        (("90s", "1h"), 1000, 910),
        (("1h", "50m"), None, "--save-before 1h: the job ends in 3000 s"),
        (("5m", None), None, "--save-before 5m: when does the job end?"),
        (("5", "1h"), None, "--save-before 5: a time such as 90s, 5m or 11h30m"),
        ((None, ""), None, "--time-limit : a time such as"),
    ],
)
def test_times(
    arguments: tuple[str | None, str | None],
    job_end: int | None,
    left: float | str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(time=lambda: 5000.0, monotonic=lambda: 70.0))
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if job_end is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(5000 + job_end))
    if isinstance(left, str):
        with pytest.raises(ConfigError, match=re.escape(left)):
            time_limit.end_s(*arguments)
    else:
        assert time_limit.end_s(*arguments) == (None if left is None else 70 + left)


def test_a_run_whose_terminal_is_gone_still_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """Nobody reads what the launcher says about the signal: `2>&1 | tee log` ends at Ctrl-C, too."""
    with begin(recipe_in(tmp_path)) as launcher:
        wait_for_step(launcher, tmp_path / "run", 2)
        assert launcher.stderr is not None and launcher.stdout is not None
        launcher.stderr.close()
        launcher.stdout.close()
        launcher.terminate()
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert latest(tmp_path / "run") is not None


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a full pipe that nobody reads, as a terminal after Ctrl-S."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while os.write(write, b"." * 4096):
            pass
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


def test_a_run_whose_terminal_does_not_read_ends_with_a_checkpoint_when_it_is_told_to(
    tmp_path: Path, unread: int
) -> None:
    recipe, job = recipe_in(tmp_path), environment(HYTRAIN_RUN_DIR=None)
    with started(sys.executable, CLUSTER, recipe, env=job, stdout=unread, stderr=unread) as launcher:
        wait_for_step(launcher, tmp_path / "run", 2)
        launcher.terminate()
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert latest(tmp_path / "run") is not None


FLOOD = """
import threading, torch, hytrain
def flood():
    while True:
        print(".", end="", flush=True)
model = torch.nn.Linear(4, 4)
opt = hytrain.SGD(model)
threading.Thread(target=flood, daemon=True).start()
while True:
    model(torch.ones(4)).sum().backward()
    opt.step()
    opt.zero_grad()
"""


def test_a_death_is_noticed_behind_output_that_never_ends_and_nobody_reads(tmp_path: Path, unread: int) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    job = environment(HYTRAIN_RUN_DIR=str(tmp_path / "run"))
    with started(sys.executable, CLUSTER, tmp_path / "flood.py", env=job, stdout=unread, stderr=unread) as launcher:
        wait_for_step(launcher, tmp_path / "run", 2)
        wait_for(lambda: (tmp_path / "run" / "logs" / "trainer-0.log").stat().st_size)
        roles_below(psutil.Process(launcher.pid))["optimizer"].kill()
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_a_copy_of_a_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Signals()
    for now_s, is_second in ((100.0, False), (100.0 + COPY_S, False), (100.1 + COPY_S, True)):
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        heard.on_ending(signal.SIGTERM, None)
        assert heard.again is is_second
    heard.close()


def test_a_signal_that_comes_while_a_program_starts_is_the_program_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is executed, its process has the launcher's handlers, which would only remember the signal."""
    monkeypatch.setattr(process, "end_with_parent", lambda: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        out, err = os.dup(1), os.dup(2)
        waits = [sys.executable, "-c", "import signal; signal.pause()"]
        child = process.start_program("it", waits, log=tmp_path, environment={}, stdout=out, stderr=err)
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        assert child.process.wait(60) == -signal.SIGTERM
    finally:
        child.process.kill()
        os.close(child.pidfd)


def test_a_signal_while_the_processes_start_is_heard(tmp_path: Path) -> None:
    supervisor = Supervisor(ClusterConfig(run_dir=str(tmp_path / "run")), default_name="run")
    supervisor.signals.on_ending(signal.SIGINT, None)
    assert supervisor.supervise(["a program that would be started"]) == 128 + signal.SIGINT
    supervisor.close()
