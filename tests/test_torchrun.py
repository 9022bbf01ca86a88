"""torchrun's options: what is passed on, what is bad input, and how the end of ranks is reported."""

from __future__ import annotations

import argparse
import logging
import os
import select
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hytrain.errors import ConfigError
from workers.launch import agent, launcher, torchrun
from workers.launch.output import Output, drain
from workers.launch.tee import LONGEST_LINE, Tee, rank_pipes
from workers.launch.torchrun import Job


def job(*words: str) -> Job | None:
    parser = argparse.ArgumentParser()
    torchrun.add_options(parser)
    return torchrun.job(parser.parse_args(words))


def test_options_are_passed_on_under_torchruns_names() -> None:
    assert job() is None
    assert job("--nproc-per-node", "4") == Job(4, 4, ("--nproc-per-node=4", "--standalone"), "")
    assert job("--nproc_per_node=2", "--master_port=29611") == Job(
        2, 2, ("--nproc-per-node=2", "--master-port=29611"), ""
    )
    assert job("--max-restarts", "3") is None, "the launcher starts everything again"
    assert job("--max-restarts", "3", "--nproc-per-node", "2") == Job(2, 2, ("--nproc-per-node=2", "--standalone"), "")
    meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=node7:29500", "--rdzv-id=42")
    several = job("--nnodes=1:4", "--nproc-per-node=8", *meeting)
    assert several == Job(8, None, ("--nnodes=1:4", "--nproc-per-node=8", *meeting), "42@node7:29500")
    fixed = job("--nnodes=2", "--nproc-per-node=3", "--master-addr=node7")
    assert fixed is not None and (fixed.world, fixed.meeting) == (6, "@node7:")
    again = job("--nnodes=2", "--master-addr=node7", "--max-restarts=3")
    assert again is not None and "--max-restarts=3" in again.flags
    known = agent.run.get_args_parser().parse_args([*several.flags, "--standalone", "program"])
    assert (known.nnodes, known.nproc_per_node, known.rdzv_id) == ("1:4", "8", "42")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nnodes=2"], "--nnodes 2 with a rendezvous at 127.0.0.1: that is another machine on each of them"),
        (["--nnodes=1:2", "--rdzv-endpoint=localhost:29500"], "a rendezvous at localhost"),
        (["--nnodes=2", "--rdzv-endpoint=localhost"], "a rendezvous at localhost"),
        (["--nnodes=2", "--rdzv-endpoint=[::1]:29500"], "a rendezvous at"),
        (["--nnodes=2", "--master-addr=127.0.1.1"], "a rendezvous at 127.0.1.1"),
        (["--nnodes=two"], "--nnodes two: a number of machines, or MIN:MAX"),
        (["--nnodes=3:2"], "--nnodes 3:2: a number"),
        (["--nnodes=0"], "--nnodes 0: a number"),
        (["--nproc-per-node=0"], "--nproc-per-node 0: at least one rank"),
        (["--nproc-per-node=many"], "--nproc-per-node many: Unsupported"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job(*words)
    assert sentence in str(raised.value)


def test_the_command_line_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.touch()
    assert launcher.main(["--nnodes=2", "--nproc-per-node=2", str(program)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hytrain-cluster: --nnodes 2 with a rendezvous at") and said.count("\n") == 1


def failure(local_rank: int, exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=local_rank, pid=100 + local_rank, exitcode=exitcode, error_file="<N/A>")


def test_the_report_names_killed_ranks_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.report("/run", {4: failure(0, 1), 6: failure(2, -9)}) == 137
    first, second = capsys.readouterr().err.splitlines()
    assert first == "hytrain-cluster: rank 6 (process 102) was killed by SIGKILL; its log is /run/logs/trainer-2.log"
    assert second.startswith("hytrain-cluster: rank 4 (process 100) ended with exit status 1; ")


def test_bad_input_of_ranks_is_not_reported_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.report("/run", {0: failure(0, 2), 1: failure(1, 2)}) == 2
    assert capsys.readouterr().err == ""


def test_ranks_that_torchrun_has_ended_are_known_by_its_warnings() -> None:
    """Its class that starts processes says whom it ends, before and after it has lost patience."""
    logger = logging.getLogger(agent.PROCESSES_LOG)
    ended = agent.Ended()
    logger.addFilter(ended)
    try:
        logger.warning("Sending process %s closing signal %s", 7, "SIGTERM")
        logger.error("failed (exitcode: %s) local_rank: %s (pid: %s)", 1, 0, 8)
    finally:
        logger.removeFilter(ended)
    assert ended.pids == {7}


def wait_for_empty(target: Output) -> None:
    with target._changed:
        assert target._changed.wait_for(lambda: not target._held, 60)


def test_logs_have_no_progress_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A log keeps what a terminal shows in the end, wherever the output is cut into pieces."""
    said = "begins\r\n\r 1%|\r 2%|\r    \rstep 2: saved\n\r 3%|\r100%|\nAge? "
    for size in (1, 2, 5, len(said)):
        tee, log = Tee(), tmp_path / f"{size}.log"
        _, stderr = tee.add_pipes(log)
        for at in range(0, len(said), size):
            os.write(stderr, said[at : at + size].encode())
            assert tee.pass_on(select.select([*tee.pipes], [], [])[0])
        assert log.read_text() == "begins\nstep 2: saved\n100%|\nAge? ", "also before the end"
        os.write(stderr, b"\r50%\r")
        tee.drain()
        tee.close()
        drain()
        os.close(stderr)
        assert log.read_text().endswith("Age? 50%") and capfd.readouterr().err == said + "\r50%\r"


def test_lines_of_ranks_are_shown_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`print` writes a line and its end apart, since the output of trainers is not buffered."""
    tee = Tee()
    for rank in (0, 1):
        tee.add_fifos(str(tmp_path), rank, tmp_path / f"{rank}.log")
    outs = [os.open(rank_pipes(str(tmp_path), rank)[0], os.O_WRONLY) for rank in (0, 1)]

    def write(rank: int, text: str) -> str:
        os.write(outs[rank], text.encode())
        assert tee.pass_on(select.select([*tee.pipes], [], [])[0])
        return shown()

    def shown() -> str:
        for pipe in tee.pipes.values():
            wait_for_empty(pipe.target)
        return capfd.readouterr().out

    assert write(0, "start 0") == write(1, "start 1") == ""
    assert write(1, "\n50 %\r") == "start 1\n50 %\r"
    assert write(0, "\nAge? ") == "start 0\n"
    tee.drain()
    assert shown() == "Age? "
    size = 32768
    parts = "".join(write(1, "x" * size) for _ in range(LONGEST_LINE // size + 1))
    assert parts == "x" * (LONGEST_LINE + size)
    tee.close()
    drain()
    for out in outs:
        os.close(out)
    assert (tmp_path / "0.log").read_text() == "start 0\nAge? "
