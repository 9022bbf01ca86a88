"""`hytrain-cluster`: starts a run's processes, supervises them, and reports how they ended.

    hytrain-cluster RECIPE.yaml [--set a.b=v …]     trains a Hugging Face model on text
    hytrain-cluster script.py [argument …]          runs a user's own program as the trainer
    hytrain-cluster -m package.module [argument …]  the same, for a module
    hytrain-cluster --nproc-per-node N …            any of these on several ranks, through torchrun
    hytrain-cluster init [FILE]                     writes a recipe with every key
    (python -m workers.launcher --attach PID)       starts coordinator and optimizers for running processes

    coordinator ─ READY ─▶ an optimizer per rank ─ READY ─▶ cluster.json ─▶ trainer
    one ends ─▶ the others are stopped ─▶ its exit status, its name, the end of its log

Sockets are in a temporary folder, which is removed at the end. Until then its files are touched now and then: systems
remove from such folders what nobody has touched for days.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from hytrain import __version__
from hytrain.config import CLUSTER_VARIABLE, Cluster, ClusterConfig
from hytrain.errors import ClusterError, ConfigError
from hytrain.extras import needed
from hytrain.run import trace
from hytrain.run.seats import holder, seat_file
from protocol.address import COORDINATOR, Address
from protocol.channel import endpoint
from workers import affinity, process, run_folder, torchrun
from workers.process import EXIT_USAGE, FOR_PROGRAMS, Child
from workers.tee import Tee
from workers.torchrun import Job

if TYPE_CHECKING:
    from hytrain.recipe.config import Recipe

STOP_GRACE_S: Final = 3.0
INIT: Final = "init"
#: The trainer's place under torchrun.
AGENT: Final = "torchrun"
#: Endings of files that are no programs, but may be meant as a recipe's data.
DATA: Final = (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet", ".xz", ".gz")
#: What the first argument may be.
PROGRAMS: Final = "a recipe (.yaml), a Python program (.py) or -m and a module"
#: A trainer may fail because a worker died. Its end may be noticed up to this long before the worker's.
SAME_END_S: Final = 0.5
#: How often the seats are looked at once the process that started the cluster has left.
SEAT_PERIOD_S: Final = 0.02
#: How often the files of the socket folder are touched. Systems remove files that are older than some days.
TOUCH_EVERY_S: Final = 3600.0
HOME: Final = str(Path(__file__).resolve().parents[1])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status of the first process that failed, or 2 for bad input."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        if arguments.attach is not None:
            config = ClusterConfig(**json.loads(arguments.config))
            return _attach(arguments.attach, arguments.name, config, arguments.ranks)
        return _run(arguments)
    except (ClusterError, ConfigError, FileNotFoundError) as error:
        print(f"hytrain-cluster: {error}", file=sys.stderr)
        return 1 if isinstance(error, ClusterError) else EXIT_USAGE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hytrain-cluster",
        description="Train with the optimizer's state in host memory, at the speed of a GPU that could hold it.",
        parents=[_options()],
    )
    parser.add_argument("--version", action="version", version=f"hytrain {__version__}")
    parser.add_argument(
        "program",
        nargs="?",
        help='a recipe (.yaml), a Python program (.py), or "init", which writes a recipe',
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program; the file of init")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="", help="run a module with arguments, as python -m does"
    )
    parser.add_argument("--attach", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="python", help=argparse.SUPPRESS)
    parser.add_argument("--config", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.program is None and arguments.attach is None and not arguments.module:
        parser.error(f"name {PROGRAMS}")
    return arguments


def _options() -> argparse.ArgumentParser:
    """The options, which may also come after a recipe."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a value of the recipe")
    options.add_argument("--print-config", action="store_true", help="print the resolved recipe and exit")
    options.add_argument("--dry-run", action="store_true", help="print how much memory the recipe needs, and exit")
    options.add_argument("--cores", help='cores of the optimizer: "auto", "node:0", or a list such as "2-15"')
    options.add_argument("--threads", type=int, help="threads of the optimizer; default: one per core, half below 4")
    options.add_argument("--run-dir", help="the run's folder")
    options.add_argument("--keep-runs", type=int, metavar="N", help="keep the folders of the N newest programs' runs")
    options.add_argument("--host-memory-limit", type=int, metavar="BYTES", help="maximum host memory for planes")
    options.add_argument("--trace", action="store_true", default=None, help="write the run's timeline, trace.json")
    torchrun.add_options(options)
    return options


