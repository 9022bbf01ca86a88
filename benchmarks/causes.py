"""How soon a monitor tells what is wrong: a stopped optimizer, a program on its core, a slow disk, a divergence.

python -m benchmarks.causes

PROGRAM, a run ◀─ each cause in turn        hytrain-monitor --follow ─▶ its sentence, and seconds since the cause
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from benchmarks.watcher import HOME

#: Trains until its input ends. "save" saves onto a disk that takes 8 s, "nan" logs such a loss from then on.
PROGRAM: Final = """
import math, os, sys, threading, time, torch, hytrain
sync, given, loss = os.fsync, [], 1.0
def slow(descriptor):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(8)
    sync(descriptor)
def listen():
    for line in sys.stdin:
        given.append(line.strip())
    given.append("end")
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(8)])
opt = hytrain.AdamW(model, k=0.5, threads=1, run_dir=sys.argv[1])
torch.set_num_threads(1)
os.fsync = slow
threading.Thread(target=listen).start()
for step in range(1, 1 << 40):
    model(torch.randn(64, 512)).square().mean().backward()
    opt.step()
    opt.zero_grad()
    word = given.pop(0) if given else ""
    loss = math.nan if word == "nan" else loss
    opt.log(step, loss=loss)
    if word == "save":
        opt.async_save(sys.argv[1] + "/state")
    if word == "end":
        break
opt.close()
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-c", PROGRAM, str(run_dir)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=HOME, stdin=pipe, text=True) as program:
            while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").stat().st_size:
                time.sleep(0.1)
            watch = [sys.executable, "-m", "workers.watch.monitor", str(run_dir), "--follow"]
            with subprocess.Popen(watch, cwd=HOME, stdout=pipe, text=True) as monitor:
                _cause_all(program, monitor)
                monitor.terminate()
            assert program.stdin is not None
            program.stdin.close()
    return 0


def _cause_all(program: subprocess.Popen[str], monitor: subprocess.Popen[str]) -> None:
    tree = psutil.Process(program.pid).children(recursive=True)
    [optimizer] = [process for process in tree if "workers.optimize.optimizer" in process.cmdline()]
    core = optimizer.cpu_affinity()[-1]
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"

    def stop() -> str:
        optimizer.suspend()
        return f"optimizer-0 (process {optimizer.pid}) is stopped"

    def compete() -> str:
        others.append(subprocess.Popen([sys.executable, "-c", loop]))
        return f"(process {others[0].pid}) takes"

    def say(word: str, words: str) -> str:
        assert program.stdin is not None
        program.stdin.write(f"{word}\n")
        program.stdin.flush()
        return words

    others: list[subprocess.Popen[bytes]] = []
    _time(monitor, "a stopped optimizer", stop)
    optimizer.resume()
    _time(monitor, "a second program", compete)
    others[0].kill()
    others[0].wait()
    _time(monitor, "a slow disk", lambda: say("save", "has been writing"))
    _time(monitor, "a divergence", lambda: say("nan", "diverges"))


def _time(monitor: subprocess.Popen[str], what: str, cause: Callable[[], str]) -> None:
    """Print the seconds from a cause, which returns the words that tell it, to the line that has them."""
    assert monitor.stdout is not None
    while "step" not in monitor.stdout.readline():
        pass
    began_s = time.monotonic()
    words = cause()
    told = next(line for line in monitor.stdout if words in line)
    print(f"{what}: {time.monotonic() - began_s:.1f} s\n    {told.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
