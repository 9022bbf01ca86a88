"""The command `hytrain-cluster`. What it starts, `supervisor` supervises.

`--help` and docs/cluster.md have its commands. With `--attach PID`, `hytrain.run.cluster` has it start coordinator and
optimizers for a plain script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hytrain import __version__
from hytrain.config import ClusterConfig, workers_environment
from hytrain.errors import ClusterError, ConfigError
from hytrain.extras import needed
from workers import run_folder
from workers.exits import EXIT_USAGE, printing
from workers.launch import time_limit, torchrun
from workers.launch.attempts import DELIBERATE
from workers.launch.output import drain, say
from workers.launch.supervisor import Supervisor
from workers.launch.torchrun import Job

if TYPE_CHECKING:
    from hytrain.recipe.config import Recipe

INIT, DOCTOR, CHECK = "init", "doctor", "check"
#: How many steps `check` compares, unless the environment says so.
CHECKED_STEPS: Final = "3"
#: Endings of files that are no programs, but may be meant as a recipe's data.
DATA: Final = (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet", ".xz", ".gz")
#: What the first argument may be.
PROGRAMS: Final = "a recipe (.yaml), a Python program (.py) or -m and a module"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status of the first process that failed, or 2 for bad input."""
    try:
        with printing():
            arguments = _parse(sys.argv[1:] if argv is None else argv)
            if arguments.attach is not None:
                config = ClusterConfig(**json.loads(arguments.config))
                return _attach(arguments.attach, arguments.name, config, arguments.ranks)
            return _run(arguments)
        return 0
    except (ClusterError, ConfigError) as error:
        say(f"hytrain-cluster: {error}")
        return 1 if isinstance(error, ClusterError) else EXIT_USAGE
    finally:
        drain()


def _parse(argv: Sequence[str], before: argparse.Namespace | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hytrain-cluster",
        description="Train with the optimizer's state in host memory, at the speed of a GPU that could hold it.",
        parents=[_options()],
    )
    parser.add_argument("--version", action="version", version=f"hytrain {__version__}")
    parser.add_argument(
        "program",
        nargs="?",
        help='a recipe (.yaml), a Python program (.py), "init", which writes a recipe, "doctor", which says what this '
        'machine can train, or "check" and a program, whose first steps are compared with torch',
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program; the file of init")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="", help="run a module with arguments, as python -m does"
    )
    parser.add_argument("--attach", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="python", help=argparse.SUPPRESS)
    parser.add_argument("--config", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv, before)
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
    options.add_argument("--host-memory-limit", metavar="SIZE", help="maximum host memory for planes, such as 58GiB")
    options.add_argument("--gpu-memory-limit", metavar="SIZE", help="memory to plan with on each GPU, such as 24GiB")
    options.add_argument("--save-before", metavar="TIME", help="end the run this long before the job's time is up: 5m")
    options.add_argument("--time-limit", metavar="TIME", help="the job's time, counted from now, where Slurm sets none")
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
    if arguments.program == CHECK:
        os.environ.setdefault("HYTRAIN_CHECK", CHECKED_STEPS)
        return _run(_parse(arguments.arguments, arguments))
    if arguments.program == DOCTOR:
        command = [sys.executable, "-P", "-m", "workers.watch.doctor", *arguments.arguments]
        os.execve(sys.executable, command, workers_environment())
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
    restarts = torchrun.restarts(arguments)
    end_s = time_limit.end_s(arguments.save_before, arguments.time_limit)
    if config.run_dir is not None:
        own = _claim(Path(config.run_dir).resolve(), job)
        config = config.model_copy(update={"run_dir": str(own)})
    supervisor = Supervisor(config, default_name=name, ranks=job.ranks if job else 1)
    supervisor.say_where()
    with supervisor:
        return supervisor.supervise([sys.executable, *command], job, end_s=end_s, restarts=restarts)


