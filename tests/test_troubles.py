"""What is said to be wrong with a run, and who else is seen on its cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
from test_monitor import as_text, status
from test_report import record

from protocol import messages as m
from protocol.address import Address
from workers.watch import observer
from workers.watch import status_text as view
from workers.watch.observer import EVERY_S, FIRST_S, Strangers
from workers.watch.troubles import SLOW_DISK_S, TAKEN, Snapshot, Stranger, Usage, find

OPTIMIZER = m.Process(address=Address("optimizer", 0), pid=7, detail="")
USAGE = Usage(cores=(2, 3), rss_bytes=0, cpu_s=0.0, cpu_share=0.0, state="sleeping")


def said(process: m.Process = OPTIMIZER, usage: Usage | None = USAGE, *strangers: Stranger, **more: Any) -> list[str]:
    shown = status(record=json.dumps(record(12, **more)))
    return [trouble.text for trouble in find(shown, [(process, usage)], strangers)]


def test_a_stopped_process_is_named_before_it_is_silent() -> None:
    stopped = replace(USAGE, state="stopped")
    words = "optimizer-0 (process 7) is stopped by a signal or Ctrl-Z: kill -CONT 7 resumes it"
    assert said(OPTIMIZER, stopped) == said(replace(OPTIMIZER, silent_s=9.0), stopped) == [words]
    assert said() == said(OPTIMIZER, None) == []
    [text] = said(OPTIMIZER, replace(USAGE, state="tracing-stop"))
    assert "is stopped by a debugger" in text


def test_a_process_that_waits_for_the_disk_is_silent_for_that() -> None:
    silent = replace(OPTIMIZER, silent_s=4.0)
    assert said(silent) == said(silent, None) == ["optimizer-0 (process 7) has not answered for 4 s"]
    asleep = replace(USAGE, state="disk-sleep")
    assert said(silent, asleep) == ["optimizer-0 (process 7) has not answered for 4 s: it waits for the disk"]
    assert said(OPTIMIZER, asleep) == []


def test_a_disk_is_slow_if_a_folder_takes_long() -> None:
    saves = replace(OPTIMIZER, writing="/c/step-4", writing_s=SLOW_DISK_S)
    assert said(saves) == ["optimizer-0 (process 7) has been writing /c/step-4 for 2 s: the disk is slow"]
    assert said(replace(saves, writing_s=0.9 * SLOW_DISK_S)) == []


def test_who_takes_most_of_the_optimizers_cores_is_named() -> None:
    others = [Stranger(31, "make", 2.0), Stranger(32, "yes", 0.97), Stranger(33, "sh", TAKEN), Stranger(34, "x", TAKEN)]
    what = "updates take longer, since others use the optimizer's cores, 2-3: "
    named = "make (process 31): 2.0 cores, yes (process 32): 97% of a core, sh (process 33): 20% of a core"
    assert said(OPTIMIZER, USAGE, *others) == [what + named], "in one sentence"
    hidden = [Stranger(31, "make", 0.9 * TAKEN), Stranger(0, "", 0.5)]
    assert said(OPTIMIZER, USAGE, *hidden) == [what + "programs that cannot be seen from here: 50% of a core"]
    assert said(OPTIMIZER, None, *others) == [], "the optimizer has ended"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"diverged_at": 12.0, "loss": None}, "training has diverged at step 12: the loss of step 12 is not finite"),
        (
            {"diverged_at": 10.0, "loss": None, "grad_norm": None},
            "training has diverged at step 10: the loss and the norm of the gradients of step 12 are not finite",
        ),
        ({"diverged_at": 10.0}, "training has diverged at step 10"),
        ({"loss": None}, "training diverges: the loss of step 12 is not finite"),
        ({"loss": None, "skipped_steps": 1}, ""),
        ({"grad_norm": None, "skipped_steps": 1}, ""),
    ],
)
def test_what_is_not_finite_is_the_cause_of_a_divergence(more: dict[str, Any], words: str) -> None:
    assert said(**more) == [words][: bool(words)]


def test_the_table_and_the_json_have_the_sentences() -> None:
    shown = status(record=json.dumps(record(12, policy="deadline", diverged_at=3.0)))
    snapshot = Snapshot(shown, (), find(shown, ()))
    assert json.loads(view.as_json(snapshot))["troubles"] == ["training has diverged at step 3"]
    assert "trouble   training has diverged at step 3\n" in as_text(snapshot)


# ---------------------------------------------------------------- other programs

Times = namedtuple("Times", "user system children_user children_system")
Core = namedtuple("Core", "user nice system idle")


class Machine:
    """Four cores, and processes by their numbers: parent, core, CPU seconds, those of ended children."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.began_s: dict[int, float] = {}
        self.processes: dict[int, tuple[int, int, float, float]] = {}
        self.worked_s = [0.0] * 4
        monkeypatch.setattr(observer, "time", self)
        monkeypatch.setattr(observer.psutil, "process_iter", self._all)
        monkeypatch.setattr(observer.psutil, "cpu_times", self._cores)
        monkeypatch.setattr(observer.os, "getpid", lambda: 99)

    def monotonic(self) -> float:
        return self.now_s

    def _all(self, asked: Any) -> Any:
        for pid, (parent, core, cpu_s, childrens_s) in self.processes.items():
            times = Times(cpu_s, 0.0, childrens_s, 0.0)
            info = {"pid": pid, "ppid": parent, "name": f"it\x1b-{pid}", "cpu_times": times, "cpu_num": core}
            info["create_time"] = self.began_s.get(pid, 0.0)
            yield type("Process", (), {"info": info})

    def _cores(self, percpu: bool) -> list[Core]:
        assert percpu
        return [Core(worked_s, 0.0, 0.0, 0.0) for worked_s in self.worked_s]


