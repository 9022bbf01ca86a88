"""Ranks for tests: processes of one `torch.distributed` job that call one function after another.

    test ── function, arguments ──▶ rank 0, 1, …: function(*arguments) ──▶ results by rank, or RankError
                                                                            │
    the next test, if a rank has failed ◀── new processes ◀── all killed ◀──┘

Ranks are kept from test to test. A function is named by its module, which the ranks import: it belongs into a module of
tests/integration that imports little.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import Forked

#: Only a hang takes longer: a function, one collective in it, the end of a process that has closed its pipe.
LIMIT_S = 240.0
COLLECTIVE_LIMIT_S = 60.0
END_S = 60.0
#: How long the others have to report, once one rank has failed or all are asked where they are.
GRACE_S = 3.0
LOG_CHARACTERS = 6000


class RankError(AssertionError):
    """A rank raised, died, or did not answer. The message has every rank's traceback."""


class RankGroup:
    """`world` ranks on this machine, each with one thread, and with one GPU if `device` is "cuda"."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world, self.device = world, device
        self.environment: dict[str, str] = {}  # more variables for what is run
        self._ranks: list[_Rank] = []
        self.revive()

    def revive(self) -> None:
        """Start the ranks, if they do not run. Call it before the leak check, which looks for new processes."""
        if self._ranks:
            return
        self._ranks = [_Rank(rank, self.world, self.device) for rank in range(self.world)]
        # Rank 0's store listens at a port that the system chose: nobody else can have taken it meanwhile.
        port = self._answers([self._ranks[0]])[0]
        for rank in self._ranks[1:]:
            rank.send(port)
        self._answers(self._ranks)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What `function(*arguments, **options)` returns in each rank. Raises `RankError`."""
        assert self._ranks, "a test that failed has ended them, and the next one has not begun"
        environment = {name: value for name, value in os.environ.items() if name.startswith("HYTRAIN_")}
        environment |= {"TMPDIR": tempfile.gettempdir(), **self.environment}
        call = pickle.dumps((function.__module__, function.__qualname__, arguments, options, environment))
        for rank in self._ranks:
            rank.send_bytes(call)
        return self._answers(self._ranks)

    def close(self) -> None:
        """Kill the ranks. What they have started ends by itself, as after any death."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def _answers(self, of: list[_Rank]) -> list[Any]:
        waiting, answers, ends_s = list(of), {}, time.monotonic() + LIMIT_S
        failures: dict[int, str] = {}
        while waiting:
            ready = connection.wait([rank.pipe for rank in waiting], max(0.0, ends_s - time.monotonic()))
            for rank in [rank for rank in waiting if rank.pipe in ready]:
                waiting.remove(rank)
                answers[rank.number], failure = rank.answer()
                if failure is not None:
                    failures[rank.number] = failure
                    ends_s = min(ends_s, time.monotonic() + GRACE_S)
            if not ready:
                for rank in waiting:
                    failures[rank.number] = f"no answer, {rank.where_it_is()}"
                break
        if failures:
            self.close()
            told = [f"rank {number} of {self.world}: {text}" for number, text in sorted(failures.items())]
            raise RankError("\n\n".join(told))
        return [answers[rank.number] for rank in of]


class _Rank:
    """One process, as its parent sees it."""

    def __init__(self, number: int, world: int, device: str) -> None:
        self.number = number
        self.pipe, theirs = connection.Pipe()
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, __file__, str(theirs.fileno()), str(number), str(world), device]
        self._process = Forked(command, stdout=self._log, stderr=self._log, pass_fds=[theirs.fileno()])
        theirs.close()

    def send(self, value: Any) -> None:
        self.send_bytes(pickle.dumps(value))

    def send_bytes(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # it has died: its answer says so
            self.pipe.send_bytes(data)

    def answer(self) -> tuple[Any, str | None]:
        """Its result, or what went wrong."""
        try:
            result, failure = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None, f"died with status {self._process.wait(END_S)}\n{self._tail()}"
        return result, None if failure is None else f"{failure}{self._tail()}"

    def where_it_is(self) -> str:
        """The traces of its threads."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(GRACE_S / 3)
        return f"its threads are at\n{self._tail()}"

    def _tail(self) -> str:
        """The end of what it has printed."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - LOG_CHARACTERS)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()
        self._log.close()


# ---------------------------------------------------------------- in a rank


def serve(pipe: connection.Connection, rank: int, world: int, device: str) -> None:
    """Join the job, then do what the parent asks for, until it closes the pipe."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    torch.set_num_threads(1)

    def answer(result: Any, failure: str | None = None) -> None:
        pipe.send_bytes(pickle.dumps((result, failure)))

    with suppress(EOFError, BrokenPipeError):
        _join(rank, world, device, lambda: pickle.loads(pipe.recv_bytes()), answer)
        while True:
            try:
                answer(_call(*pickle.loads(pipe.recv_bytes())))
            except (EOFError, BrokenPipeError):
                raise
            except BaseException:
                answer(None, traceback.format_exc())
    os._exit(0)  # nobody is left to wait for other ranks


def _join(rank: int, world: int, device: str, receive: Callable[[], Any], answer: Callable[[Any], None]) -> None:
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        answer(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", receive(), world, timeout=limit, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    answer(None)


def _call(
    module: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any], environment: dict[str, str]
) -> Any:
    for known in [known for known in os.environ if known.startswith("HYTRAIN_")]:
        del os.environ[known]
    os.environ |= environment
    tempfile.tempdir = None  # from TMPDIR again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*script_method. is deprecated", DeprecationWarning)  # torch.compile's own
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return function(*arguments, **options)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))  # modules that all tests have
    serve(connection.Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
