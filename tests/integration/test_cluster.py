"""Who is started by whom: `bin/hytrain-cluster` with a recipe and with a program, and a plain script alone."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path

import psutil
import pytest
import torch
from helpers import DEADLINE_S, adamw, train, train_until, wait_for
from programs import CLUSTER, SCRIPTS, cluster, environment, go_on, read_until, roles_below, run, started, write_recipe
from small_models import perceptron, square_loss
from variants import slow

import hytrain
from hytrain.config import CLUSTER_VARIABLE, ClusterConfig
from hytrain.errors import ConfigError
from hytrain.memory.capacity import gpu_memory
from hytrain.monitoring import live_runs
from hytrain.recipe import config as recipes
from hytrain.run.saved import latest
from hytrain.run.seats import SHORT
from hytrain.state.folders import INDEX
from protocol.metrics import BY_NAME
from workers import run_folder
from workers.launch import cluster as cluster_module
from workers.launch import launcher
from workers.run_folder import claim

pytestmark = pytest.mark.usefixtures("own_run")
PLAIN = SCRIPTS / "plain.py"
STEPS = "20"


@pytest.fixture(scope="module")
def by_torch() -> str:
    """What the script prints at its end with torch's optimizer."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(sys, "argv", [str(PLAIN), "torch", STEPS])
        runpy.run_path(str(PLAIN))
    return said.getvalue().splitlines()[-1]


def test_spawned_workers_and_a_fork_that_ends_like_a_program() -> None:
    ran = run(sys.executable, SCRIPTS / "children.py", how=subprocess.Popen)
    assert ran.returncode == 0, ran.stderr
    [one, other] = ran.stdout.splitlines()
    assert one == other and one.startswith("weights")


def test_a_program_under_the_launcher(by_torch: str, run_dir: Path) -> None:
    """No main guard, DataLoader workers; all that it starts, and the weights that torch would have made of it."""
    with started(sys.executable, CLUSTER, PLAIN, "hytrain", STEPS, "--pause", how=subprocess.Popen) as launcher:
        read_until(launcher, "paused")
        processes = roles_below(psutil.Process(launcher.pid))
        assert processes.keys() == {"coordinator", "optimizer", "plain"}
        assert roles_below(processes["optimizer"]) == roles_below(processes["coordinator"]) == {}
        [socket_dir] = Path(os.environ["TMPDIR"]).glob("hytrain-*")
        assert processes["plain"].environ()[CLUSTER_VARIABLE] == str(socket_dir)
        assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
        for name in ("settings.json", "cluster.json"):
            assert stat.S_IMODE((socket_dir / name).stat().st_mode) == 0o600
        known = json.loads((socket_dir / "cluster.json").read_text())
        assert known["launcher_pid"] == launcher.pid
        assert known["coordinator_pid"] == processes["coordinator"].pid
        assert known["optimizer_pids"] == [processes["optimizer"].pid]
        go_on(launcher)
        assert read_until(launcher, "weights") == by_torch + "\n"
        assert launcher.wait() == 0
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs == {"coordinator-0.log", "optimizer-0.log", "trainer-0.log"}
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == int(STEPS)
    [launched] = json.loads((run_dir / "environment.json").read_text())
    assert launched["command"][1:4] == [str(CLUSTER), str(PLAIN), "hytrain"]
    assert (run_dir / "logs" / "trainer-0.log").read_text().split("\n") == ["begin", "paused", by_torch, ""]


