"""The monitor: what it shows is what the run recorded, and whatever becomes of it changes nothing in the run."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from forks import Forked

from hytrain.config import Cluster
from hytrain.monitoring import Client
from protocol import messages as m
from protocol.address import Address
from protocol.placement import Places
from workers import run_folder
from workers.watch import monitor, observer
from workers.watch import status_text as view
from workers.watch.troubles import Snapshot, Usage, find
from workers.watch.web import Feed

pytestmark = pytest.mark.usefixtures("forks")
ROOT = Path(__file__).resolve().parent.parent

#: Trains with fixed seeds and ends with a digest of the weights. It pauses, until it gets a line of input, at each
#: step or k of the arguments behind the first, in their order. It waits for each record: a coordinator that were far
#: behind would then send more at once than a monitor takes.
SCRIPT = """
import hashlib, itertools, sys, time, torch, hytrain

torch.manual_seed(0)
torch.set_num_threads(1)
steps, pauses = int(sys.argv[1]), sys.argv[2:]
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(8)])
opt = hytrain.AdamW(model, lr=1e-2, k=0.5)
for step in itertools.count(1):
    x = torch.randn(16, 48)
    loss = (model(x) - x.sin()).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    opt.log(step, loss=loss.item())
    pauses_here = pauses and pauses[0] in (f"step={step}", f"k={opt.statistics().k}")
    known = step if pauses_here or step == steps else step - 1  # the numbers of a step leave with the next one's report
    metrics = opt.run_dir / "metrics.jsonl"
    while known and (not metrics.exists() or f'"step": {known},' not in metrics.read_text()):
        time.sleep(0.001)
    if pauses_here:
        del pauses[0]
        print("paused", flush=True)
        input()
    if step >= steps and not pauses:
        break
opt.synchronize()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("weights", digest, flush=True)
opt.close()
"""


@contextmanager
def cluster(tmp_path: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """SCRIPT under the launcher, its run folder named `name`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, ROOT / "bin/hytrain-cluster", "--run-dir", tmp_path / name, "--threads", "1"]
    with running([*command, script, *arguments], stdin=subprocess.PIPE) as launcher:
        yield launcher


def watching(*arguments: str) -> Any:
    return running([sys.executable, ROOT / "bin/hytrain-monitor", *arguments])


