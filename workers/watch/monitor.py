"""`hytrain-monitor`: watches a running run from outside, reports on runs, and lists and deletes their folders.

    hytrain.monitoring.Client ─ statuses ─▶ Observer: what the processes use ─▶ status_text, status_table

`--help` and docs/monitoring.md have its commands. A monitor cannot slow a run down: see `hytrain.monitoring`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final

from hytrain.errors import ClusterTimeout, ConfigError
from hytrain.extras import needed
from hytrain.monitoring import ANSWER_S, LOOK_S, Client, find, live_runs
from hytrain.readable import age, gib
from protocol import messages as m
from workers import run_folder
from workers.exits import EXIT_USAGE, printing
from workers.watch import bill, report, story, web
from workers.watch import status_text as text
from workers.watch.alerts import Alerts
from workers.watch.observer import FIRST_S, Observer, followed
from workers.watch.troubles import Snapshot

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT

#: A token of fewer letters can be guessed.
TOKEN_LETTERS: Final = 16
#: The settings that a command can change: name, value, effect.
SETTINGS: Final = (
    ("k", "K", 'fraction of the parameters that the GPU owns, or "auto"'),
    ("threads", "N", "number of the optimizer's threads, at most one per core"),
    ("policy", "NAME", 'policy that decides what the GPU owns, such as "deadline"'),
    ("gpu_memory_limit", "SIZE", 'the GPU memory to plan with, as in 24GiB, or "none" for all that is free'),
    ("host_memory_limit", "SIZE", "the most host memory for planes of each rank, as in 64GiB"),
    ("objective", "NAME", 'what to optimize: "speed", "gpu-memory" or "host-memory"'),
)
#: What a command can make a run do besides. Those without a value have none.
ORDERS: Final = (
    ("trace", "N", "draw the timeline of the next N steps into trace.json in the run's folder; 0 ends one"),
    ("checkpoint", "", "save a checkpoint after one of the next steps, where a recipe trains"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 when the run has ended, and 2 if there is no such run or it refuses a command."""
    try:
        with printing():
            return _main(sys.argv[1:] if argv is None else list(argv))
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ConfigError, ClusterTimeout) as error:
        print(f"hytrain-monitor: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else 1


def _main(words: Sequence[str]) -> int:
    if words[:1] == ["report"]:
        return report.main(words[1:])
    if words[:1] == ["trace"]:
        return bill.main(words[1:])
    arguments = _parse(words)
    if arguments.list:
        for line in _listing(_runs_in(arguments.run, or_live=True), time.time(), as_json=arguments.json):
            print(line)
        return 0
    if arguments.prune:
        return _prune(arguments.run, arguments.keep)
    if arguments.web is not None:
        return _serve(arguments)
    looks = not (arguments.command or arguments.follow or arguments.json)
    if looks and (folder := _ended(arguments.run)) is not None:
        print(report.as_text(story.read(folder)))
        print(f"\nhytrain-monitor report {arguments.run} writes a page about it, and --web shows it")
        return 0
    with Client(find(arguments.run, alone=arguments.command is not None)) as client:
        return _run(client, arguments)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hytrain-monitor",
        description="Watch a running HyTrain run.",
        epilog="hytrain-monitor report RUN [RUN …] writes a page about runs, live or ended; hytrain-monitor trace RUN "
        "says what the steps in its timeline consist of.",
    )
    about = "the run's name, its folder or its socket folder; default: the newest. With --web, there may be several"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=about)
    parser.add_argument("--keep", type=int, metavar="N", help="with --prune: keep the N newest runs, and do not ask")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--once", action="store_true", help="print the current status and exit")
    mode.add_argument("--follow", action="store_true", help="print one line per step, until the run ends")
    mode.add_argument(
        "--web",
        nargs="?",
        type=int,
        const=web.PORT,
        metavar="PORT",
        help=f"serve a page and Prometheus's /metrics on {web.HOST}, by default on port {web.PORT}",
    )
    parser.add_argument("--open", action="store_true", help="with --web: open the page in a browser")
    for kind, when in (
        ("stall", "the run waits long, or a process is stopped or does not answer"),
        ("divergence", "it diverges"),
    ):
        parser.add_argument(f"--on-{kind}", metavar="CMD", help=f"with --follow: run this in a shell when {when}")
    parser.add_argument(
        "--web-token-file",
        metavar="FILE",
        help="with --web: a file with the token of its addresses; default: a new one",
    )
    flags = [(f"--set-{name.replace('_', '-')}", name, value, effect) for name, value, effect in SETTINGS]
    for flag, name, value, effect in (*flags, *((f"--{name}", name, value, effect) for name, value, effect in ORDERS)):
        if value:
            command = partial(lambda name, value: m.Command(name=name, value=value), name)
            mode.add_argument(flag, dest="command", type=command, metavar=value, help=effect)
        else:
            order = m.Command(name=name, value="")
            mode.add_argument(flag, dest="command", action="store_const", const=order, help=effect)
    folder = f"RUN is a folder with runs, by default {run_folder.default()}"
    mode.add_argument("--list", action="store_true", help=f"list runs, live and ended; {folder}")
    mode.add_argument("--prune", action="store_true", help=f"delete the folders of ended runs; {folder}")
    parser.add_argument("--json", action="store_true", help="with --once one JSON object, with --follow one per step")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) > 1 and arguments.web is None:
        parser.error("several runs are for --web")
    arguments.run = next(iter(arguments.runs), None)
    if (arguments.web_token_file is not None or arguments.open) and arguments.web is None:
        parser.error("--web-token-file FILE and --open are for --web")
    if (arguments.on_stall or arguments.on_divergence) and not arguments.follow:
        parser.error("--on-stall and --on-divergence are for --follow")
    if arguments.keep is not None and (arguments.keep < 0 or not arguments.prune):
        parser.error("--keep N is for --prune: how many runs are kept, 0 or more")
    return arguments


