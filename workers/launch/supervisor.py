"""Supervises the processes of one run on this machine, and reports how they ended. `launcher` calls it.

cluster, trainer ─▶ one ends ─▶ the others are stopped ─▶ its exit status, its name, the end of its log
a signal, or the time is up ─▶ the trainer is told to end         └─▶ perhaps another attempt
"""

from __future__ import annotations

import math
import os
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil

from hytrain.config import CLUSTER_VARIABLE, ClusterConfig, workers_environment
from hytrain.errors import ConfigError
from hytrain.memory import host
from hytrain.run import saved
from hytrain.run.seats import holder, seat_file
from workers import run_folder
from workers.exits import EXIT_AGAIN, EXIT_DIVERGED, EXIT_USAGE
from workers.launch import process
from workers.launch.attempts import DELIBERATE, Attempts
from workers.launch.cluster import STOP_GRACE_S, RunningCluster
from workers.launch.output import say
from workers.launch.process import RESTARTS, Child
from workers.launch.signals import Signals
from workers.launch.tee import Tee
from workers.launch.torchrun import Job

#: The trainer's place under torchrun.
AGENT: Final = "torchrun"
#: How often the seats are looked at once the process that started the cluster has left.
SEAT_PERIOD_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended. `dead` is the process that has failed, if any; `was_asked`: after it was asked to end."""

    status: int
    dead: Child | None = None
    was_asked: bool = False


class Supervisor:
    """One run on this machine, from its start to its end: so many ranks, an optimizer for each, and the program."""

    def __init__(self, config: ClusterConfig, *, default_name: str, ranks: int = 1) -> None:
        self._ranks = ranks
        self.run_name = config.run_name or f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.run_dir = Path(config.run_dir or run_folder.create(self.run_name, config.keep_runs)).resolve()
        self.cluster = RunningCluster(config, run_name=self.run_name, run_dir=self.run_dir, ranks=ranks)
        self.signals = Signals()
        self._heard = False
        self._end_s = math.inf
        self._recipe_in: Path | None = None
        self._progress = run_folder.NOTHING
        self._oom_kills = 0

    def say_where(self) -> None:
        """The first words: where the run's records and logs are, and how to watch it. Its processes take a while."""
        monitor, here = "hytrain-monitor", Path.cwd()
        if shutil.which(monitor) is None and (beside := Path(sys.argv[0]).with_name(monitor)).exists():
            monitor = str(beside)  # this is a checkout
        folder = str(self.run_dir.relative_to(here) if self.run_dir.is_relative_to(here) else self.run_dir)
        say(f"hytrain-cluster: starting its processes; watch them with: {monitor} {shlex.quote(folder)}")

    def __enter__(self) -> Self:
        """Start coordinator and optimizers. If one does not become ready, stops all and raises `ClusterError`."""
        try:
            (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(run_folder.unwritable(self.run_dir, error)) from None
        try:
            self.signals.listen()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._oom_kills = host.oom_kills()
        self.cluster.start()

    def supervise(
        self,
        command: Sequence[str],
        job: Job | None = None,
        *,
        end_s: float | None = None,
        restarts: int = 0,
        recipe_in: Path | None = None,
    ) -> int:
        """Run the trainer in the foreground, or torchrun's agent with a trainer for each rank; return its exit status.

        Its output goes to the terminal and to its log. `end_s` is when it is to end, by the monotonic clock. If a
        process fails, all are started again, up to `restarts` times. If it is a recipe's, `recipe_in` is the folder
        with its checkpoints.
        """
        self._end_s, self._recipe_in = math.inf if end_s is None else end_s, recipe_in
        self._progress = run_folder.progress(self.run_dir)
        counts = {"TORCHELASTIC_RESTART_COUNT": "0", RESTARTS: "0"} if restarts else {}
        attempts = Attempts(restarts, *self._reached())
        while True:
            if self.signals.first is not None:  # while the processes were started
                return 128 + self.signals.first
            again = ["--again"] if recipe_in and run_folder.progress(self.run_dir) != self._progress else []
            end = self._attempt([*command, *again], job, counts)
            if end.dead is None:
                return end.status
            refusal = self._report(end, attempts)
            if refusal is not None or end.was_asked:
                return end.status
            self.cluster.stop()
            if self.signals.first is None:
                self._start()
            counts = dict.fromkeys(counts, str(attempts.number - 1))

    def _reached(self) -> tuple[int, frozenset[str]]:
        """Where the run has got to: its last step, and its checkpoints."""
        return run_folder.last_step(self.run_dir), run_folder.progress(self.run_dir)[1]

    def _report(self, end: End, attempts: Attempts) -> str | None:
        """Say which process has ended the attempt, and what follows. Returns why there is no further attempt."""
        assert end.dead is not None
        (step, checkpoints), is_recipe = self._reached(), self._recipe_in is not None
        killed = end.status == 128 + signal.SIGKILL
        out_of_memory = killed and host.oom_kills() > self._oom_kills
        refusal = attempts.refusal(end.status, step, checkpoints, is_recipe=is_recipe, out_of_memory=out_of_memory)
        at = f" after step {step}" if step else ""
        how = f"{process.first_words(end.dead)}{at}"
        if end.dead.name == AGENT and end.dead.process.returncode >= 0:
            how = f"ranks have failed{at}"  # which ones, it has said
        is_worker = end.dead.life is not None
        if out_of_memory:
            how += f": the kernel killed a process because memory ran out; {host.sizes()}"
        if refusal is None:
            whence = saved.latest(self._recipe_in) if self._recipe_in is not None else None
            goes_on = f" from {whence}" if whence else " from the start" if is_recipe else ""
            say(
                f"\nhytrain-cluster: {how}; attempt {attempts.number} of {attempts.most} begins{goes_on}; "
                f"its log is {end.dead.log}"
            )
            return None
        if end.dead.name != AGENT or end.dead.process.returncode < 0 or out_of_memory:
            log = process.log_tail(end.dead.log) if is_worker else f"; its log is {end.dead.log}"
            say(f"\nhytrain-cluster: {how}{log}")
        if end.status not in DELIBERATE and not end.was_asked:
            if attempts.most > 1:
                say(f"hytrain-cluster: no further attempt: {refusal}")
            if self._recipe_in is not None and end.status != EXIT_DIVERGED:
                say(f"hytrain-cluster: {saved.way_on(self._recipe_in)}")
        return refusal

    def _attempt(self, command: Sequence[str], job: Job | None, counts: dict[str, str]) -> End:
        """Run the trainer, or the agent, until one of the processes has ended."""
        sockets, logs, output = str(self.cluster.socket_dir), self.run_dir / "logs", Tee()
        variables = {**workers_environment(), CLUSTER_VARIABLE: sockets, "PYTHONUNBUFFERED": "1", **counts}
        name = "trainer-0" if job is None else AGENT
        try:
            if job is not None:
                command = [sys.executable, "-P", "-m", "workers.launch.agent", *job.flags, "--", *command]
                for rank in range(self._ranks):
                    output.add_fifos(sockets, rank, logs / f"trainer-{rank}.log")
            log = logs / f"{name}.log"
            stdout, stderr = output.add_pipes(log)
            trainer = process.start_program(name, command, log=log, environment=variables, stdout=stdout, stderr=stderr)
            self.cluster.children.append(trainer)
            return self._watch(trainer, output)
        finally:
            output.close()

    def _watch(self, trainer: Child, output: Tee) -> End:
        """Until one of the processes has ended, or a second signal has come."""
        asked: int | None = None  # the exit status of a run that ends because it was asked to
        while True:
            readable = self.cluster.wait([*output.pipes, self.signals.wake, *self.cluster.pidfds], self._end_s)
            if self.signals.wake in readable:
                self.signals.heard()  # first: a signal that comes now writes again
            if self.signals.again:
                return End(self._end_now(trainer, output))
            for status, number in self._wishes(trainer):
                asked = asked or status
                self._tell(trainer, number)
            output.pass_on(readable)
            if ended := self._ended_of(readable):
                return self._ended(ended, trainer, output, asked)

    def _wishes(self, trainer: Child) -> Iterator[tuple[int, int]]:
        """New reasons to end the run: the exit status that it has then, and the signal that tells the trainer."""
        if self.signals.first is not None and not self._heard:
            self._heard = True
            if self._recipe_in is not None:
                name = signal.Signals(self.signals.first).name
                say(f"\nhytrain-cluster: {name}: the run is told to end; a second one ends it at once")
            yield 128 + self.signals.first, self.signals.first
        if time.monotonic() >= self._end_s:
            self._end_s = math.inf
            say("\nhytrain-cluster: the time is up: the run is told to end")
            yield EXIT_AGAIN, signal.SIGTERM
        while self.signals.for_program:
            number = self.signals.for_program.pop(0)
            if self._recipe_in is not None and number == signal.SIGUSR1:
                yield 128 + number, signal.SIGTERM if trainer.name == AGENT else number
            else:
                _send(trainer, number)

    def _tell(self, trainer: Child, number: int) -> None:
        """Tell the trainer to end, or the agent, which tells the ranks. A terminal tells all by itself at Ctrl-C."""
        if number == signal.SIGINT and self._recipe_in is None and _in_foreground():
            return  # a recipe does not mind a copy, but a program may
        if trainer.process.poll() is None:
            trainer.process.send_signal(number)

    def _ended(self, ended: list[Child], trainer: Child, output: Tee, asked: int | None) -> End:
        """Which process ended first. If the trainer failed, check whether a worker's death was the reason.

        A trainer that fails because a worker died has waited until that can be seen (`hytrain.run.link`).
        `asked` is the exit status if the trainer has ended because it was asked to.
        """
        if asked is not None and ended == [trainer]:
            output.drain()
            return End(self._status_of_asked(trainer.exit_status(), asked))
        if ended == [trainer] and trainer.exit_status() != 0:
            workers = {child.pidfd: child for child in self.cluster.children if child is not trainer}
            readable, _, _ = select.select([*workers], [], [], 0)
            ended += [workers[pidfd] for pidfd in readable]
        output.drain()
        dead = [child for child in ended if child is not trainer]
        if dead and not (trainer in ended and trainer.exit_status() == 0):
            return End(dead[0].exit_status() or 1, dead[0], asked is not None)
        status = trainer.exit_status()
        return End(status, trainer if status not in (0, EXIT_USAGE) else None)

    def _status_of_asked(self, status: int, asked: int) -> int:
        """The exit status of a run that was asked to end, and whose trainer has ended with `status`."""
        if self._recipe_in is not None and (status == 0 or (self.cluster.socket_dir / saved.FINISHED).exists()):
            return 0  # that was its last step
        if asked == EXIT_AGAIN and self._recipe_in is not None and run_folder.progress(self.run_dir) == self._progress:
            say("hytrain-cluster: nothing was trained in this time")
            return 1
        return status if asked == EXIT_AGAIN and status not in (0, 128 + signal.SIGTERM) else asked

    def _end_now(self, trainer: Child, output: Tee) -> int:
        """After a second signal: a recipe ends at once, a program after some time in which it may act on it."""
        assert self.signals.first is not None
        if self._recipe_in is not None:
            trainer.process.kill()
        else:
            _send(trainer, self.signals.first)
        deadline = time.monotonic() + STOP_GRACE_S
        while trainer.process.poll() is None and (remaining := deadline - time.monotonic()) > 0:
            output.pass_on(select.select([*output.pipes, trainer.pidfd], [], [], remaining)[0])
        output.drain()
        way_on = "" if self._recipe_in is None else f"; {saved.way_on(self._recipe_in)}"
        say(f"hytrain-cluster: a second signal has ended the run at once{way_on}")
        return 128 + self.signals.first

    def attend(self, parent: int) -> int:
        """Wait until process `parent` has left and all seats are free, or until one of our processes ends.

        The parent has left if it is gone, closes our input or sends SIGTERM.
        """
        ended: list[Child] = []
        readable: list[int] = []
        while not ended and not {parent, sys.stdin.fileno()} & {*readable} and self.signals.first is None:
            readable = self.cluster.wait([sys.stdin.fileno(), parent, self.signals.wake, *self.cluster.pidfds])
            if self.signals.wake in readable:  # perhaps a signal that is the program's, sent to all processes
                self.signals.heard()
            ended = self._ended_of(readable)
        if ended and parent not in readable:
            say(process.describe_end(ended[0]))
            return ended[0].exit_status() or 1
        seats = [seat_file(str(self.cluster.socket_dir), rank) for rank in range(1, self._ranks)]
        while not ended and any(map(holder, seats)):
            ended = self._ended_of(select.select(self.cluster.pidfds, [], [], SEAT_PERIOD_S)[0])
        return 0

    def _ended_of(self, readable: list[int]) -> list[Child]:
        """The processes that have ended, unless that was a coordinator which another one replaces."""
        ended = [child for child in self.cluster.children if child.pidfd in readable]
        return [] if self.cluster.replaces(ended) else ended

    def close(self) -> None:
        """End all processes."""
        self.cluster.stop()
        self.signals.close()


def _send(trainer: Child, number: int) -> None:
    """Send a signal to the program. Under torchrun's agent, each rank is a program."""
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(trainer.process.pid)
        for each in program.children() if trainer.name == AGENT else [program]:
            each.send_signal(number)


def _in_foreground() -> bool:
    """Whether a terminal sends its Ctrl-C to this process and those that it has started."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
