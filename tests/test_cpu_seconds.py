"""Dear tests are shown, and those above the limit end the tests with a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cpu_seconds import DEAR, LIMIT_S, SHOWN, CpuSeconds


def ended(costs: dict[str, float], *keywords: str) -> tuple[Any, list[str]]:
    """The exit status, and what is shown, of tests that have succeeded and cost so much."""
    plugin, session, said = CpuSeconds(), SimpleNamespace(exitstatus=pytest.ExitCode.OK), list[str]()
    terminal: Any = SimpleNamespace(section=said.append, line=lambda text, **_: said.append(text))
    for test, cost_s in costs.items():
        properties = [("CPU seconds", cost_s)]
        report: Any = SimpleNamespace(
            when="call", nodeid=test, user_properties=properties, keywords=dict.fromkeys(keywords)
        )
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish(session)  # type: ignore[arg-type]
    plugin.pytest_terminal_summary(terminal)
    return session.exitstatus, said


def test_the_dearest_are_shown() -> None:
    status, said = ended({f"test {number}": number / 10 for number in range(20)})
    assert status == pytest.ExitCode.OK and len(said) == 1 + SHOWN
    assert "10 of 20 tests" in said[0] and "19 in all" in said[0] and said[1] == "   1.9  test 19"


def test_one_above_the_limit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {**dict.fromkeys(map(str, range(SHOWN)), 0.0), "dear": LIMIT_S + 1}
    assert {ended(costs, mark)[0] for mark in ("slow", "gpu", "frameworks")} == {pytest.ExitCode.OK}
    status, said = ended(costs)
    assert status == pytest.ExitCode.TESTS_FAILED and said[-1].endswith(": dear")
    monkeypatch.setitem(DEAR, "dear", "a reason")
    assert ended(costs)[0] == pytest.ExitCode.OK


def test_every_dear_test_has_a_reason() -> None:
    assert all(DEAR.values())