def _run(arguments: argparse.Namespace) -> int:
    """Run a recipe or a program in the foreground."""
    if arguments.module:
        name = arguments.module[0].rpartition(".")[2]
        return _run_program(["-m", *arguments.module], name, arguments)
    if arguments.program == INIT:
        return _init(arguments.arguments)
    program = Path(arguments.program)
    if program.suffix in (".yaml", ".yml"):
        late = argparse.ArgumentParser(prog="hytrain-cluster RECIPE.yaml", parents=[_options()])
        return _run_recipe(program, late.parse_args(arguments.arguments, arguments))
    if program.suffix in DATA:
        raise ConfigError(
            f"{program} is no program: name it in a recipe, as data.paths; hytrain-cluster {INIT} writes a recipe"
        )
    if not program.is_file():
        raise ConfigError(f"there is no program {program}: name {PROGRAMS}")
    return _run_program([str(program), *arguments.arguments], program.stem, arguments)


def _run_program(command: Sequence[str], name: str, arguments: argparse.Namespace) -> int:
    """Run a user's own program: what `python` is to run, and the run's default name."""
    for option in ("set", "print_config", "dry_run"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option.replace('_', '-')} is for recipes: a Python program has its own settings")
    config, job = ClusterConfig.resolve(flags=_flags(arguments)), torchrun.job(arguments)
    if config.run_dir is not None:
        own = _claim(Path(config.run_dir).resolve(), job)
        config = config.model_copy(update={"run_dir": str(own)})
    with Supervisor(config, default_name=name, ranks=job.ranks if job else 1) as supervisor:
        return supervisor.supervise([sys.executable, *command], job)


def _init(arguments: Sequence[str]) -> int:
    """Write a recipe with every key. Raises `ConfigError` if the file exists or cannot be written."""
    from hytrain.recipe.template import template

    if len(arguments) > 1:
        raise ConfigError(f"{INIT} takes one file, and not {' '.join(arguments)}")
    path = Path(arguments[0] if arguments else "recipe.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path} would be no recipe: name a .yaml file")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template())
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
    print(f"wrote {path}: name your data in it, then run hytrain-cluster {path}")
    return 0


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("cores", "threads", "run_dir", "keep_runs", "host_memory_limit", "trace")
    return {name: getattr(arguments, name) for name in names}


def _run_recipe(path: Path, arguments: argparse.Namespace) -> int:
    from hytrain.recipe import config as recipes

    recipe = recipes.load(path, arguments.set)
    if arguments.print_config:
        print(recipes.dump(recipe), end="")
        return 0
    job = torchrun.job(arguments)
    world = 1 if job is None else job.world
    if world is not None:
        recipes.check_ranks(recipe, world)
    if arguments.dry_run:
        with needed("--dry-run", "hytrain[recipe]"):
            from hytrain.recipe.estimate import estimate

        print(estimate(recipe, world or 1).render())
        return 0
    config = ClusterConfig.resolve(flags=_flags(arguments), file=_cluster_settings(recipe))
    assert config.run_dir is not None, "a recipe names its folder"
    folder = Path(config.run_dir).resolve()
    if (own := _claim(folder, job)) != folder:
        config = config.model_copy(update={"run_dir": str(own)})
        return _supervise_recipe(recipe, config, folder, own / "recipe.yaml", job)
    resolved, aside = folder / "recipe.yaml", None
    if recipe.train.resume is None and (aside := run_folder.set_aside(folder)) is not None:
        print(f"hytrain-cluster: {folder} had an earlier run in it, which is in {aside} now", file=sys.stderr)
    before, progress = resolved.read_text() if resolved.exists() else None, run_folder.progress(folder)
    status = EXIT_USAGE
    try:
        status = _supervise_recipe(recipe, config, folder, resolved, job)
    finally:
        if status == EXIT_USAGE and aside is not None and run_folder.bring_back(folder, aside):
            print(f"hytrain-cluster: nothing was trained, so the earlier run is back in {folder}", file=sys.stderr)
        elif status == EXIT_USAGE and before is not None and run_folder.progress(folder) == progress:
            resolved.write_text(before)
    return status


def _claim(folder: Path, job: Job | None) -> Path:
    """Lock the run's folder, or the one for this machine in it if another machine of the job was first; return it."""
    if job is not None and job.meeting:
        return run_folder.claim_for_node(folder, job.meeting)
    run_folder.claim(folder)
    return folder


def _supervise_recipe(recipe: Recipe, config: ClusterConfig, folder: Path, resolved: Path, job: Job | None) -> int:
    """Run the recipe's processes, in the run's folder. The recipe is written to `resolved`."""
    from hytrain.recipe import config as recipes

    with Supervisor(config, default_name=recipe.run.name, ranks=job.ranks if job else 1) as supervisor:
        resolved.write_text(recipes.dump(recipe))
        command = [sys.executable, "-P", "-m", "workers.trainer", str(resolved), "--run-dir", str(folder)]
        if sys.stderr.isatty():
            command.append("--terminal")
        return supervisor.supervise(command, job)