def test_a_full_disk_ends_no_training(by_torch: str, run_dir: Path) -> None:
    """Nor does one on which files may not grow any more, in the middle of a run."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs/trainer-0.log").symlink_to("/dev/full")
    command = (sys.executable, CLUSTER, PLAIN, "hytrain", STEPS, "--pause")
    with started(*command, stderr=subprocess.PIPE) as launcher:
        read_until(launcher, "paused")
        roles_below(psutil.Process(launcher.pid))["coordinator"].rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        go_on(launcher)
        assert read_until(launcher, "weights") == by_torch + "\n"
        assert launcher.wait(DEADLINE_S) == 0
        assert launcher.stderr is not None
        assert launcher.stderr.read().count("trainer-0.log lacks output from here on: No space left on device") == 1
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) < int(STEPS)


def test_a_plain_script(by_torch: str, tmp_path: Path) -> None:
    """The same, started by the user alone: it runs once, in a folder of its own."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ["-c", "user.name=name", "-c", "user.email=email"]
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "first"], cwd=tmp_path, check=True)
    home = environment(HYTRAIN_RUN_DIR=None, XDG_STATE_HOME=str(tmp_path))
    command = (sys.executable, PLAIN, "hytrain", STEPS, "--pause")
    with started(*command, how=subprocess.Popen, cwd=tmp_path, env=home) as script:
        read_until(script, "paused")
        children = psutil.Process(script.pid).children()
        [launcher] = [child for child in children if "workers.launch.launcher" in child.cmdline()]
        assert roles_below(launcher).keys() == {"coordinator", "optimizer"}
        assert len(children) == 3, "the launcher and two workers of the DataLoader, none that ran the script again"
        [live] = run_folder.find(tmp_path / "hytrain" / "runs")
        assert live.live and re.fullmatch(r"plain-\d{8}-\d{6}", live.folder.name)
        assert not run_folder.prune(live)
        go_on(script)
        assert read_until(script, "weights") == by_torch + "\n"
        assert script.wait() == 0
    [ended] = run_folder.find(tmp_path / "hytrain" / "runs")
    assert ended.prunable and ended.steps == int(STEPS)
    [began] = json.loads((ended.folder / "environment.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert began["commit"] == head.stdout.strip() and began["folder"] == str(tmp_path)
    assert began["command"][1:] == [str(PLAIN), "hytrain", STEPS, "--pause"] and began["host"] == os.uname().nodename
    assert began["versions"]["torch"] == torch.__version__ and began["cpu"] and began["gpu"] is None


def test_a_recipe_through_three_processes(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "small"
    core = str(min(os.sched_getaffinity(0)))
    train = {"steps": 20, "eval_every": 10, "max_grad_norm": 0.5, "loss_scale": "dynamic"}
    recipe = write_recipe(
        tmp_path,
        run={"dir": str(run_dir.parent), "name": run_dir.name},
        model={"dtype": "float16"},
        train=train,
        sample={"prompt": "the people", "tokens": 5},
        cluster={"cores": core},
    )
    ran = cluster(recipe, how=subprocess.Popen, env=environment(HYTRAIN_RUN_DIR=None))
    assert ran.returncode == 0, ran.stderr
    for role in ("trainer", "optimizer", "coordinator"):
        assert re.search(rf"{role}\D+\d+", ran.stdout), ran.stdout
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 21))
    assert all(record.keys() <= BY_NAME.keys() for record in records)
    assert records[-1]["loss"] < records[0]["loss"] and 0.3 <= records[-1]["k"] < 1
    assert [record["step"] for record in records if "validation_loss" in record] == [10, 20]
    assert [record["loss_scale"] for record in records] == [2.0**16] * 20
    norms = [record["grad_norm"] for record in records]
    assert len(set(norms)) == 20 and all(0.1 < norm < 100.0 for norm in norms), "before clipping, without the scale"
    [index] = (run_dir / "checkpoints").glob(f"step-20/**/{INDEX}")
    saved = json.loads(index.read_text())
    assert saved["loss_scale"]["good_steps"] == max(saved["step_of"].values()) == 20
    for name in ("recipe.yaml", "loss.png", "checkpoints/step-20/model.safetensors"):
        assert (run_dir / name).is_file(), name
    assert f"1 thread on cores {core} " in (run_dir / "logs" / "optimizer-0.log").read_text()


def test_one_run_after_another_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh start leaves the run before beside it; one that is refused leaves it as it was."""
    recipe = write_recipe(tmp_path, run={"dir": str(tmp_path), "name": "run"})
    folder, aside, held = tmp_path / "run", tmp_path / "run.1", list[int]()
    monkeypatch.delenv("HYTRAIN_RUN_DIR")
    monkeypatch.setattr(run_folder, "claim", lambda folder: held.append(claim(folder)))

    def start(*overrides: str, steps: int = 0, status: int | None = None) -> tuple[int, str]:
        """The command's status and sentence, where its processes make so many steps: without one they refuse."""
        ends_with = status if status is not None else 0 if steps else 2

        class Supervisor(nullcontext[object]):
            def __init__(self, config: ClusterConfig, **others: object) -> None:
                super().__init__(self)

            def say_where(self) -> None: ...

            def supervise(self, *command: object, **how: object) -> int:
                if steps:
                    with (folder / "metrics.jsonl").open("a") as metrics:
                        metrics.write("a step\n" * steps)
                return ends_with

        monkeypatch.setattr(launcher, "Supervisor", Supervisor)
        status = launcher.main([str(recipe), *[word for override in overrides for word in ("--set", override)]])
        while held:
            os.close(held.pop())  # as when the command ends
        return status, capsys.readouterr().err

    def contents(of: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in of.iterdir()}

    assert start(steps=4) == (0, "")
    before = contents(folder)
    lock = claim(folder)
    status, said = start()
    assert status == 2 and "another run is using" in said
    os.close(lock)
    status, said = start()
    assert status == 2 and f"nothing was trained, so the earlier run is back in {folder}" in said and not aside.exists()
    assert start(status=130)[0] == 130 and contents(folder) == before, "Ctrl-C before the first step"
    assert start(status=139)[0] == 139 and aside.exists(), "the logs of a crash are needed"
    run_folder.bring_back(folder, aside)
    assert start("train.resume=latest") == (2, "") and contents(folder) == before
    status, said = start(steps=3)
    assert status == 0 and f"{folder} had an earlier run in it, which is in {aside} now" in said
    assert contents(aside).items() <= before.items() and contents(folder)["metrics.jsonl"] == "a step\n" * 3
    assert start("train.resume=latest", steps=2) == (0, "")
    assert contents(folder)["metrics.jsonl"] == "a step\n" * 5


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGTERM, ("trainer",)),
        slow(signal.SIGUSR1, ("launcher",)),
        slow(signal.SIGHUP, ("trainer", "launcher")),
    ],
)
def test_a_recipe_that_is_told_to_end_says_how_to_go_on(
    number: signal.Signals, told: tuple[str, ...], tmp_path: Path
) -> None:
    endless = {"steps": 100_000, "warmup_steps": 0, "checkpoint_every": 5}
    recipe = write_recipe(tmp_path, run={"dir": str(tmp_path), "name": "run"}, train=endless)
    options = {"env": environment(HYTRAIN_RUN_DIR=None), "stderr": subprocess.PIPE}
    with started(sys.executable, CLUSTER, recipe, **options) as launcher:
        wait_for(lambda: latest(tmp_path / "run") is not None)
        roles = {**roles_below(psutil.Process(launcher.pid)), "launcher": psutil.Process(launcher.pid)}
        for role in told:
            roles[role].send_signal(number)
        _, said = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 128 + number
    assert re.search(r"hytrain: ended after step \d+, and saved a checkpoint; --set train.resume=latest resumes", said)


