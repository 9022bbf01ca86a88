"""Runs and supervises the processes of one run on this machine, and reports how they ended. `launcher` calls it.

    coordinator ─ READY ─▶ an optimizer per rank ─ READY ─▶ cluster.json ─▶ trainer
    one ends ─▶ the others are stopped ─▶ its exit status, its name, the end of its log ─▶ perhaps another attempt

Sockets are in a temporary folder, which is removed at the end. Until then its files are touched now and then: systems
remove from such folders what nobody has touched for days.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Self, TypedDict

import psutil

from hytrain.config import CLUSTER_VARIABLE, Cluster, ClusterConfig
from hytrain.errors import ConfigError
from hytrain.memory import host
from hytrain.recipe import saved
from hytrain.run import trace
from hytrain.run.seats import FOLDER_PREFIX, holder, seat_file, temporary
from protocol.address import COORDINATOR, Address
from workers import affinity, process, run_folder
from workers.attempts import DELIBERATE, EXIT_DIVERGED, Attempts
from workers.output import say
from workers.process import EXIT_USAGE, FOR_PROGRAMS, RESTARTS, Child
from workers.tee import Tee
from workers.time_limit import EXIT_AGAIN
from workers.torchrun import Job

#: Workers end within this time, and programs after a second signal, or they are killed.
STOP_GRACE_S: Final = 3.0
#: The coordinator has records to write, and on a busy machine it may not get a core for seconds.
RECORDS_GRACE_S: Final = 15.0
#: The trainer's place under torchrun.
AGENT: Final = "torchrun"
#: A signal this soon after the first is its copy: `timeout` sends one to its child, then to the child's whole group.
COPY_S: Final = 0.5
#: So many coordinators may die in a row, without a step between their deaths.
COORDINATORS: Final = 3
#: How often the seats are looked at once the process that started the cluster has left.
SEAT_PERIOD_S: Final = 0.02
#: How often the files of the socket folder are touched. Systems remove files that are older than some days.
TOUCH_EVERY_S: Final = 3600.0
HOME: Final = str(Path(__file__).resolve().parents[1])


class Reached(TypedDict):
    """Where a run has got to."""

    step: int
    checkpoints: frozenset[str]


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended. `dead` is the process that has failed, if any; `was_asked`: after it was asked to end."""

    status: int
    dead: Child | None = None
    was_asked: bool = False