@contextmanager
def running(command: list[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with its output in a pipe, which is gone at the end."""
    with Forked(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()


def ask(*arguments: str, how: type[subprocess.Popen[str]] = Forked) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "bin/hytrain-monitor", *arguments]
    with how(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, *said)


def read_until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> list[str]:
    """Its lines up to the first that is wanted."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted(line):
            return lines
    raise AssertionError(f"it ended before: {''.join(lines)}")


def go_on(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdin is not None
    launcher.stdin.write("\n")
    launcher.stdin.flush()


def paused(line: str) -> bool:
    return line == "paused\n"


def weights(launcher: subprocess.Popen[str]) -> str:
    return read_until(launcher, lambda line: line.startswith("weights"))[-1]


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def at_step(step: int) -> Callable[[str], bool]:
    return lambda line: json.loads(line)["step"] == step


@pytest.mark.spawns
def test_it_shows_what_the_run_records_and_passes_commands_on(tmp_path: Path) -> None:
    with cluster(tmp_path, "run", "16", "step=4", "k=1.0") as launcher:
        read_until(launcher, paused)
        with watching("--follow", "--json") as follower:
            read_until(follower, at_step(4))
            once = ask("--once", "--json", how=subprocess.Popen)
            assert once.returncode == 0, once.stderr
            status, record = json.loads(once.stdout), recorded(tmp_path / "run")[-1]
            assert {name: status[name] for name in record} == record
            assert record["step"] == 4 and {"loss", "k"} <= record.keys()
            with Client(str(tmp_path / "run")) as client:
                assert client.history() == recorded(tmp_path / "run") and len(client.layers()) == 8
                assert client.log_tail(1)["coordinator-0.log"]
            assert len(status["layers"]) == 8 and {layer["owner"] for layer in status["layers"]} <= {"gpu", "cpu"}
            assert {p["role"] for p in status["processes"]} == {"coordinator", "optimizer", "trainer", "launcher"}
            assert all(p["alive"] and p["rss_bytes"] > 0 for p in status["processes"])

            for name, value in (("threads", "2"), ("policy", "balance"), ("objective", "gpu-memory")):
                done = ask(f"--set-{name}", value)
                assert (done.returncode, done.stdout) == (0, f"{name}={value} from the next plan on\n")
            many = ask("--set-threads", "512")
            assert many.returncode == 2 and "one per core of the optimizer" in many.stderr
            unknown = ask("--set-policy", "stranger")
            assert unknown.returncode == 2 and "deadline" in unknown.stderr
            named = ask(str(tmp_path / "run"), "--set-k", "1.0")
            assert (named.returncode, named.stdout) == (0, "k=1.0 from the next plan on\n")
            refused = ask("--set-k", "1.5")
            assert refused.returncode == 2 and "[0, 1]" in refused.stderr
            stranger = ask("stranger", "--once")
            assert stranger.returncode == 2 and str(tmp_path / "run") in stranger.stderr

            go_on(launcher)
            # Read while they come: what nobody reads fills the pipe, and a follower that stands loses records.
            followed = [json.loads(line) for line in read_until(follower, lambda line: json.loads(line)["k"] == 1.0)]
            read_until(launcher, paused)
            assert followed == recorded(tmp_path / "run")[4:], "the command took hold, and no record is missing"
            now = json.loads(ask("--once", "--json").stdout)
            assert now["objective"] == "gpu-memory", "each command reached the coordinator"
            assert {layer["owner"] for layer in now["layers"]} == {"gpu"} and "1.00" in now["reason"]
            go_on(launcher)
            assert launcher.wait() == 0
            assert follower.wait() == 0, "a run's end is no failure of its follower"
    gone = ask(str(tmp_path / "run"), "--once")
    assert gone.returncode == 0 and re.search(r"^state +ended$", gone.stdout, re.MULTILINE)
    gone = ask(str(tmp_path / "run"), "--set-k", "0.5")
    assert gone.returncode == 2 and "not live" in gone.stderr


@pytest.mark.spawns
def test_monitors_that_stall_or_are_killed_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYTRAIN_RUN_DIR", str(tmp_path / "undisturbed"))
    monkeypatch.setattr(sys, "argv", ["script.py", "60"])
    with redirect_stdout(io.StringIO()) as said:
        exec(SCRIPT, {})
    undisturbed = said.getvalue()
    with cluster(tmp_path, "watched", "60", "step=2") as launcher:
        read_until(launcher, paused)
        with watching("--follow") as stalled, watching("--follow", "--json") as killed, watching() as reading:
            for process in (stalled, killed, reading):
                read_until(process, lambda line: True)
            stalled.send_signal(signal.SIGSTOP)
            go_on(launcher)
            read_until(killed, lambda line: json.loads(line)["step"] >= 20)  # it may lose one
            killed.kill()
            assert weights(launcher) == undisturbed
            assert launcher.wait() == 0, "it does not wait for the one that is stalled"
            assert reading.wait() == 0
    assert len(recorded(tmp_path / "watched")) == 60


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files with a path that is short enough for sockets, and no others' runs."""
    with tempfile.TemporaryDirectory(prefix="ht-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_without_a_run_it_says_so(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = temporary / "hytrain-old"  # of a run that was killed; its number is in use again, by another
    old.mkdir()
    pids = {"launcher_pid": os.getpid(), "coordinator_pid": os.getpid(), "optimizer_pids": (os.getpid(),)}
    Cluster(run_name="old", run_dir="/nowhere", socket_dir=str(old), token="t", **pids).write()
    (temporary / "hytrain-broken").mkdir()
    (temporary / "hytrain-broken" / "cluster.json").write_text("{")
    assert monitor.main(["--once"]) == 2
    assert monitor.main(["somewhere", "--follow"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "you have no live run" in first
    assert "'somewhere'" in second and second.endswith("live runs: none")


def test_it_lists_runs_and_deletes_ended_ones(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = run_folder.default()
    for hours, name in enumerate(("newest", "middle", "oldest"), 1):
        (runs / name).mkdir(parents=True)
        (runs / name / "metrics.jsonl").write_text('{"step": 41, "loss": 1.25}\n{"step": 42, "loss": null}\n')
        at_s = time.time() - hours * 3600
        for path in (runs / name / "metrics.jsonl", runs / name):
            os.utime(path, (at_s, at_s))
    lock = run_folder.claim(runs / "going-on")

    def shown(*arguments: str, status: int = 0) -> list[str]:
        assert monitor.main(arguments) == status
        out, err = capsys.readouterr()
        return (out + err).splitlines()

    head, live, newest, *_ = [line.split() for line in shown("--list")]
    assert head == ["run", "state", "steps", "loss", "age", "size", "folder"]
    assert live[:4] == ["going-on", "live", "-", "-"] and live[-1] == str(runs / "going-on")
    assert newest[:6] == ["newest", "ended", "42", "1.2500", "1", "h"] and newest[-1] == str(runs / "newest")
    listed = [json.loads(line) for line in shown("--list", "--json", str(runs))]
    assert [(run["live"], run["steps"], run["loss"]) for run in listed] == [
        (True, None, None),
        *[(False, 42, 1.25)] * 3,
    ]
    assert shown("--list", str(tmp_path / "nowhere"), status=2) == [
        f"hytrain-monitor: there is no folder {tmp_path / 'nowhere'}"
    ]

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    said = shown("--prune", status=2)
    assert f"{runs / 'going-on'} stays: it is live" in said and "nothing was deleted" in said[-1]
    assert len(run_folder.find(runs)) == 4
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "")
    asked = shown("--prune")
    assert "these runs would be deleted, with their checkpoints:" in asked and asked[-1] == "nothing was deleted"
    assert len(run_folder.find(runs)) == 4
    assert str(runs / "oldest") in shown("--prune", "--keep", "3")[-1]
    assert {run.folder.name for run in run_folder.find(runs)} == {"going-on", "newest", "middle"}
    monkeypatch.setattr("builtins.input", lambda question: "y")
    shown("--prune")
    assert [run.folder.name for run in run_folder.find(runs)] == ["going-on"]
    assert shown("--prune", "--keep", "0")[-1] == "there is nothing to delete"
    os.close(lock)


RECORD = {"step": 7, "at_s": 1.0, "step_s": 2.0, "stall_s": 0.5, "cpu_busy_s": 0.2, "k": 0.25}
RECORD |= {"policy": "deadline", "predicted_step_s": 1.9}


def status(**changed: Any) -> m.Status:
    fields: dict[str, Any] = {
        "run_name": "demo",
        "run_dir": "/runs/demo",
        "record": json.dumps(RECORD),
        "processes": (m.Process(address=Address("trainer", 0), pid=7, detail="[on] cpu"),),
        "layer_names": ("a", "b"),
        "layer_numels": (1, 3),
        "layer_positions": (0, 1),
        "places": Places(("gpu", "cpu")),
        "host_planes": {"grads": 3 * 2**30, "weights": 2**30},
        "device_planes": {"weights": 2**31},
        "plan": None,
        "policy": "deadline",
        "reason": "[k] is in time",
        "ranks": (),
    }
    return m.Status(**{**fields, **changed})


def as_text(snapshot: Snapshot) -> str:
    pytest.importorskip("rich")
    from workers.watch.status_table import as_text

    return as_text(snapshot)


def look(shown: m.Status) -> Snapshot:
    """As the monitor looks, but at processes that are gone."""
    processes = tuple((process, None) for process in shown.processes)
    return Snapshot(shown, processes, find(shown, processes))


class Replayed(Client):
    """Answers and the feed as they come, in turn: a list is what the feed brings until it is silent."""

    def __init__(self, *events: m.Status | list[m.Status]) -> None:
        self.events, self._feed = list(events), self  # type: ignore[assignment]

    def _ask(self, question: Any, kind: Any, patience_s: float = 0.0) -> Any:
        assert not self.events or isinstance(self.events[0], m.Status)
        return self.events.pop(0) if self.events else None

    def receive(self, timeout_s: float) -> m.Status | None:
        news = self.events[0] if self.events else []
        if isinstance(news, list) and news:
            return news.pop(0)
        if isinstance(news, list) and self.events and timeout_s:
            del self.events[0]
        return None


def test_an_answer_that_overtakes_the_feed_loses_no_record() -> None:
    """It was asked for while nothing came, and sent when more had."""
    known = [status(record=json.dumps(RECORD | {"step": step, "at_s": float(step)})) for step in range(1, 8)]
    one, two, three, four, five, six, seven = known
    attached = Replayed(two, [one, two, three], five, [four, five, six], seven, [])
    assert list(attached.statuses()) == [two, three, four, five, five, six, seven]
    # The feed lost what came between, as it may: then the answer is what there is.
    assert list(Replayed(one, [two], five, [], [six]).statuses()) == [one, two, five, six]


@pytest.mark.parametrize("reader", ["--follow", "--web"])
def test_thousands_of_steps_leave_nothing_in_memory(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced behind the first two thousand, when what is bounded is full. A float per step would be 24 bytes."""
    traced = list[int]()

    def statuses() -> Iterator[m.Status]:
        for step in range(1, 6_001):
            yield status(record=json.dumps(RECORD | {"step": step, "at_s": float(step), "loss": step / 7}))
            if step in (2_000, 6_000):
                gc.collect()  # what waits for it is not left
                traced.append(tracemalloc.get_traced_memory()[0])

    feed = Feed("demo", Path("/runs/demo"), look)
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        tracemalloc.start()
        try:
            if reader == "--web":
                feed.follow(statuses())
            else:
                monitor._follow(statuses(), look, as_json=False, commands={"stall": None, "divergence": None})
        finally:
            tracemalloc.stop()
    first, last = traced
    assert last - first < 20_000


def test_a_line_has_what_the_record_has() -> None:
    assert view.line(status()) == (
        "step 7  k 0.250 deadline  step time 2.00 s (1.90 s predicted)  stall 500.0 ms  optimizer busy 200.0 ms"
    )
    full = {**RECORD, "loss": 1.5, "tokens_per_s": 1234.5, "predicted_step_s": None}
    assert view.line(status(record=json.dumps(full))).startswith("step 7  loss 1.5000  1,234 tokens/s  k")
    clipped = {**RECORD, "loss": 1.5, "grad_norm": 0.12345, "loss_scale": 65536.0}
    far = {**RECORD, "loss": 1.5, "lr": 2e-3, "steps": 70.0, "remaining_s": 130.0, "skipped_steps": 3}
    assert view.line(status(record=json.dumps(far))).startswith(
        "step 7 of 70, 2 min left  loss 1.5000  lr 0.002  3 skip"
    )
    diverged = RECORD | {"loss": None, "diverged_at": 5.0}
    assert view.line(status(record=json.dumps(diverged))).startswith("step 7  diverged at step 5  k")
    assert view.line(status(record=json.dumps(clipped))).startswith("step 7  loss 1.5000  norm 0.123  scale 65536  k")
    for mode, words in (("defer", "updates after the norm"), ("speculate", "updates ahead of the norm")):
        assert f"stall 500.0 ms  {words}  optimizer" in view.line(status(record=json.dumps({**RECORD, "mode": mode})))
    exact = {**RECORD, "mode": None, "state_dtype": "float32", "master_dtype": "float32"}
    assert view.line(status(record=json.dumps(exact))) == view.line(status())
    rounded = json.dumps({**exact, "state_dtype": "bfloat16"})
    assert "stall 500.0 ms  moments in bfloat16: not exact  optimizer" in view.line(status(record=rounded))
    both = json.dumps({**exact, "state_dtype": "bfloat16", "master_dtype": "bfloat16"})
    assert "  moments in bfloat16, without masters: not exact  optimizer" in view.line(status(record=both))


def rank(number: int, gather_s: float | None = None, *, world: int = 3, **changed: Any) -> m.RankStatus:
    record = json.dumps({**RECORD, "threads": 2, **changed})
    about = {"host": f"host{number}", "record": record, "cores": "on cores 0-7"}
    return m.RankStatus(rank=number, world=world, gather_s=gather_s, **about)


def test_the_slowest_rank_is_the_one_that_waits_for_nobody() -> None:
    """All leave an all-gather together. A step takes 2 s; waits below a hundredth of that mean nothing."""
    several = status(ranks=(rank(0, 0.7), rank(1, 0.1), rank(2, 0.5)))
    assert view.waits_s(several) == pytest.approx((0.6, 0.0, 0.4))
    assert view.slowest(several) == (1, pytest.approx(0.4))
    assert view.line(several).endswith("optimizer busy 200.0 ms  rank 1 is the slowest: the others wait 400.0 ms")
    shown = json.loads(view.record_json(several))
    assert shown["slowest"] == {"rank": 1, "wait_s": pytest.approx(0.4)} and shown["step"] == 7
    assert [(its["rank"], its["host"], its["step"]) for its in shown["ranks"]] == [(n, f"host{n}", 7) for n in range(3)]
    in_turn = status(ranks=(rank(0, 0.110), rank(1, 0.1), rank(2, 0.5)))
    assert view.slowest(in_turn) is None and json.loads(view.record_json(in_turn))["slowest"] is None
    for part in ((rank(0, 0.7), rank(1, None), rank(2, 0.1)), (rank(0, 0.7), rank(1, 0.1))):
        unknown = status(ranks=part)
        assert set(view.waits_s(unknown)) == {None} and view.slowest(unknown) is None
    alone = status()
    assert view.slowest(alone) is None and view.record_json(alone) == alone.record


def test_the_table_has_a_line_per_rank() -> None:
    ranks = (
        rank(0, world=4, gather_s=0.7, k=0.125),
        rank(1, world=4, gather_s=0.1, stall_s=1.0),
        rank(2, world=4, gather_s=0.6, step=7 - view.SILENT_STEPS - 1),
    )
    record = json.dumps(RECORD | {"step": 7})
    fast = json.dumps(RECORD | {"step": 7, "step_s": 0.01})
    text = as_text(Snapshot(status(record=fast, ranks=ranks), ()))
    assert "no news" not in text, "the others are heard of later, in so few seconds"
    text = as_text(
        Snapshot(status(record=record, ranks=(*ranks, replace(rank(3, world=4, gather_s=0.6), record="{}"))), ())
    )
    assert "ranks     rank 1 is the slowest: the others wait 500.0 ms in each step" in text
    head, zero, one, two, three = text.splitlines()[9:14]
    assert head.split() == ["rank", "host", "step", "step", "time", "stall", "waits", "k", "optimizer"]
    assert zero.split() == "0 host0 7 2.00 s 500.0 ms 25% 600.0 ms 30% 0.125 2 threads on cores 0-7".split()
    assert one.split() == "1 host1 7 2.00 s 1.00 s 50% 0.0 ms 0% 0.250 2 threads on cores 0-7".split()
    assert two.endswith(f"no news since step {7 - view.SILENT_STEPS - 1}")
    assert three.split() == "3 host3 on cores 0-7".split(), "no step has ended there"


def test_the_table_says_who_owns_what_and_why() -> None:
    usage = Usage(cores=(0, 1, 4), rss_bytes=2**30, cpu_s=5.0, cpu_share=1.5)
    gone = m.Process(address=Address("optimizer", 0), pid=8, detail="on cores 2")
    shown = Snapshot(status(), ((status().processes[0], usage), (gone, None)))
    text = as_text(shown)
    assert "█░   █ GPU 1 layers, 25%   ░ CPU 1 layers, 75%" in text
    assert "0.250   deadline: [k] is in time" in text, "brackets are text, not rich's markup"
    trainer, optimizer = text.splitlines()[-2:]
    assert trainer.split("  ")[-1] == "[on] cpu"
    assert all(word in trainer for word in ("0-1,4", "150%", "1.00 GiB", "1.50 s 75%", "500.0 ms 25%"))
    power = {"gpu_watts": 612.4, "gpu_utilization": 0.98, "gpu_used_bytes": 17.25 * 2**30}
    powered = as_text(replace(shown, status=status(record=json.dumps({**RECORD, **power}))))
    assert "hardware  GPU 612 W   in use 98%   17.2 GiB of its memory\n" in powered and "hardware" not in text
    traffic = {"to_device_bytes": 5 << 30, "to_host_bytes": 1 << 20}
    copied = as_text(replace(shown, status=status(record=json.dumps({**RECORD, **traffic}))))
    amounts = "5.00 GiB to the trainer's device, 2.50 GiB/s   1.0 MiB to host memory, 0.5 MiB/s"
    assert f"copies    {amounts}\n" in copied and "copies" not in text
    assert "gone" in optimizer and "200.0 ms 10%" in optimizer and "on cores 2" in optimizer
    for threads, words in ((1, "1 thread on cores 2"), (4, "4 threads on cores 2")):  # as commanded since it began
        commanded = replace(shown, status=status(record=json.dumps({**RECORD, "threads": threads})))
        assert words in as_text(commanded).splitlines()[-1]
    none_yet = status(record="{}", layer_names=(), layer_numels=(), layer_positions=(), places=Places(()))
    text = as_text(Snapshot(none_yet, ()))
    assert "no step has ended yet" in text and "layers" not in text


GIB = 2**30


def test_memory_is_told_by_plane() -> None:
    """The largest first. What planes do not explain of the GPU's peak is told, too."""
    assert view.memory(status()) == [
        "host 4.00 GiB: grads 3.00 GiB, weights 1.00 GiB",
        "trainer 2.00 GiB: weights 2.00 GiB",
    ]
    on_gpu = status(record=json.dumps(RECORD | {"gpu_peak_bytes": 5 * GIB}), host_planes={})
    rest = "activations and others, at the peak 3.00 GiB"
    assert view.memory(on_gpu) == [f"GPU 5.00 GiB: {rest}, weights 2.00 GiB"]
    assert view.memory(status(host_planes={}, device_planes={})) == []


def on_cores(*cores: int) -> Usage:
    return Usage(cores=cores, rss_bytes=0, cpu_s=0.0, cpu_share=0.0)


def test_a_core_belongs_to_who_is_pinned_to_it() -> None:
    """The trainer may run on all cores, and the coordinator, too: those of the optimizer are the optimizer's."""
    addresses = [Address("coordinator", 0), Address("trainer", 0), Address("optimizer", 0), Address("optimizer", 1)]
    processes = [m.Process(address=address, pid=1, detail="") for address in addresses]
    usages = on_cores(*range(8)), on_cores(*range(6)), on_cores(2, 3), None
    loads = (0.0, 0.5, 1.0, 0.97, 0.3, 0.3, 0.1, 0.2)
    shown = Snapshot(status(), tuple(zip(processes, usages, strict=True)), loads=loads)
    groups = view.cores(shown)
    assert [(it.owner, it.cores) for it in groups] == [
        ("optimizer-0", (2, 3)),
        ("others", (6, 7)),
        ("trainer-0", (0, 1, 4, 5)),
    ]
    assert groups[0].loads == (1.0, 0.97) and groups[2].cells == ("trainer-0", "0-1,4-5", "28%", "▁▅▃▃")
    told = json.loads(view.as_json(shown))
    assert told["cores"][0] == {"owner": "optimizer-0", "cores": [2, 3], "loads": [1.0, 0.97]}
    assert told["host_planes"] == {"grads": 3 * GIB, "weights": GIB}
    shared = Snapshot(status(), ((processes[1], on_cores(0, 1)), (processes[2], on_cores(0, 1))), loads=(0.5, 0.5))
    assert [it.owner for it in view.cores(shared)] == ["trainer-0, optimizer-0"]
    assert view.cores(Snapshot(status(), ())) == [], "at the first look"
    text = as_text(shown)
    assert "cores     optimizer-0  2-3      98%  ██\n" in text and "trainer-0    0-1,4-5  28%  ▁▅▃▃\n" in text
    assert "memory    host 4.00 GiB: grads 3.00 GiB, weights 1.00 GiB\n" in text


def test_the_load_of_a_core_is_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread's first look, psutil knows no other one before, and says that nothing was done."""
    percents = [[0.0, 0.0], [0.0, 0.0], [50.0, 0.0]]
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: percents.pop(0))
    pids = {"launcher_pid": os.getpid(), "coordinator_pid": os.getpid(), "optimizer_pids": ()}
    looking = observer.Observer(Cluster(run_name="", run_dir="", socket_dir="", token="", **pids))
    monkeypatch.setattr(observer, "LOOK_S", math.inf)
    assert looking.look(status()).loads == ()
    monkeypatch.setattr(observer, "LOOK_S", 0.0)
    assert looking.look(status()).loads == ()
    assert looking.look(status()).loads == (0.5, 0.0)
