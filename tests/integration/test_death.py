"""One process dies, other than the coordinator: the others end, the command says which it was, nothing is left behind.

The `no_leaks` fixture looks for processes, descriptors and socket folders afterwards; planes are memfds, which go
with the last process that has them.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import DEADLINE_S, adamw, process, train
from programs import CLUSTER, SCRIPTS, read_until, roles_below, started
from small_models import perceptron, square_loss, vectors

from hytrain.errors import ClusterError, WorkerDied
from hytrain.run import link
from hytrain.run.cluster import OBITUARY_S, STOP_TIMEOUT_S, PrivateCluster, has_ended
from hytrain.step.gradient import RoundTrip
from protocol.messages import GradReady, TakeOver
from workers.launch.cluster import RECORDS_GRACE_S, STOP_GRACE_S

pytestmark = pytest.mark.usefixtures("own_run")
ENDLESS = SCRIPTS / "endless.py"


@contextmanager
def training(*command: str | Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, psutil.Process]]]:
    """A process that trains through three, and all of HyTrain's processes that it consists of, by role."""
    with started(*command, stderr=subprocess.PIPE) as first:
        read_until(first, "step 5")
        root = psutil.Process(first.pid)
        if str(CLUSTER) in root.cmdline():
            family = {"launcher": root, **roles_below(root)}
            family["trainer"] = family.pop("endless")
        else:
            [launcher] = [child for child in root.children() if "workers.launch.launcher" in child.cmdline()]
            family = {"trainer": root, "launcher": launcher, **roles_below(launcher)}
        assert family.keys() == {"launcher", "coordinator", "optimizer", "trainer"}
        yield first, family


@contextmanager
def stopped_loaders(trainer: psutil.Process) -> Iterator[None]:
    """Workers of a DataLoader, forked from the trainer, hold their ends of all pipes, whatever happens to others."""
    loaders = [child for child in trainer.children() if "endless.py" in " ".join(child.cmdline())]
    assert len(loaders) == 2
    for loader in loaders:
        loader.suspend()
    try:
        yield
    finally:
        for loader in loaders:
            loader.kill()


def wait_for_ends(processes: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(list(processes.values()), DEADLINE_S)
    assert not alive, f"still there: {', '.join(role for role, process in processes.items() if process in alive)}"


def all_end(first: subprocess.Popen[str], family: dict[str, psutil.Process]) -> int:
    """Wait for the ends of all; the exit status of the first."""
    wait_for_ends({role: process for role, process in family.items() if process.pid != first.pid})
    return first.wait(DEADLINE_S)


def wait_for_zombie(process: psutil.Process) -> None:
    """Until the end of a process that stays a zombie, since its parent is stopped."""
    descriptor = os.pidfd_open(process.pid)
    try:
        assert select.select([descriptor], [], [], DEADLINE_S)[0], f"{process} is still there"
    finally:
        os.close(descriptor)


def rest(first: subprocess.Popen[str]) -> str:
    """What it has said on standard error."""
    assert first.stderr is not None
    return first.stderr.read()


@pytest.mark.parametrize("role", ["optimizer", "trainer"])
def test_the_launcher_ends_all_and_names_the_dead(role: str, run_dir: Path) -> None:
    with training(sys.executable, CLUSTER, ENDLESS, "2") as (first, family):
        with stopped_loaders(family["trainer"]):
            family[role].kill()
            assert all_end(first, family) == 128 + signal.SIGKILL
        errors = rest(first)
    said = errors[errors.index("hytrain-cluster: ") :]
    assert f"{role}-0 (process {family[role].pid}) was killed by SIGKILL" in said
    log = run_dir / "logs" / f"{role}-0.log"
    assert str(log) in said
    if role != "trainer":  # its output has been on the terminal all the time
        assert log.read_text().splitlines()[-1] in said


def test_the_dead_worker_is_named_even_if_the_trainer_has_failed_of_it() -> None:
    with training(sys.executable, CLUSTER, ENDLESS) as (first, family):
        family["launcher"].suspend()
        family["optimizer"].kill()
        wait_for_zombie(family["trainer"])
        family["launcher"].resume()
        assert all_end(first, family) == 128 + signal.SIGKILL
        errors = rest(first)
    assert f"optimizer-0 (process {family['optimizer'].pid}) was killed by SIGKILL" in errors


@pytest.mark.parametrize("command", [(CLUSTER, ENDLESS, "2"), (ENDLESS, "2")], ids=["launcher", "plain script"])
def test_all_leave_when_the_process_that_began_is_killed(command: tuple[str | Path, ...]) -> None:
    with training(sys.executable, *command) as (first, family), stopped_loaders(family["trainer"]):
        first.kill()
        assert all_end(first, family) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all(number: signal.Signals) -> None:
    with training(sys.executable, CLUSTER, ENDLESS) as (first, family):
        first.send_signal(number)
        if number == signal.SIGINT:  # Ctrl-C reaches the whole foreground group
            family["trainer"].send_signal(number)
        assert all_end(first, family) == 128 + number


def obituary(role: str, pid: int) -> str:
    """How a plain script is told that a process of its run was killed, as a pattern."""
    name, too = ("the launcher", ", and the others with it") if role == "launcher" else (f"{role}-0", "")
    said = f"{name} (process {pid}) was killed by SIGKILL{too}, as the kernel does when memory runs out; its log is in"
    return re.escape(said) + r" .*/logs\. That was after step \d+: start the program again"


@pytest.mark.parametrize("role", ["optimizer", "launcher"])
def test_a_plain_script_raises_and_ends(role: str) -> None:
    """Nobody ends a user's own process, but its next call of HyTrain raises."""
    with training(sys.executable, ENDLESS) as (first, family):
        family[role].kill()
        assert all_end(first, family) == 1
        errors = rest(first)
    assert re.search(rf"\nhytrain.errors.WorkerDied: {obituary(role, family[role].pid)}", errors)


@pytest.mark.parametrize("role", ["optimizer", "launcher"])
def test_every_call_after_a_death_raises_and_another_run_can_follow(role: str) -> None:
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(3), square_loss)
        workers = {known: psutil.Process(pid) for known, pid, _ in opt.processes() if pid != os.getpid()}
        victim = workers["optimizer"].parent() if role == "launcher" else workers[role]
        assert victim is not None and victim.pid != os.getpid()
        victim.kill()
        with pytest.raises(WorkerDied) as raised:
            train(model, opt, itertools.count(), square_loss)
        assert re.match(obituary(role, victim.pid), str(raised.value))
        for call in (opt.synchronize, opt.state_dict, opt.step, lambda: model(vectors(0)), model.state_dict):
            with pytest.raises(ClusterError):
                call()
    if role == "launcher":
        wait_for_ends(workers)
    with adamw(model) as opt:
        train(model, opt, range(3), square_loss)
        assert opt.statistics().step == 3