RANKS = (CLUSTER, "--nproc-per-node", "2")


@pytest.mark.parametrize("launched", [(CLUSTER,), slow(RANKS), ()], ids=["launched", "ranks", "alone"])
def test_a_warning_that_the_time_is_up_is_the_programs(launched: tuple[str | Path, ...]) -> None:
    """Slurm's `--signal=USR1`: the program decides what it means, whether the first process or all of them get it."""
    ranks = 2 if "2" in launched else 1
    with started(sys.executable, *launched, SCRIPTS / "warned.py", stderr=subprocess.PIPE) as first:
        for _ in range(ranks):
            read_until(first, "ready")
        tree = psutil.Process(first.pid)
        tree.send_signal(signal.SIGUSR1)
        for _ in range(ranks):
            read_until(first, "warned")
        for process in [tree, *tree.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        said, errors = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0, errors
    assert said.count("saved") == ranks


@pytest.mark.parametrize("prints", [False, True])
def test_files_that_a_cleaner_would_remove_are_touched(
    prints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "TOUCH_EVERY_S", 0.01)
    run = cluster_module.RunningCluster(ClusterConfig(), run_name="run", run_dir=tmp_path / "run", ranks=1)
    run.socket_dir = sockets = tmp_path / "sockets"
    (sockets / "torchrun").mkdir(parents=True)
    os.mkfifo(sockets / "torchrun" / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(sockets / "coordinator"))
        old = [sockets, *sockets.rglob("*")]
        for path in old:
            os.utime(path, (0, 0))
        readable, writable = os.pipe()

        def end_when_all_are_touched() -> None:
            given_up_s = time.monotonic() + DEADLINE_S
            while any(path.stat().st_mtime == 0 for path in old) and time.monotonic() < given_up_s:
                time.sleep(0.01)
            os.write(writable, b"x")

        thread = threading.Thread(target=end_when_all_are_touched)
        if prints:
            os.write(writable, b"x")
        thread.start()
        while run.wait([readable]) == [readable] and prints and thread.is_alive():
            pass
        thread.join()
        assert all(path.stat().st_mtime > 0 for path in old)
    os.close(readable)
    os.close(writable)


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, run={"dir": str(tmp_path), "name": "run"}, train={"steps": 60, "warmup_steps": 0})
    options = {"env": environment(HYTRAIN_RUN_DIR=None), "stderr": subprocess.DEVNULL}
    with started("nohup", sys.executable, CLUSTER, recipe, **options) as launcher:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size)
        for process in (launcher, *psutil.Process(launcher.pid).children()):
            with suppress(psutil.NoSuchProcess):  # it may be at its end
                process.send_signal(signal.SIGHUP)
        launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and len(metrics.read_text().splitlines()) == 60


