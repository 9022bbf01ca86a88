"""What tests cost in CPU seconds, their processes' included: the dearest are shown at the end, and one has a limit.

a test ── seconds, as a property of its report ──▶ pytest's process ─▶ the ten dearest; those above the limit fail
"""

from __future__ import annotations

import resource
from collections.abc import Generator
from typing import Final

import pytest

#: What a test may cost that is neither slow, nor for a GPU, nor for trainers.
LIMIT_S: Final = 20.0
#: Tests that may cost more, and why.
DEAR: Final[dict[str, str]] = {
    "tests/integration/test_nodes.py::test_the_first_machine_shows_all_ranks": "nothing of two machines is a fork",
}
SHOWN: Final = 10
_NAME: Final = "CPU seconds"


class CpuSeconds:
    """The plugin."""

    def __init__(self) -> None:
        self._costs: dict[str, float] = {}
        self._too_dear: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Without what is set up for several tests."""
        before_s = spent_s()
        try:
            return (yield)
        finally:
            item.user_properties.append((_NAME, spent_s() - before_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            cost_s = self._costs[report.nodeid] = float(str(dict(report.user_properties)[_NAME]))
            is_free = {"slow", "gpu", "frameworks"} & report.keywords.keys() or report.nodeid in DEAR
            if cost_s > LIMIT_S and not is_free:
                self._too_dear.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._too_dear and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._costs) <= SHOWN:
            return
        total_s = sum(self._costs.values())
        terminalreporter.section(f"{SHOWN} of {len(self._costs)} tests: their CPU seconds, of {total_s:.0f} in all")
        for test in sorted(self._costs, key=self._costs.__getitem__, reverse=True)[:SHOWN]:
            terminalreporter.line(f"{self._costs[test]:6.1f}  {test}")
        for test in self._too_dear:
            terminalreporter.line(
                f"above {LIMIT_S:.0f} CPU seconds, and not among DEAR in {__file__}: {test}", red=True
            )


def spent_s() -> float:
    """CPU seconds of this process and of its children that have ended, and of theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
