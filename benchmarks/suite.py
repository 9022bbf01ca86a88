"""HyTrain and its peers in turn, each in a process of its own: the one command of the benchmarks.

    python -m benchmarks.suite --results DIR PART...                 parts: see --list
    python -m benchmarks.suite --results DIR --systems no-offload hytrain:auto hytrain:0.2

    parts ─▶ jobs ─▶ guard: python -m benchmarks.step JOB ─▶ rows ─▶ DIR/rows.jsonl, a table on the terminal

Results add up: what this host has measured at this commit is not measured again without --again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks import guard, host, parts, report, rows
from benchmarks.parts import SHAPES, Job

#: Seconds kept back from a budget: for ending processes, and for writing.
MARGIN_S: Final = 5.0
#: A system that leaves less host memory is stopped. HyTrain's plans are to leave more: `HOST_MARGIN_BYTES`.
FLOOR_BYTES: Final = 4 * 10**9


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 for arguments that cannot be. A system that fails is a row, not a failure of the suite."""
    arguments = _parser().parse_args(argv)
    plan = _plan(arguments)
    if arguments.list or not plan:
        print("\n".join(_listed(plan or [(part, job) for part in parts.PARTS for job in _jobs(arguments, part)])))
        return 0
    arguments.results.mkdir(parents=True, exist_ok=True)
    run = Run(arguments, argv if argv is not None else sys.argv[1:])
    left = [f"{part}: {job.system}" for part, job in plan if not run.job(part, job)]
    print(report.of_run(run.measured))
    if left:
        print(f"\nnot started, {arguments.budget_s:.0f} s would not have sufficed: {'; '.join(left)}")
    return 0


def _part(name: str) -> str:
    if name not in parts.PARTS:
        raise argparse.ArgumentTypeError(f"no part is called {name!r}; parts: {', '.join(parts.PARTS)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART", help=", ".join(parts.PARTS))
    parser.add_argument("--systems", nargs="+", default=[], help="instead of parts: these")
    parser.add_argument("--only", nargs="+", default=[], metavar="SYSTEM", help="of the parts only these systems")
    parser.add_argument("--gpus", type=int, default=0, help=f"ranks of {', '.join(parts.RANKED)} (2), or of --systems")
    parser.add_argument("--results", type=Path, default=Path("runs/benchmarks"), help="folder of the result set")
    parser.add_argument("--list", action="store_true", help="say what would be started, and how long that may take")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start nothing that would end later")
    parser.add_argument("--rounds", type=int, default=1, help="repeat everything so many times, in turn")
    parser.add_argument("--again", action="store_true", help="measure again what this host has measured")
    parser.add_argument("--commit", help="name of the measured code, where git cannot tell")
    parser.add_argument("--runs", type=Path, help="keep HyTrain's run folders, as RUNS/SYSTEM: logs, metrics, a trace")
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--batch", type=int, nargs="+", default=[], help="only these batch sizes; --systems: else 8")
    parser.add_argument("--steps", type=int, help="measure so many in each segment, instead of the part's own number")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cap-gib", type=float, default=0.0, help="torch may take so much GPU memory; 0: all there is")
    parser.add_argument("--threads", type=int, help="torch's threads in the trainer")
    parser.add_argument("--host-memory-gb", type=float, help="the machine's, where MemTotal grows with use")
    return parser


def _jobs(arguments: argparse.Namespace, part: str) -> list[Job]:
    given = ("shape", "sequence", "device", "dtype", "threads", "cap_gib")
    ranks = arguments.gpus or 2 if part in parts.RANKED else 0 if part else arguments.gpus
    template = Job(**{name: getattr(arguments, name) for name in given}, ranks=ranks)
    if not part:
        sizes = arguments.batch or [8]
        return [parts.plain(template, system, batch) for system in arguments.systems for batch in sizes]
    jobs = [job for job in parts.PARTS[part](template) if not arguments.only or job.system in arguments.only]
    if arguments.steps:
        jobs = [replace(job, segments=tuple(replace(s, measure=arguments.steps) for s in job.segments)) for job in jobs]
    return [kept for job in jobs if (kept := job.only(arguments.batch)).segments] if arguments.batch else jobs


def _plan(arguments: argparse.Namespace) -> list[tuple[str, Job]]:
    """Part by part, round by round; what several parts have in common is once in a round."""
    once: dict[Job, str] = {}
    for part in [*arguments.parts, *([""] if arguments.systems else [])]:
        for job in _jobs(arguments, part):
            once.setdefault(job, part)
    return [(part, job) for job, part in once.items()] * int(arguments.rounds)