def test_programs_do_not_share_a_folder(tmp_path: Path) -> None:
    lock = claim(tmp_path / "run")
    refused = cluster("--run-dir", tmp_path / "run", PLAIN, "torch", "1", env=environment(HYTRAIN_RUN_DIR=None))
    assert refused.returncode == 2 and "another run is using" in refused.stderr
    with adamw(perceptron(), run_dir=tmp_path / "run") as opt:
        assert opt.run_dir == tmp_path / "run-2"
    os.close(lock)


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot be written to"),
        adamw(perceptron(), run_dir=tmp_path / "file" / "run"),
    ):
        pass


def test_under_a_long_tmpdir_sockets_have_a_short_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monitors find it, nobody else may enter it, and it goes with the run. The kernel takes no longer path."""
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    model = perceptron()
    with adamw(model) as opt:
        train(model, opt, range(2), square_loss)
        folder = Path(opt._session.place.cluster.socket_dir)
        assert folder.parent == Path(SHORT) and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert str(folder) in [run.socket_dir for run in live_runs()]
    assert not folder.exists() and not list(long.glob("hytrain-*"))


def test_the_next_run_begins_with_the_plan_in_which_this_one_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes it away, until it rests itself."""
    monkeypatch.setenv("HYTRAIN_PLAN_CACHE", str(plans := tmp_path / "plans"))

    def first_plan(opt: hytrain.AdamW) -> str:
        log = (opt.run_dir / "logs" / "coordinator-0.log").read_text()
        return [line for line in log.splitlines() if " plan 0 for step 0: " in line][-1]

    model = perceptron()
    with adamw(model, k="auto") as opt:
        assert first_plan(opt).endswith("the first plan, before a step is measured")
        train_until(lambda: list(plans.glob("*.json")), model, opt, 0, square_loss)
    with adamw(model := perceptron(), k="auto") as opt:
        assert first_plan(opt).endswith("the plan with which the last run like this one ended")
        assert not list(plans.iterdir())
        train(model, opt, range(2), square_loss)


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file, from_environment = {"threads": 3}, {"HYTRAIN_THREADS": "2"}
    assert ClusterConfig.resolve(file=file, environment={}, flags={"threads": None}).threads == 3
    assert ClusterConfig.resolve(file=file, environment=from_environment, flags={"threads": None}).threads == 2
    assert ClusterConfig.resolve(file=file, environment=from_environment, flags={"threads": 1}).threads == 1
    (tmp_path / "script.py").touch()
    env = environment(HYTRAIN_RUN_DIR=str(tmp_path / "not"))
    assert cluster("--run-dir", tmp_path / "flag", tmp_path / "script.py", env=env).returncode == 0
    assert (tmp_path / "flag" / "logs").is_dir() and not (tmp_path / "not").exists()