class Supervisor:
    """The processes of one run on this machine, from their start to their end: so many ranks, an optimizer for each."""

    def __init__(self, config: ClusterConfig, *, default_name: str, ranks: int = 1) -> None:
        self._config, self._ranks = config, ranks
        self.run_name = config.run_name or f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.run_dir = Path(config.run_dir or run_folder.create(self.run_name, config.keep_runs)).resolve()
        self._log_dir = self.run_dir / "logs"
        self._children: list[Child] = []
        self._signal: int | None = None
        self._signal_s = 0.0
        self._again = False
        self._heard = False
        self._for_program: list[int] = []
        self._end_s = math.inf
        self._recipe_in: Path | None = None
        self._progress = run_folder.NOTHING
        self._touched_s = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        self.socket_dir = Path()
        self._oom_kills = 0
        self._coordinator: list[str] = []  # its arguments
        self._cluster: Cluster | None = None
        self._deaths = (0, 0)  # the step after which coordinators have died, and how many

    def __enter__(self) -> Self:
        """Start coordinator and optimizers. If one does not become ready, stops all and raises `ClusterError`."""
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(run_folder.unwritable(self.run_dir, error)) from None
        try:
            os.set_blocking(self._wake_write, False)
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            for number in FOR_PROGRAMS:
                signal.signal(number, self._on_signal_for_program)
            process.on_endings(self._on_signal)
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        trace.clear(self.run_dir)
        self.socket_dir = _socket_folder()
        self._oom_kills = host.oom_kills()
        affinity.choose(self._config.cores, self._config.threads, ranks=self._ranks)  # impossible cores are bad input
        token = secrets.token_hex(16)
        token_path = self.socket_dir / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(token)
        sockets = ["--socket-dir", str(self.socket_dir), "--run-dir", str(self.run_dir)]
        sockets += ["--trace"] if self._config.trace else []
        place = ["--run-name", self.run_name]
        sockets += ["--ranks", str(self._ranks)]
        place += ["--replan-every", str(self._config.replan_every)]
        place += ["--hang-timeout-s", str(self._config.hang_timeout_s)]
        self._coordinator = [*sockets, *place]
        [coordinator] = self._start_workers({COORDINATOR: self._coordinator})
        cores = ["--cores", self._config.cores]
        cores += [] if self._config.threads is None else ["--threads", str(self._config.threads)]
        optimizers = self._start_workers(
            {Address("optimizer", rank): [*sockets, *cores, "--rank", str(rank)] for rank in range(self._ranks)}
        )
        self._cluster = Cluster(
            run_name=self.run_name,
            run_dir=str(self.run_dir),
            socket_dir=str(self.socket_dir),
            token=token,
            launcher_pid=os.getpid(),
            coordinator_pid=coordinator.process.pid,
            optimizer_pids=tuple(optimizer.process.pid for optimizer in optimizers),
            host_memory_limit=self._config.host_memory_limit,
            gpu_memory_limit=self._config.gpu_memory_limit,
            hang_timeout_s=self._config.hang_timeout_s,
            trace=self._config.trace,
        )
        self._cluster.write()

    def _start_workers(self, arguments: dict[Address, list[str]]) -> list[Child]:
        """Start workers together, each with its arguments, and wait until all are ready."""
        started = [
            process.start_worker(address, given, log_dir=self._log_dir, environment=_environment())
            for address, given in arguments.items()
        ]
        self._children += started
        for child in started:
            process.await_ready(child, self._children, timeout_s=self._config.start_timeout_s)
        return started

    def _replaces(self, ended: list[Child]) -> bool:
        """If a coordinator has died, and nobody else, start another one in its place, while training goes on.

        Returns False if it was something else, or if coordinators die without a step between their deaths.
        """
        if [child.name for child in ended] != [str(COORDINATOR)] or self._cluster is None:
            return False
        [dead], step = ended, run_folder.last_step(self.run_dir)
        self._deaths = (step, self._deaths[1] + 1 if step == self._deaths[0] else 1)
        if self._deaths[1] > COORDINATORS:
            say(f"\nhytrain-cluster: {self._deaths[1]} coordinators have died, without a step between")
            return False
        arguments, environment = [*self._coordinator, "--again"], _environment()
        try:
            child = process.start_worker(COORDINATOR, arguments, log_dir=self._log_dir, environment=environment)
        except OSError:
            return False
        self._children[self._children.index(dead)] = child
        at = f" after step {step}" if step else ""
        say(
            f"\nhytrain-cluster: {process.first_words(dead)}{at}; training goes on, and process {child.process.pid} "
            f"takes its place; its log is {dead.log}"
        )
        dead.close()
        os.close(dead.pidfd)
        self._cluster = self._cluster.model_copy(update={"coordinator_pid": child.process.pid})
        with suppress(OSError):  # a cleaner may have removed the folder
            self._cluster.write()
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._signal is None:
            self._signal, self._signal_s = number, now_s
        elif now_s - self._signal_s > COPY_S:
            self._again = True

    def _on_signal_for_program(self, number: int, frame: FrameType | None) -> None:
        self._for_program.append(number)

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
        attempts = Attempts(restarts, **self._reached())
        while True:
            if self._signal is not None:  # while the processes were started
                return 128 + self._signal
            again = ["--again"] if recipe_in and run_folder.progress(self.run_dir) != self._progress else []
            end = self._attempt([*command, *again], job, counts)
            if end.dead is None:
                return end.status
            refusal = self._report(end, attempts)
            if refusal is not None or end.was_asked:
                return end.status
            self._stop()
            if self._signal is None:
                self._start()
            counts = dict.fromkeys(counts, str(attempts.number - 1))

    def _reached(self) -> Reached:
        return {"step": run_folder.last_step(self.run_dir), "checkpoints": run_folder.progress(self.run_dir)[1]}

    def _report(self, end: End, attempts: Attempts) -> str | None:
        """Say which process has ended the attempt, and what follows. Returns why there is no further attempt."""
        assert end.dead is not None
        reached, is_recipe = self._reached(), self._recipe_in is not None
        killed = end.status == 128 + signal.SIGKILL
        out_of_memory = killed and host.oom_kills() > self._oom_kills
        refusal = attempts.refusal(end.status, **reached, is_recipe=is_recipe, out_of_memory=out_of_memory)
        at = f" after step {reached['step']}" if reached["step"] else ""
        how = f"{process.first_words(end.dead)}{at}"
        if end.dead.name == AGENT and end.dead.process.returncode >= 0:
            how = f"ranks have failed{at}"  # which ones, it has said
        is_worker = end.dead.life is not None
        if out_of_memory:
            how += f": the kernel has killed a process for want of memory; {host.sizes()}"
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
        environment = {**_environment(), CLUSTER_VARIABLE: str(self.socket_dir), "PYTHONUNBUFFERED": "1", **counts}
        name, output = "trainer-0" if job is None else AGENT, Tee()
        try:
            if job is not None:
                command = [sys.executable, "-P", "-m", "workers.agent", *job.flags, "--", *command]
                for rank in range(self._ranks):
                    output.add_fifos(str(self.socket_dir), rank, self._log_dir / f"trainer-{rank}.log")
            log = self._log_dir / f"{name}.log"
            stdout, stderr = output.add_pipes(log)
            trainer = process.start_program(
                name, command, log=log, environment=environment, stdout=stdout, stderr=stderr
            )
            self._children.append(trainer)
            return self._watch(trainer, output)
        finally:
            output.close()

    def _watch(self, trainer: Child, output: Tee) -> End:
        """Until one of the processes has ended, or a second signal has come."""
        asked: int | None = None  # the exit status of a run that ends because it was asked to
        while True:
            readable = self._wait([*output.pipes, self._wake_read, *self._pidfds()], self._end_s)
            if self._wake_read in readable:
                os.read(self._wake_read, select.PIPE_BUF)  # first: a signal that comes now writes again
            if self._again:
                return End(self._end_now(trainer, output))
            for status, number in self._wishes(trainer):
                asked = asked or status
                self._tell(trainer, number)
            output.pass_on(readable)
            if ended := self._ended_of(readable):
                return self._ended(ended, trainer, output, asked)

    def _wishes(self, trainer: Child) -> Iterator[tuple[int, int]]:
        """New reasons to end the run: the exit status that it has then, and the signal that tells the trainer."""
        if self._signal is not None and not self._heard:
            self._heard = True
            if self._recipe_in is not None:
                name = signal.Signals(self._signal).name
                say(f"\nhytrain-cluster: {name}: the run is told to end; a second one ends it at once")
            yield 128 + self._signal, self._signal
        if time.monotonic() >= self._end_s:
            self._end_s = math.inf
            say("\nhytrain-cluster: the time is up: the run is told to end")
            yield EXIT_AGAIN, signal.SIGTERM
        while self._for_program:
            number = self._for_program.pop(0)
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

    def _wait(self, descriptors: list[int], until_s: float = math.inf) -> list[int]:
        """Those that are readable, once one is, or none at `until_s`.

        Until then, keep the socket folder's files from looking abandoned.
        """
        while True:
            touch_s, now_s = self._touched_s + TOUCH_EVERY_S, time.monotonic()
            if now_s < touch_s:
                readable = select.select(descriptors, [], [], max(min(touch_s, until_s) - now_s, 0))[0]
                if readable or time.monotonic() >= until_s:
                    return readable
                continue
            self._touched_s = now_s
            for folder, _, names in os.walk(self.socket_dir):
                for name in (".", *names):
                    with suppress(FileNotFoundError):
                        os.utime(Path(folder, name))

    def _ended(self, ended: list[Child], trainer: Child, output: Tee, asked: int | None) -> End:
        """Which process ended first. If the trainer failed, check whether a worker's death was the reason.

        A trainer that fails because a worker died has waited until that can be seen (`hytrain.run.link`).
        `asked` is the exit status if the trainer has ended because it was asked to.
        """
        if asked is not None and ended == [trainer]:
            output.drain()
            return End(self._status_of_asked(trainer.exit_status(), asked))
        if ended == [trainer] and trainer.exit_status() != 0:
            workers = {child.pidfd: child for child in self._children if child is not trainer}
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
        if self._recipe_in is not None and (status == 0 or (self.socket_dir / saved.FINISHED).exists()):
            return 0  # that was its last step
        if asked == EXIT_AGAIN and self._recipe_in is not None and run_folder.progress(self.run_dir) == self._progress:
            say("hytrain-cluster: nothing was trained in this time")
            return 1
        return status if asked == EXIT_AGAIN and status not in (0, 128 + signal.SIGTERM) else asked

    def _end_now(self, trainer: Child, output: Tee) -> int:
        """After a second signal: a recipe ends at once, a program after some time in which it may act on it."""
        assert self._signal is not None
        if self._recipe_in is not None:
            trainer.process.kill()
        else:
            _send(trainer, self._signal)
        deadline = time.monotonic() + STOP_GRACE_S
        while trainer.process.poll() is None and (remaining := deadline - time.monotonic()) > 0:
            output.pass_on(select.select([*output.pipes, trainer.pidfd], [], [], remaining)[0])
        output.drain()
        way_on = "" if self._recipe_in is None else f"; {saved.way_on(self._recipe_in)}"
        say(f"hytrain-cluster: a second signal has ended the run at once{way_on}")
        return 128 + self._signal

    def attend(self, parent: int) -> int:
        """Wait until process `parent` has left and all seats are free, or until one of our processes ends.

        The parent has left if it is gone, closes our input or sends SIGTERM.
        """
        ended: list[Child] = []
        readable: list[int] = []
        while not ended and not {parent, sys.stdin.fileno()} & {*readable} and self._signal is None:
            readable = self._wait([sys.stdin.fileno(), parent, self._wake_read, *self._pidfds()])
            if self._wake_read in readable:  # perhaps a signal that is the program's, sent to all processes
                os.read(self._wake_read, select.PIPE_BUF)
            ended = self._ended_of(readable)
        if ended and parent not in readable:
            say(process.describe_end(ended[0]))
            return ended[0].exit_status() or 1
        seats = [seat_file(str(self.socket_dir), rank) for rank in range(1, self._ranks)]
        while not ended and any(map(holder, seats)):
            ended = self._ended_of(select.select(self._pidfds(), [], [], SEAT_PERIOD_S)[0])
        return 0

    def _pidfds(self) -> list[int]:
        return [child.pidfd for child in self._children]

    def _ended_of(self, readable: list[int]) -> list[Child]:
        """The processes that have ended, unless that was a coordinator which another one replaces."""
        ended = [child for child in self._children if child.pidfd in readable]
        return [] if self._replaces(ended) else ended

    def _stop(self) -> None:
        """End the processes of an attempt, and remove what they have shared."""
        coordinator = str(COORDINATOR)
        for child in process.stop(
            reversed(self._children),
            grace_s=lambda child: RECORDS_GRACE_S if child.name == coordinator else STOP_GRACE_S,
        ):
            if child.name == str(COORDINATOR):
                say(
                    f"hytrain-cluster: {child.name} (process {child.process.pid}) hung and was killed: the last "
                    f"records are missing in {self.run_dir}"
                )
        self._children = []
        if trace.has_events(self.run_dir):  # however the run ended
            try:
                trace.merge(self.run_dir)
            except OSError as error:
                say(f"hytrain-cluster: no timeline: {error}")
        if self.socket_dir != Path():
            shutil.rmtree(self.socket_dir, ignore_errors=True)

    def _end(self) -> None:
        self._stop()
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)


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


def _socket_folder() -> Path:
    """A new folder that only this user can enter. Raises `ConfigError`."""
    try:
        return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=temporary()))
    except OSError as error:
        raise ConfigError(f"there is no place for sockets: {error}; set another TMPDIR") from None


def _environment() -> dict[str, str]:
    paths = [HOME, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