def test_strangers_are_those_on_the_cores_that_the_run_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is 10 and 11, which has started 12; 20 is on another core, 99 is this monitor."""
    machine = Machine(monkeypatch)
    machine.processes = dict.fromkeys((12, 11, 10, 20, 21, 22, 99), (1, 2, 0.0, 0.0)) | {12: (11, 2, 0.0, 0.0)}
    strangers, own = Strangers(), {10, 11}
    assert strangers.look(own, {2, 3}) == (), "nothing has passed"
    machine.now_s += FIRST_S
    machine.processes |= {pid: (1, 2, 0.6, 0.0) for pid in (10, 11, 99)} | {12: (11, 2, 0.6, 0.0)}
    machine.processes |= {20: (1, 0, 1.0, 0.0), 21: (1, 2, 0.1, 0.0), 22: (1, 3, 0.4, 0.0)}
    found = strangers.look(own, {2, 3})
    assert [(one.pid, pytest.approx(one.cpu_share)) for one in found if one.cpu_share > 0] == [(22, 0.4), (21, 0.1)]
    assert found[0].name == "it\ufffd-22", "others choose names, also ones that would steer a terminal"
    assert strangers.look(own, set()) == strangers.look(own, {2, 3}) == found, "not looked for again at once"
    machine.now_s += EVERY_S
    assert [one for one in strangers.look(own, {2, 3}) if one.cpu_share > 0] == []


def test_what_cores_have_worked_for_nobody_is_of_programs_that_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.processes = dict.fromkeys((10, 20, 99), (1, 2, 0.0, 0.0))
    strangers = Strangers()
    machine.now_s += FIRST_S
    machine.worked_s = [0.9, 0.0, 1.0, 0.95]
    machine.processes = {10: (1, 2, 0.5, 0.1), 20: (1, 3, 0.3, 0.0), 99: (1, 0, 0.05, 0.0)}
    found = {one.pid: one.cpu_share for one in strangers.look({10}, {2, 3})}
    assert found == {20: pytest.approx(0.3), 0: pytest.approx(1.95 - 0.5 - 0.1 - 0.3 - 0.05)}


def test_what_has_begun_meanwhile_is_seen_with_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """23 is new, 22 another process with the number of one that has ended, and 21 has had children, such as a build."""
    machine = Machine(monkeypatch)
    machine.processes = dict.fromkeys((10, 21, 22), (1, 2, 0.0, 0.0)) | {22: (1, 2, 5.0, 0.0)}
    strangers = Strangers()
    machine.now_s += FIRST_S
    machine.began_s[22] = machine.began_s[23] = 100.5
    machine.worked_s = [0.0, 0.0, 0.9, 0.5]
    machine.processes |= {21: (1, 2, 0.1, 0.2), 22: (1, 2, 0.6, 0.0), 23: (21, 3, 0.5, 0.0)}
    found = {one.pid: one.cpu_share for one in strangers.look({10}, {2, 3})}
    assert found == {21: pytest.approx(0.1), 22: pytest.approx(0.6), 23: pytest.approx(0.5), 0: pytest.approx(0.0)}


def test_a_process_is_where_any_of_its_threads_may_be() -> None:
    """As with OpenMP's, which bind the thread that starts them to one core."""
    bind = "os.sched_setaffinity(0, {cores[%d]}), print(flush=True), input()"
    program = (
        "import os, threading; cores = sorted(os.sched_getaffinity(0))\n"
        f"threading.Thread(target=lambda: ({bind % -1})).start(); {bind % 0}"
    )
    cores = sorted(os.sched_getaffinity(0))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        try:
            for _ in range(2):
                process.stdout.readline()
            assert observer._cores(process.pid) == tuple(sorted({cores[0], cores[-1]}))
        finally:
            process.kill()