def _cluster_settings(recipe: Recipe) -> dict[str, Any]:
    cluster, run = recipe.cluster, recipe.run
    limit = cluster.host_memory_limit_gib
    return {
        "cores": cluster.cores,
        "threads": None if cluster.optimizer_threads == "auto" else cluster.optimizer_threads,
        "host_memory_limit": None if limit is None else int(limit * 2**30),
        "run_dir": str(run.dir / run.name),
        "run_name": run.name,
    }


def _attach(parent: int, name: str, config: ClusterConfig, ranks: int) -> int:
    """Run coordinator and optimizers for process `parent` and the others that join it, until all have left."""
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return 0
    if config.run_dir is not None:  # a program may have several optimizers but one folder
        config = config.model_copy(update={"run_dir": str(run_folder.claim_or_beside(Path(config.run_dir).resolve()))})
    with Supervisor(config, default_name=name, ranks=ranks) as supervisor:
        print(json.dumps({"socket_dir": str(supervisor.socket_dir)}), flush=True)
        return supervisor.attend(parent_fd)


class Supervisor:
    """The processes of one run on this machine, from their start to their end: so many ranks, an optimizer for each."""

    def __init__(self, config: ClusterConfig, *, default_name: str, ranks: int = 1) -> None:
        self._config, self._ranks = config, ranks
        self.run_name = config.run_name or f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.run_dir = Path(config.run_dir or run_folder.create(self.run_name, config.keep_runs)).resolve()
        self._log_dir = self.run_dir / "logs"
        self._children: list[Child] = []
        self._signal: int | None = None
        self._for_program: list[int] = []
        self._touched_s = time.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        self.socket_dir = Path()

    def __enter__(self) -> Self:
        """Start coordinator and optimizers. If one does not become ready, stops all and raises `ClusterError`."""
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(run_folder.unwritable(self.run_dir, error)) from None
        if self._config.trace:
            trace.clear(self.run_dir)
        self.socket_dir = Path(tempfile.mkdtemp(prefix="hytrain-"))
        try:
            _check_length(self.socket_dir, self._ranks)
            os.set_blocking(self._wake_write, False)
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            for number in FOR_PROGRAMS:
                signal.signal(number, self._on_signal_for_program)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    signal.signal(number, self._on_signal)
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        affinity.choose(self._config.cores, self._config.threads, ranks=self._ranks)  # impossible cores are bad input
        token = secrets.token_hex(16)
        token_path = self.socket_dir / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(token)
        sockets = ["--socket-dir", str(self.socket_dir)]
        if self._config.trace:
            sockets += ["--trace", str(self.run_dir)]
        place = ["--run-dir", str(self.run_dir), "--run-name", self.run_name]
        sockets += ["--ranks", str(self._ranks)]
        replan = ["--replan-every", str(self._config.replan_every)]
        [coordinator] = self._start_workers({COORDINATOR: [*sockets, *place, *replan]})
        cores = ["--cores", self._config.cores]
        cores += [] if self._config.threads is None else ["--threads", str(self._config.threads)]
        optimizers = self._start_workers(
            {Address("optimizer", rank): [*sockets, *cores, "--rank", str(rank)] for rank in range(self._ranks)}
        )
        Cluster(
            run_name=self.run_name,
            run_dir=str(self.run_dir),
            socket_dir=str(self.socket_dir),
            token=token,
            launcher_pid=os.getpid(),
            coordinator_pid=coordinator.process.pid,
            optimizer_pids=tuple(optimizer.process.pid for optimizer in optimizers),
            host_memory_limit=self._config.host_memory_limit,
            trace=self._config.trace,
        ).write()

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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _on_signal_for_program(self, number: int, frame: FrameType | None) -> None:
        self._for_program.append(number)

    def supervise(self, command: Sequence[str], job: Job | None = None) -> int:
        """Run the trainer in the foreground, or torchrun's agent with a trainer for each rank; return its exit status.

        Its output goes to the terminal and to its log.
        """
        environment = {**_environment(), CLUSTER_VARIABLE: str(self.socket_dir), "PYTHONUNBUFFERED": "1"}
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

    def _watch(self, trainer: Child, output: Tee) -> int:
        watched = {child.pidfd: child for child in self._children}
        while True:
            readable = self._wait([*output.pipes, self._wake_read, *watched])
            if output.pass_on(readable):
                continue
            if self._wake_read in readable:
                os.read(self._wake_read, select.PIPE_BUF)  # first: a signal that comes now writes again
                self._pass_on_to_program(trainer)
                if self._signal is None:
                    continue
            if self._signal is not None:
                return self._pass_on_signal(trainer, output)
            ended = [watched[pidfd] for pidfd in watched if pidfd in readable]
            if ended:
                return self._ended(ended, trainer, output)

    def _wait(self, descriptors: list[int]) -> list[int]:
        """Those that are readable, once one is. Until then, keep the socket folder's files from looking abandoned."""
        while True:
            left_s = self._touched_s + TOUCH_EVERY_S - time.monotonic()
            readable = select.select(descriptors, [], [], left_s)[0] if left_s > 0 else []
            if readable:
                return readable
            self._touched_s = time.monotonic()
            for folder, _, names in os.walk(self.socket_dir):
                for name in (".", *names):
                    with suppress(FileNotFoundError):
                        os.utime(Path(folder, name))

    def _pass_on_to_program(self, trainer: Child) -> None:
        """Pass on the signals that are the program's. Under torchrun's agent, each rank is a program."""
        while self._for_program and trainer.process.poll() is None:
            number = self._for_program.pop(0)
            with suppress(psutil.NoSuchProcess):
                program = psutil.Process(trainer.process.pid)
                for each in program.children() if trainer.name == AGENT else [program]:
                    each.send_signal(number)

    def _ended(self, ended: list[Child], trainer: Child, output: Tee) -> int:
        """Report which process ended first. If the trainer failed, check whether a worker's death was the reason."""
        if ended == [trainer] and (status := trainer.exit_status()) != 0:
            workers = {child.pidfd: child for child in self._children if child is not trainer}
            readable, _, _ = select.select([*workers], [], [], SAME_END_S)
            ended += [workers[pidfd] for pidfd in readable]
        output.drain()
        dead = [child for child in ended if child is not trainer]
        if dead and not (trainer in ended and trainer.exit_status() == 0):
            print(f"\nhytrain-cluster: {process.describe_end(dead[0])}", file=sys.stderr)
            return dead[0].exit_status() or 1
        status = trainer.exit_status()
        reported = trainer.name == AGENT and trainer.process.returncode >= 0  # which ranks failed
        if status not in (0, EXIT_USAGE) and not reported:
            how = process.describe_end(trainer).splitlines()[0]
            print(f"hytrain-cluster: {how}; its log is {trainer.log}", file=sys.stderr)
        return status

    def _pass_on_signal(self, trainer: Child, output: Tee) -> int:
        """Pass a signal on, and give the trainer time to exit. The terminal already sent it Ctrl-C itself."""
        assert self._signal is not None
        if self._signal != signal.SIGINT and trainer.process.poll() is None:
            trainer.process.send_signal(self._signal)
        deadline = time.monotonic() + STOP_GRACE_S
        while trainer.process.poll() is None and (remaining := deadline - time.monotonic()) > 0:
            output.pass_on(select.select([*output.pipes, trainer.pidfd], [], [], remaining)[0])
        output.drain()
        return 128 + self._signal

    def attend(self, parent: int) -> int:
        """Wait until process `parent` has left and all seats are free, or until one of our processes ends.

        The parent has left if it is gone, closes our input or sends SIGTERM.
        """
        watched = {child.pidfd: child for child in self._children}
        waited = [sys.stdin.fileno(), parent, self._wake_read, *watched]
        while (readable := self._wait(waited)) == [self._wake_read]:
            os.read(self._wake_read, select.PIPE_BUF)
            if self._signal is not None:  # or else one that is the program's, sent to all processes
                break
        ended = [watched[pidfd] for pidfd in watched if pidfd in readable]
        if ended and parent not in readable:
            print(process.describe_end(ended[0]), file=sys.stderr)
            return ended[0].exit_status() or 1
        seats = [seat_file(str(self.socket_dir), rank) for rank in range(1, self._ranks)]
        gone = bool(ended)
        while not gone and any(map(holder, seats)):
            gone = bool(select.select([*watched], [], [], SEAT_PERIOD_S)[0])
        return 0

    def _end(self) -> None:
        process.stop(reversed(self._children), grace_s=STOP_GRACE_S)
        if self._config.trace:  # however the run ended
            try:
                trace.merge(self.run_dir)
            except OSError as error:
                print(f"hytrain-cluster: no timeline: {error}", file=sys.stderr)
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)
        shutil.rmtree(self.socket_dir, ignore_errors=True)


def _check_length(socket_dir: Path, ranks: int) -> None:
    """Raise `ConfigError` if the path of a trainer's socket would be too long."""
    try:
        endpoint(str(socket_dir), f"trainer-{ranks - 1}-{secrets.token_hex(4)}")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _environment() -> dict[str, str]:
    paths = [HOME, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    sys.exit(main())