def test_limits_on_memory_arrive(tmp_path: Path) -> None:
    """A recipe's at the launcher, in bytes; a script's at what the planner may use."""
    sections = ["cluster.gpu_memory_limit=24GiB", "cluster.host_memory_limit=0.5 GiB"]
    settings = launcher._cluster_settings(recipes.load(write_recipe(tmp_path), sections))
    assert (settings["gpu_memory_limit"], settings["host_memory_limit"]) == (24 << 30, 1 << 29)
    flags = {"gpu_memory_limit": "24GB", "host_memory_limit": "1000000000"}
    resolved = ClusterConfig.resolve(flags=flags, environment={})
    assert (resolved.gpu_memory_limit, resolved.host_memory_limit) == (24 * 10**9, 10**9)
    assert ClusterConfig.resolve(flags={"host_memory_limit": "0"}, environment={}).host_memory_limit == 0
    assert ClusterConfig.resolve(flags={"host_memory_limit": "0"}, environment={}).host_memory_limit == 0
    for given, limit in (("24GiB", 24 << 30), (24 << 30, 24 << 30), (None, None)):
        with adamw(perceptron(), gpu_memory_limit=given):
            assert gpu_memory(torch.device("cpu")).limit == limit
    with pytest.raises(ConfigError, match="there is no setting gpu_memory: known are cores, threads"):
        ClusterConfig.resolve(file={"gpu_memory": "24GiB"}, environment={})
    for wrong in ("24", "24 gigs", "-1GiB", "GiB"):
        with pytest.raises(ConfigError, match=f"gpu_memory_limit is '{wrong}': a size has a unit"):
            ClusterConfig.resolve(flags={"gpu_memory_limit": wrong}, environment={})
    with pytest.raises(ConfigError, match='a size has a unit, as in "24GiB" or "24GB", not 24'):
        recipes.load(write_recipe(tmp_path), ["cluster.gpu_memory_limit=24"])


def test_one_optimizer_after_another_and_two_at_once(run_dir: Path) -> None:
    for _ in range(2):
        model = perceptron()
        with adamw(model, k=0.5) as opt:
            train(model, opt, range(2), square_loss)
    first, second = perceptron(), perceptron()
    with adamw(first, k=0.0) as one, adamw(second, k=1.0, run_dir=str(run_dir) + "-2") as other:
        for step in range(5):
            train(first, one, [step], square_loss)
            train(second, other, [step], square_loss)
        assert {pid for _, pid, _ in one.processes()} & {pid for _, pid, _ in other.processes()} == {os.getpid()}
        one.synchronize()
        assert all(map(lambda a, b: a.equal(b), first.parameters(), second.parameters()))


def test_a_module_as_python_m_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    ran = cluster("--run-dir", tmp_path / "run", "-m", "package.module", "--set", "a=b", "-m", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "__main__ package.module ['--set', 'a=b', '-m']\n"


@pytest.mark.parametrize(("ending", "status"), [("sys.exit(7)", 7), ("1 / 0", 1)])
def test_the_programs_own_end_is_passed_on(ending: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; print('said', flush=True); print('complaint', file=sys.stderr); {ending}")
    ran = cluster(script)
    assert ran.returncode == status and ran.stdout.startswith("said\n")
    assert "complaint" in ran.stderr and "complaint" not in ran.stdout
    assert "trainer-0 (process" in ran.stderr and f"exit status {status}" in ran.stderr
    assert ("ZeroDivisionError" in ran.stdout + ran.stderr) is (status == 1)


def test_the_first_words_say_what_is_being_done_and_where_to_watch(tmp_path: Path) -> None:
    """Also from which checkpoint a run goes on."""
    recipe = write_recipe(tmp_path, run={"dir": str(tmp_path), "name": "run"}, train={"steps": 3, "warmup_steps": 1})
    first = cluster(recipe, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    said = first.stderr.splitlines()
    assert re.fullmatch(r"hytrain-cluster: starting its processes; watch them with: \S*hytrain-monitor run", said[0])
    words = ["importing torch", "reading ", "building the model", "placing the optimizer's state", "first plan: k=0.6"]
    words.append("training from step 1 to 3")
    assert [line[: len(word)] for line, word in zip(said[1:], (f"hytrain: {word}" for word in words))] == [
        f"hytrain: {word}" for word in words
    ]
    again = cluster(recipe, "--set", "train.resume=latest", "--set", "train.steps=4", cwd=tmp_path)
    saved = tmp_path / "run" / "checkpoints" / "step-3"
    assert f"hytrain: training from step 4 to 4, resumed from {saved}\n" in again.stderr
