"""One run of `bin/hytrain-cluster` that is disturbed: how far it is, its processes, its end, and what it leaves.

    start ─▶ reach(step) ─▶ a fault ─┬▶ goes_on ─▶ reach(…)
                                     └▶ ended, nothing is left ─▶ start again, from the newest checkpoint

Steps are read from metrics.jsonl, so that a fault strikes at a step and not at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from hytrain.config import Cluster
from hytrain.errors import ConfigError

ROOT: Final = Path(__file__).resolve().parents[2]
CLUSTER: Final = ROOT / "bin" / "hytrain-cluster"
#: How long anything may take that has to happen.
LIMIT_S: Final = 180.0
CHECKPOINT_EVERY: Final = 20
STATE_FILE: Final = "trainer_state.json"
#: The name of a save of the optimizer's state.
SAVE: Final = re.compile("state-[0-9a-f]{16}")
#: What differs by design in `STATE_FILE`: the run's name, whether it was resumed, and Python's own generator, which
#: recipes neither seed nor use.
OF_THE_RUN: Final = (
    ("run",),
    ("recipe", "run", "name"),
    ("recipe", "train", "resume"),
    ("random", "*", "python"),
)
#: The same in tokenizer_config.json: Transformers notes that a tokenizer was read from a folder.
OF_ITS_SOURCE: Final = (("is_local",), ("local_files_only",))


class Broken(Exception):
    """A promise that the run did not keep."""


def write_recipe(folder: Path, *, steps: int, random_placements: bool) -> Path:
    """A GPT-2 with 0.07 M parameters on the CPU: about ten milliseconds per step."""
    words = ["the", "people", "of", "these", "states", "shall", "prosper"]
    (folder / "text.txt").write_text(" ".join(words[(i * i + i // 7) % 7] for i in range(3000)))
    recipe: dict[str, Any] = {
        "run": {"dir": str(folder), "seed": 3, "threads": 1},
        "model": {
            "config": {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32},
            "dtype": "bfloat16",
        },
        "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 4},
        "train": {
            "steps": steps,
            "lr": 1e-2,
            "warmup_steps": 5,
            "eval_batches": 1,
            "device": "cpu",
            "checkpoint_every": CHECKPOINT_EVERY,
            "keep_last": 4,
        },
        "optimizer": {"policy": "random"} if random_placements else {"k": 0.3},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


#: What each run says while it starts.
FIRST_WORDS = re.compile(r"hytrain(-cluster: starting|: (importing|reading|building|placing|first plan|training from))")


@dataclass(frozen=True)
class Ended:
    """How a run ended: the launcher's status, and the output of this start."""

    status: int
    output: str

    def __str__(self) -> str:
        said = [line for line in self.output.splitlines() if line.startswith(("hytrain: ", "hytrain-cluster: "))]
        said = [line for line in said if not FIRST_WORDS.match(line)]
        return f"status {self.status}{': ' + said[0].partition('; its log')[0][:90] if said else ''}"