def _run(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.command is not None:
        return _order(client, arguments.command)
    if arguments.once:
        observer = Observer(client.run)
        time.sleep(FIRST_S)  # what else runs shows in a while
        snapshot = observer.look(client.status())
        print(text.as_json(snapshot) if arguments.json else _table(snapshot), flush=True)
    elif arguments.follow or arguments.json or not sys.stdout.isatty():
        commands = {"stall": arguments.on_stall, "divergence": arguments.on_divergence}
        _follow(client.statuses(), Observer(client.run).look, as_json=arguments.json, commands=commands)
    else:
        return _watch(client)
    return 0


def _table(snapshot: Snapshot) -> str:
    """Raises `ConfigError` without rich."""
    with needed("the table, without which --json and --follow work,", "monitor"):
        from workers.watch.status_table import as_text
    return as_text(snapshot)


def _order(client: Client, command: m.Command) -> int:
    """Give a command. A timeline is waited for, and nothing else."""
    if command.name == "trace" and command.value.isdecimal():
        drawn = client.trace(int(command.value), partial(print, flush=True))
        print(f"{drawn}\n\n{bill.as_text(drawn)}")
    else:
        print(client.command(command.name, command.value))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Serve the page of one run, or of several side by side, live or ended."""
    token, wanted = _web_token(arguments.web_token_file), arguments.runs or [None]
    ended = dict.fromkeys(folder for run in wanted if (folder := _ended(run)) is not None)
    live = [find(run) for run in wanted if _ended(run) is None]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(run)) for run in {run.socket_dir: run for run in live}.values()]
        folders = [Path(client.run.run_dir) for client in clients]
        names = [client.run.run_name for client in clients]
        if len(set(names)) < len(names):
            names = report.names_of(folders)
        runs = [
            (web.Feed(name, folder, Observer(client.run).look), client.statuses())
            for name, folder, client in zip(names, folders, clients, strict=True)
        ]
        runs += [(web.Feed(folder.name, folder, lambda status: Snapshot(status, ())), iter(())) for folder in ended]
        web.serve(runs, arguments.web, token, show=web.opened if arguments.open else nullcontext)
    return 0


def _ended(wanted: str | None) -> Path | None:
    """The folder of a run that is named and has ended; None if it is live, or is not there."""
    if wanted is None:
        return None
    try:
        find(wanted)
    except ConfigError:
        folder = run_folder.containing("metrics.jsonl", wanted)
        return None if folder is None else folder.resolve()
    return None


def _web_token(file: str | None) -> str:
    """The token in the file, or a new one. A file, since other users see command lines. Raises `ConfigError`."""
    if file is None:
        return secrets.token_urlsafe(16)
    try:
        with open(file) as opened:
            mode, token = os.fstat(opened.fileno()).st_mode, opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {file} cannot be read: {error}") from None
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"other users can read the token in {file}: chmod 600 {shlex.quote(file)}")
    if len(token) < TOKEN_LETTERS:
        raise ConfigError(
            f"the token in {file} has {len(token)} letters, which can be guessed; it needs {TOKEN_LETTERS}: "
            f"openssl rand -hex 16 > {shlex.quote(file)}"
        )
    return token


# ---------------------------------------------------------------- runs' folders


def _prune(where: str | None, keep: int | None) -> int:
    """Delete ended runs beyond the `keep` newest. Without a number, ask first. Says what is deleted."""
    runs = _runs_in(where)
    doomed = [run for run in runs[keep or 0 :] if run.prunable]
    for run in runs[keep or 0 :]:
        if not run.prunable:
            print(f"{run.folder} stays: {'it is live' if run.live else 'it has files that the run did not write'}")
    if not doomed:
        print("there is nothing to delete")
        return 0
    verb = "would be" if keep is None else "are"
    print(f"these runs {verb} deleted, with their checkpoints:")
    for line in _listing(doomed, time.time()):
        print(f"  {line}")
    if keep is None:
        if not sys.stdin.isatty():
            raise ConfigError(
                "nothing was deleted: there is no terminal to ask on; --keep N deletes without a question"
            )
        if input("delete them? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 0
    left = [run.folder for run in doomed if not run_folder.prune(run)]
    for folder in left:
        print(f"{folder} could not be deleted", file=sys.stderr)
    return 1 if left else 0


def _listing(runs: Sequence[run_folder.Run], now_s: float, *, as_json: bool = False) -> Iterator[str]:
    """A line for each run, below a head; or a JSON object for each."""
    if as_json:
        for run in runs:
            yield json.dumps({**asdict(run), "folder": str(run.folder)})
        return
    rows = [("run", "state", "steps", "loss", "age", "size", "folder")]
    for run in runs:
        rows.append(
            (
                run.folder.name,
                "live" if run.live else "ended",
                "-" if run.steps is None else str(run.steps),
                "-" if run.loss is None else f"{run.loss:.4f}",
                age(now_s - run.at_s),
                gib(run.nbytes),
                str(run.folder),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(w) if 2 <= n <= 5 else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths))]
        yield "  ".join(cells).rstrip()


def _runs_in(where: str | None, *, or_live: bool = False) -> list[run_folder.Run]:
    """The runs in a folder. Without one, those in the default folder, and with `or_live` the live ones elsewhere."""
    folder = run_folder.default() if where is None else Path(where).resolve()
    if where is not None and not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    runs, live = run_folder.find(folder), {Path(run.run_dir) for run in live_runs()}
    if where is None and or_live:
        elsewhere = sorted(live - {run.folder for run in runs})
        runs = [*(run_folder.look(path) for path in elsewhere if path.is_dir()), *runs]
    return [replace(run, live=run.live or run.folder in live) for run in runs]


# ---------------------------------------------------------------- the modes


def _follow(
    statuses: Iterable[m.Status],
    look: Callable[[m.Status], Snapshot],
    *,
    as_json: bool,
    commands: Mapping[str, str | None],
) -> None:
    told = set[str]()  # what is wrong
    alerts, running = Alerts(), list[subprocess.Popen[bytes]]()
    for status, record in followed(statuses):
        snapshot = look(status)
        for alert in alerts.look(snapshot):
            if (command := commands[alert.about]) is not None:
                about = {"HYTRAIN_ALERT": alert.about, "HYTRAIN_TEXT": alert.text, "HYTRAIN_RUN": status.run_dir}
                began = subprocess.Popen(
                    command, shell=True, env={**os.environ, **about}, stdin=subprocess.DEVNULL, stdout=2
                )
                running = [began, *(other for other in running if other.poll() is None)]
        for trouble in snapshot.troubles:
            if trouble.about not in told and not as_json:
                print(trouble.text, flush=True)
        told = {trouble.about for trouble in snapshot.troubles}
        if record is not None:
            print(text.record_json(status) if as_json else text.line(status), flush=True)
    for last in running:
        with suppress(subprocess.TimeoutExpired):
            last.wait(ANSWER_S)


def _watch(client: Client) -> int:
    """Show the live view on the terminal, until the user leaves it. Returns the exit status."""
    with needed("the live view, without which --follow works,", "monitor"):
        from workers.watch.screen import Screen

    def send(command: m.Command) -> m.CommandReply:
        with Client(client.run) as other:  # a connection is for one thread
            return other.require(command, m.CommandReply)

    screen = Screen(client.statuses(), Observer(client.run).look, send, (*SETTINGS, *ORDERS))
    screen.run()
    screen.has_followed.wait(ANSWER_S + 2 * LOOK_S)  # the connection is closed next
    if screen.shown is not None:
        print(_table(screen.shown))
    return screen.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