def _init(arguments: Sequence[str]) -> int:
    """Write a recipe with every key. Raises `ConfigError` if the file exists or cannot be written."""
    from hytrain.recipe.template import template

    parser = argparse.ArgumentParser(
        prog=f"hytrain-cluster {INIT}", description="Write a recipe with every key, its default and a comment."
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("recipe.yaml"), help="default: recipe.yaml")
    path = parser.parse_args(arguments).file
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
    names = ("cores", "threads", "run_dir", "keep_runs", "host_memory_limit", "gpu_memory_limit", "trace")
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
        with needed("--dry-run", "recipe"):
            from hytrain.recipe.estimate import estimate

        print(estimate(recipe, world or 1, None if job is None else job.ranks).render())
        return 0
    end_s, restarts = time_limit.end_s(arguments.save_before, arguments.time_limit), torchrun.restarts(arguments)
    config = ClusterConfig.resolve(flags=_flags(arguments), file=_cluster_settings(recipe))
    assert config.run_dir is not None, "a recipe names its folder"
    folder = Path(config.run_dir).resolve()

    own = _claim(folder, job)
    config = config.model_copy(update={"run_dir": str(own)})
    supervisor = Supervisor(config, default_name=recipe.run.name, ranks=job.ranks if job else 1)

    def supervise(resolved: Path) -> int:
        """Run the recipe's processes, in the run's folder. The recipe is written to `resolved`."""
        supervisor.say_where()
        with supervisor:
            resolved.write_text(recipes.dump(recipe), encoding="utf-8")
            command = [sys.executable, "-P", "-m", "workers.train.trainer", str(resolved), "--run-dir", str(folder)]
            if sys.stderr.isatty():
                command.append("--terminal")
            return supervisor.supervise(command, job, end_s=end_s, restarts=restarts, recipe_in=folder)

    if own != folder:
        return supervise(own / "recipe.yaml")
    resolved, aside = folder / "recipe.yaml", None
    if recipe.train.resume is None and (aside := run_folder.set_aside(folder)) is not None:
        say(f"hytrain-cluster: {folder} had an earlier run in it, which is in {aside} now")
    before, progress = resolved.read_bytes() if resolved.exists() else None, run_folder.progress(folder)
    status = EXIT_USAGE
    try:
        status = supervise(resolved)
    finally:
        is_told = status != 0 and status in DELIBERATE  # nobody needs the logs
        if is_told and aside is not None and run_folder.bring_back(folder, aside):
            say(f"hytrain-cluster: nothing was trained, so the earlier run is back in {folder}")
        elif is_told and before is not None and run_folder.progress(folder) == progress:
            resolved.write_bytes(before)
    return status


def _claim(folder: Path, job: Job | None) -> Path:
    """Lock the run's folder, or the one for this machine in it if another machine of the job was first; return it."""
    if job is not None and job.meeting:
        return run_folder.claim_for_node(folder, job.meeting)
    run_folder.claim(folder)
    return folder


def _cluster_settings(recipe: Recipe) -> dict[str, Any]:
    settings, run = recipe.cluster.model_dump(), recipe.run
    threads = settings.pop("optimizer_threads")
    named = {"run_dir": str(run.dir / run.name), "run_name": run.name}
    return {**settings, "threads": None if threads == "auto" else threads, **named}


def _attach(parent: int, name: str, config: ClusterConfig, ranks: int) -> int:
    """Run coordinator and optimizers for process `parent` and the others that join it, until all have left."""
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return 0
    if config.run_dir is not None:  # a program may have several optimizers but one folder
        config = config.model_copy(update={"run_dir": str(run_folder.claim_or_beside(Path(config.run_dir).resolve()))})
    with Supervisor(config, default_name=name, ranks=ranks) as supervisor:
        print(json.dumps({"socket_dir": str(supervisor.cluster.socket_dir)}), flush=True)
        return supervisor.attend(parent_fd)


if __name__ == "__main__":
    sys.exit(main())