def test_what_an_optimizer_has_failed_of_is_raised_once_it_has_ended() -> None:
    """Or a launcher would see the trainer's end first, and name it."""
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(3), square_loss)
        pid = process(opt, "optimizer").pid
        opt._session._link.post("optimizer", TakeOver(plan_id=99, lid=0, step=99, banks=(0, 0)))
        with pytest.raises(WorkerDied, match="optimizer-0 failed.*OwnershipError: layer 0 cannot go to the cpu"):
            train(model, opt, itertools.count(), square_loss)
        assert has_ended(pid)


def test_a_count_that_is_wrong_ends_the_run_before_an_update_is_made_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of it, on its way: the update would have another bias correction."""
    model, grad_ready = perceptron(), RoundTrip.departed

    def flipped(*departure: Any) -> GradReady:
        message = grad_ready(*departure)
        return replace(message, counts=tuple(count ^ 64 * (message.step == 3) for count in message.counts))

    monkeypatch.setattr(RoundTrip, "departed", flipped)
    with adamw(model, k=0.0) as opt:
        with pytest.raises(
            WorkerDied, match=r"optimizer-0 failed in step 3.*QueueError: .* counts updates \(68, 68\) after \(3, 3\)"
        ):
            train(model, opt, itertools.count(), square_loss)


def test_a_trainer_whose_launcher_was_killed_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends, too: what it has not read by then is for nobody."""
    monkeypatch.setattr(link, "LINGER_S", 10 * DEADLINE_S)
    model = perceptron()
    with adamw(model, k=1.0) as opt:
        train(model, opt, range(3), square_loss)
        workers = {known: psutil.Process(pid) for known, pid, _ in opt.processes() if pid != os.getpid()}
        workers["coordinator"].suspend()
        for name in "abcdefgh":
            opt.log(3, **{name * (1 << 20): 1.0})
        workers["launcher"] = launcher = workers["optimizer"].parent() or psutil.Process()
        launcher.kill()
        with pytest.raises(WorkerDied):
            train(model, opt, itertools.count(3), square_loss)
    workers["coordinator"].resume()
    wait_for_ends(workers)


KILLS_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            "time.sleep(1.5); print('optimizer-0 (process 7) ended', file=sys.stderr)",
            r"optimizer-0 \(process 7\) ended",
        ),
        (
            f"os.close(2); time.sleep(0.5); {KILLS_ITSELF}",
            r"the launcher \(process \d+\) was killed by SIGKILL, and .*",
        ),
    ],
    ids=["speaks late", "ends late"],
)
def test_a_launcher_is_waited_for_however_long_it_takes_to_say_who_died(does: str, said: str) -> None:
    """Its end can be seen only after that of its output."""
    command = [sys.executable, "-c", f"import os, signal, sys, time; {does}"]
    private = PrivateCluster.__new__(PrivateCluster)
    with subprocess.Popen(command, stderr=subprocess.PIPE) as private._launcher:
        assert re.fullmatch(said, private.first_death())


def test_a_launcher_has_the_time_that_its_processes_have() -> None:
    """Killed before, it would neither say what is missing nor write the timeline."""
    assert min(STOP_TIMEOUT_S, OBITUARY_S) > 2 * (RECORDS_GRACE_S + STOP_GRACE_S)