class Run:
    """A recipe's run named `name` in `folder`, with temporary files of its own."""

    def __init__(self, recipe: Path, name: str, *, ranks: int, max_restarts: int = 0) -> None:
        self.folder = recipe.parent / name
        self.recipe, self.ranks, self._max_restarts = recipe, ranks, max_restarts
        self.checkpoints = self.folder / "checkpoints"
        self.metrics = self.folder / "metrics.jsonl"
        self.temporary = Path(tempfile.mkdtemp(prefix="hs-"))  # short: a socket's path has at most 107 bytes
        self.starts = 0
        self.cluster: Cluster | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._output = recipe.parent / f"{name}.log"
        self._output.touch()
        self._output_from, self._started_at = 0, 0.0

    # ------------------------------------------------------------ start and end

    def start(self) -> None:
        """Start it, from its newest checkpoint if there is one."""
        command = [sys.executable, str(CLUSTER)]
        if self.ranks > 1:
            command += ["--nproc-per-node", str(self.ranks)]
        if self._max_restarts:
            command += ["--max-restarts", str(self._max_restarts)]
        command += [str(self.recipe), "--set", f"run.name={self.folder.name}"]
        if self.newest_checkpoint() is not None:
            command += ["--set", "train.resume=latest"]
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.recipe.parent / "inductor")  # torch makes it, and leaves it
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        environment = {name: value for name, value in environment.items() if not name.startswith("HYTRAIN_")}
        self._output_from, self._started_at, self.cluster = self._output.stat().st_size, time.time(), None
        with self._output.open("ab") as output:
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.recipe.parent,
                start_new_session=True,
            )
        self.starts += 1

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self._launcher is not None
        return self._launcher

    def output(self) -> str:
        """What was printed since the start."""
        with self._output.open("rb") as file:
            file.seek(self._output_from)
            return file.read().decode(errors="replace")

    def ended(self) -> Ended:
        """Wait until the launcher has ended and nothing is left. Raises `Broken`."""
        self.until(lambda: self.launcher.poll() is not None, "the launcher does not end")
        self.until(lambda: not self.left(), lambda: f"left behind: {', '.join(self.left())}", limit_s=60.0)
        return Ended(self.launcher.returncode, self.output())

    def left(self) -> list[str]:
        """What of the run is there after its end. Its shared memory has no name: it ends with its processes."""
        return [*map(describe, self.processes()), *(str(path) for path in self.temporary.iterdir())]

    def close(self) -> None:
        """End what still runs, and remove the temporary files."""
        for process in [*self.processes(), *self.processes()]:
            unless_gone(process.kill)
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    # ------------------------------------------------------------ progress

    def step(self) -> int:
        """The newest step that this start has recorded, 0 before the first."""
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                lines = file.read().split(b"\n")[:-1]
            record = json.loads(lines[-1])
            return int(record["step"]) if record["wall_time"] > self._started_at else 0
        except (OSError, IndexError, ValueError):
            return 0

    def reach(self, step: int) -> int:
        """Wait until a step is recorded; the newest one. Raises `Broken` if the run ends before."""
        self.reaches(step, "before a fault was injected")
        self._find_cluster()
        return self.step()

    def _find_cluster(self) -> None:
        """The processes that run now, which may be started again, in another folder. Without one, as they were."""
        for folder in self.temporary.glob("hytrain-*"):
            with suppress(ConfigError):
                self.cluster = Cluster.read(str(folder))

    def reaches(self, step: int, when: str) -> None:
        """Wait until a step is recorded. Raises `Broken` if the run ends or stands still."""
        seen, seen_s = self.step(), time.monotonic()
        while seen < step:
            if self.launcher.poll() is not None:
                raise Broken(f"the run ended {when}: {self.ended()}")
            time.sleep(0.005)
            if (now := self.step()) != seen:
                seen, seen_s = now, time.monotonic()
            elif time.monotonic() - seen_s > LIMIT_S:
                raise Broken(f"no step after {seen} within {LIMIT_S:.0f} s, {when}")

    def goes_on_or_ends(self, step: int) -> Ended | None:
        """Wait until the run has gone beyond `step` or has ended. Raises `Broken` if it does neither."""
        self.until(
            lambda: self.launcher.poll() is not None or self.step() > step, f"neither a step after {step} nor an end"
        )
        return None if self.launcher.poll() is None else self.ended()

    def until(self, happened: Callable[[], object], what: str | Callable[[], str], *, limit_s: float = LIMIT_S) -> None:
        ends_s = time.monotonic() + limit_s
        while not happened():
            if time.monotonic() > ends_s:
                raise Broken(f"{what if isinstance(what, str) else what()}, after {limit_s:.0f} s")
            time.sleep(0.01)

    # ------------------------------------------------------------ processes

    def processes(self) -> list[psutil.Process]:
        """Everything that has the run's temporary folder in its environment, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("TMPDIR") == str(self.temporary)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def process(self, role: str, rank: int = 0) -> psutil.Process:
        """The process of a role: launcher, coordinator, optimizer, trainer."""
        assert self.cluster is not None
        match role:
            case "launcher":
                return psutil.Process(self.launcher.pid)
            case "coordinator":
                return self._coordinator()
            case "optimizer":
                return psutil.Process(self.cluster.optimizer_pids[rank])
        found = []

        def look() -> bool:
            for each in self.processes():
                words, environment = each.cmdline(), each.environ()
                if "workers.train.trainer" in words and not {"workers.launch.agent", "workers.launch.rank"} & {*words}:
                    if self.ranks == 1 or environment.get("LOCAL_RANK") == str(rank):
                        found.append(each)
            return bool(found)

        self.until(lambda: unless_gone(look), f"there is no trainer {rank}")
        return found[0]

    def _coordinator(self) -> psutil.Process:
        """The one that lives: a killed one is replaced."""
        found: list[psutil.Process] = []

        def look() -> bool:
            self._find_cluster()
            assert self.cluster is not None
            process = psutil.Process(self.cluster.coordinator_pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            return bool(found)

        self.until(lambda: unless_gone(look), "there is no coordinator")
        return found[0]

    def signal(self, role: str, number: signal.Signals, rank: int = 0) -> None:
        self.process(role, rank).send_signal(number)

    def shared_files(self) -> list[str]:
        """The named shared memory that its processes have mapped, which would stay behind them."""
        found = set()
        for process in self.processes():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            found |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
            found = {path for path in found if not path.endswith(" (deleted)")}
        return sorted(found)

    # ------------------------------------------------------------ checkpoints

    def newest_checkpoint(self) -> Path | None:
        """What `train.resume=latest` means: the last folder of the history."""
        try:
            names = (self.checkpoints / "history").read_text().split()
        except FileNotFoundError:
            return None
        folders = [self.checkpoints / name for name in names]
        return next((folder for folder in reversed(folders) if (folder / STATE_FILE).is_file()), None)


def differences(one: Path, other: Path) -> list[str]:
    """The files of two checkpoints that differ, except for what is named above.

    safetensors writes a file's metadata in any order, so its header is compared by content, its data by bytes. Of
    SHA256SUMS, whose checksums differ with that, the names are compared. Each save has a name of its own.
    """
    ours, theirs = (
        {SAVE.sub("state", str(path.relative_to(folder))): path for path in folder.rglob("*") if path.is_file()}
        for folder in (one, other)
    )
    found = [f"{name} is in one of them only" for name in sorted(ours.keys() ^ theirs.keys())]
    both = sorted(ours.keys() & theirs.keys())
    return found + [f"{name} differs" for name in both if _content(ours[name]) != _content(theirs[name])]


def _content(file: Path) -> Any:
    """What a file says, apart from what differs by design."""
    match file.name:
        case "trainer_state.json":
            return _without(json.loads(file.read_text()), OF_THE_RUN)
        case "tokenizer_config.json":
            return _without(json.loads(file.read_text()), OF_ITS_SOURCE)
        case "SHA256SUMS":
            return sorted(SAVE.sub("state", line.split("  ")[1]) for line in file.read_text().splitlines())
        case "index.json":
            return SAVE.sub("state", file.read_text())
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        return data
    size = int.from_bytes(data[:8], "little")
    return json.loads(SAVE.sub("state", data[8 : 8 + size].decode())), data[8 + size :]


def _without(tree: Any, paths: tuple[tuple[str, ...], ...]) -> Any:
    for path in paths:
        inside = [tree]
        for key in path[:-1]:
            inside = [each for part in inside for each in (part if key == "*" else [part[key]])]
        for part in inside:
            part.pop(path[-1], None)
    return tree


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[-60:]})"
    except psutil.Error:
        return f"process {process.pid}"


def unless_gone(act: Callable[[], Any]) -> Any:
    """What it returns, or None if its process is gone meanwhile."""
    try:
        return act()
    except psutil.Error:
        return None
