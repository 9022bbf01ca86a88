"""Hello, Welcome, Ready: each step in its place, and each step out of place refused with the story."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.handshake import HandshakeError, Phase, RunHandshake, WorkerHandshake
from protocol.messages import Hello, Ready, Welcome

WELCOME = Welcome(run_name="run", coordinator_pid=1)
STEPS: dict[str, Callable[[WorkerHandshake], object]] = {
    "hello": lambda worker: worker.hello(),
    "welcome": lambda worker: worker.on_welcome(WELCOME),
    "ready": lambda worker: worker.ready("built"),
}
ORDER = list(STEPS)


def optimizer(pid: int = 10, rank: int = 0) -> Hello:
    return Hello(role="optimizer", rank=rank, pid=pid, inbox="optimizer-0")


def test_a_worker_joins() -> None:
    worker = WorkerHandshake(role="optimizer", rank=0, pid=10, inbox="optimizer-0")
    run = RunHandshake(run_name="run", pid=1)
    worker.on_welcome(run.on_hello(worker.hello()))
    assert worker.phase is Phase.WELCOMED and run.joined == (optimizer(),)
    assert not run.is_ready("optimizer") and run.detail("optimizer") == "starting"
    run.on_ready(worker.ready("8 threads"))
    assert worker.phase is Phase.READY
    assert run.is_ready("optimizer") and run.detail("optimizer") == "8 threads"
    run.check()


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("step", ORDER)
def test_each_step_of_a_worker_has_one_place(done: int, step: str) -> None:
    worker = WorkerHandshake(role="trainer", rank=0, pid=10, inbox="trainer-0-1f")
    for earlier in ORDER[:done]:
        STEPS[earlier](worker)
    phase = worker.phase
    if done == ORDER.index(step):
        STEPS[step](worker)
        assert worker.phase is not phase
    else:
        with pytest.raises(HandshakeError, match=f"trainer-0: .* while {phase.name}, needs"):
            STEPS[step](worker)
        assert worker.phase is phase


def test_a_role_and_rank_join_once() -> None:
    run = RunHandshake(run_name="run", pid=1)
    run.on_hello(optimizer(pid=10))
    with pytest.raises(HandshakeError, match="optimizer-0 joined as process 10, now 11 says Hello"):
        run.on_hello(optimizer(pid=11))
    assert run.on_hello(optimizer(pid=11, rank=1)) == WELCOME
    run.check()


def test_who_left_may_be_followed() -> None:
    run = RunHandshake(run_name="run", pid=1)
    run.on_hello(optimizer(pid=10))
    run.on_ready(Ready(role="optimizer", rank=0, detail=""))
    run.leave("optimizer", 0)
    run.leave("optimizer", 0)
    assert run.joined == () and not run.is_ready("optimizer")
    run.on_hello(optimizer(pid=11))
    assert not run.is_ready("optimizer")
    run.check()


def test_ready_without_hello_and_twice() -> None:
    run = RunHandshake(run_name="run", pid=1)
    ready = Ready(role="optimizer", rank=0, detail="")
    with pytest.raises(HandshakeError, match="says Ready without a Hello, or twice"):
        run.on_ready(ready)
    run.on_hello(optimizer())
    run.on_ready(ready)
    with pytest.raises(HandshakeError, match="says Ready without a Hello, or twice"):
        run.on_ready(ready)


@given(st.lists(st.tuples(st.sampled_from(["hello", "ready", "leave"]), st.integers(0, 1))))
@settings(deadline=None)
def test_who_is_ready_has_joined(events: list[tuple[str, int]]) -> None:
    run, joined, ready = RunHandshake(run_name="run", pid=1), set[int](), set[int]()
    for event, rank in events:
        try:
            if event == "hello":
                run.on_hello(optimizer(rank=rank))
                assert rank not in joined
                joined.add(rank)
            elif event == "ready":
                run.on_ready(Ready(role="optimizer", rank=rank, detail=""))
                assert rank in joined and rank not in ready
                ready.add(rank)
            else:
                run.leave("optimizer", rank)
                joined.discard(rank)
                ready.discard(rank)
        except HandshakeError:
            assert event == "hello" and rank in joined or event == "ready" and (rank not in joined or rank in ready)
        run.check()
        assert {hello.rank for hello in run.joined} == joined
        assert {rank for rank in (0, 1) if run.is_ready("optimizer", rank)} == ready