def _listed(plan: list[tuple[str, Job]]) -> list[str]:
    lines = []
    for part in dict.fromkeys(part for part, _ in plan):
        jobs = [job for other, job in plan if other == part]
        lines.append(f"{part:16} about {sum(job.expected_s for job in jobs):4.0f} s")
        lines += [f"    {job.system:24} {len(job.segments):3} segments, {job.expected_s:4.0f} s" for job in jobs]
    return lines


class Run:
    """One call of the suite on one machine."""

    def __init__(self, arguments: argparse.Namespace, argv: Sequence[str]) -> None:
        self._arguments, self._began_s = arguments, time.monotonic()
        self._common: rows.Row = {
            "host": host.identity(),
            "commit": arguments.commit or host.commit(),
            "command": shlex.join(["python", "-m", "benchmarks.suite", *argv]),
            "hardware": host.hardware(),
            "versions": host.versions(),
        }
        total_gb = arguments.host_memory_gb
        self._total = None if total_gb is None else int(total_gb * 1e9)
        known = rows.Rows.read(arguments.results)
        self._done: dict[tuple[Any, ...], list[rows.Row]] = {}
        if not arguments.again:
            for row in known.where(host=self._common["host"], commit=self._common["commit"]):
                self._done.setdefault(rows.key(row), []).append(row)
        self.measured = rows.Rows()

    def job(self, part: str, job: Job) -> bool:
        """Measure a job, unless that is done; False if the budget does not suffice."""
        if self._take_done(job):
            return True
        left_s = self._arguments.budget_s - (time.monotonic() - self._began_s) - MARGIN_S
        if job.expected_s > left_s:
            return False
        self._measure(part, job, timeout_s=min(max(parts.TIMEOUT_S, 2 * job.expected_s), left_s))
        return True

    def _take_done(self, job: Job) -> bool:
        """Whether the result set has this job already; each repeat is taken once."""
        keys = [rows.key({**vars(job), **vars(segment)}) for segment in job.segments]
        if any(len(self._done.get(key, ())) < keys.count(key) for key in keys):
            return False
        self.measured += [self._done[key].pop() for key in keys]
        return True

    def _measure(self, part: str, job: Job, timeout_s: float) -> None:
        print(f"{part or 'systems'}: {job.system}, about {job.expected_s:.0f} s …", file=sys.stderr, flush=True)
        log = self._arguments.results / "log.txt"
        with log.open("a") as file:
            file.write(f"\n===== {_now()} {part}: {job.system}\n")
        base_bytes = host.used_bytes()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks)]
        command = [sys.executable, *(torchrun if job.ranks else []), "-m", "benchmarks.step", job.to_json()]
        # A child that is stopped cannot remove its folder, and a state that it was saving there may fill the disk.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            runs = self._arguments.runs
            command += ["--run-dir", str((runs / job.folder).resolve()) if runs else folder]
            outcome = guard.watch(command, guard.Bounds(timeout_s, FLOOR_BYTES, self._total), log)
        found = [json.loads(line) for line in outcome.lines]
        error = outcome.error or "ended without a word"
        found += [{"batch": each.batch, "label": each.label, "error": error} for each in job.segments[len(found) :]]
        for measured in found:
            self._add(self._row(part, job, measured, base_bytes, outcome.host_peak_bytes))
        print(f"    {outcome.took_s:.0f} s, host memory up to {outcome.host_peak_bytes / 1e9:.1f} GB", file=sys.stderr)

    def _row(self, part: str, job: Job, measured: dict[str, Any], base_bytes: int, peak_bytes: int) -> rows.Row:
        """What the child measured, with what makes it a row of the result set."""
        used, own = measured.pop("host_used_bytes", None), measured.pop("versions", {})
        what = {
            name: getattr(job, name) for name in ("system", "shape", "sequence", "dtype", "clip", "ranks", "cap_gib")
        }
        what["exact"] = parts.about(job.system).exact
        row = {"part": part, **what, **measured, "at": _now(), **self._common}
        row["host_peak_gb"] = round(peak_bytes / 1e9, 2)
        if used is not None:
            row["host_gb"] = round((used - base_bytes) / 1e9, 2)
        row["versions"] = {**self._common["versions"], **own}
        return row

    def _add(self, row: rows.Row) -> None:
        rows.append(self._arguments.results, row)
        self.measured.append(row)
        told = row.get("error") or f"{row['step_s']:.4f} s, GPU {row['gpu_peak_gb']:.1f} GB"
        k = f", k={row['k']:.3f}" if row.get("k") is not None else ""
        print(f"    batch {row['batch']} {row['label']}: {told}{k}", file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    sys.exit(main())
