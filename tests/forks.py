"""Runs Python programs in forks of a process that has imported what they need, instead of importing it in each.

    test ── command, environment, folder, descriptors ──▶ server: torch, Transformers, hytrain imported, one thread
                                                            └─ fork ─▶ fork ─▶ the program, through runpy
    test ◀── its process ID: the fork between has ended, so the program is the test's own child

A launcher that runs so forks itself for its workers and its program, torchrun's agent for its ranks: with `Forked` as
their `Popen`.

A program looks like a started one: its command line and environment in /proc, its signals, descriptors and parent. It
is not one in two ways: modules are imported already, and its interpreter ends without clearing them. What depends on
that, or on what is read at an interpreter's start, is started as usual: `subprocess.Popen` does that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

#: What takes long to import, and needs no other thread.
PRELOADED: Final = (
    "hytrain.optim",
    "hytrain.recipe.loop",
    "pytest",
    "torch._dynamo",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "workers.watch.doctor",
    "workers.watch.status_table",
    "workers.launch.supervisor",
)
#: Whose `Popen` forks, in the server and so in all forks.
FORKING: Final = (
    "workers.launch.process",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
)
#: Variables that Python and libraries read when they start. With other ones, a program is started.
AT_START: Final = re.compile("(?!PYTHONPATH$|PYTHONUNBUFFERED$)(PYTHON|OMP_|MKL_|LD_|HF_|TRANSFORMERS_)")
#: Threads that hold no lock which a fork would need: those of torchrun's agent, of its rendezvous and its store, of an
#: allocator, and of the launcher's output.
HARMLESS: Final = {"pt_elastic", "RendezvousKeepAliveTimer_0", "pt_tcpstore_uv", "jemalloc_bg_thd", "output"}
#: Room in the server's command line and environment for those of its forks.
ROOM_BYTES: Final = 1 << 14
_PR_SET_CHILD_SUBREAPER: Final = 36


class Start(NamedTuple):
    """A program that is to run."""

    command: list[str]
    environment: dict[str, str]
    folder: str | None
    session: bool
    #: Descriptors by the numbers that they have in the program.
    descriptors: dict[int, int]
    prepare: Callable[[], object] | None

    def forks(self) -> bool:
        """Whether it is a Python program, in an environment in which a fork of `_Here` does what a started one does."""
        return self.command[0] == sys.executable and _program(self.command) is not None and _Here.fits(self.environment)


def _program(command: Sequence[str]) -> tuple[bool, str, list[str]] | None:
    """Of `python [-P] [-c CODE | -m MODULE | SCRIPT] …`: whether -P is there, what runs, its words; None for others."""
    words = list(command[1:])
    if safe := words[:1] == ["-P"]:
        del words[0]
    kind = words[0] if words else "-"
    if kind in ("-c", "-m"):
        return safe, kind, words[1:]
    return None if kind.startswith("-") else (safe, "", words)


class Forked(subprocess.Popen[Any]):
    """A `Popen` whose Python programs are forks, where one can be made."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        # `subprocess` calls this with all that its constructor has prepared: Python 3.11 and 3.12 in this order.
        _, pass_fds, cwd, env, _, _, shell, *pipes_and_more = others
        pipes, [_, _, _, _, _, session, _] = pipes_and_more[:6], pipes_and_more[6:]
        command = [args] if isinstance(args, (str, bytes, os.PathLike)) else args
        ours = (pipes[0], pipes[3], pipes[5])
        start = Start(
            command=list(map(os.fsdecode, command)),
            environment={os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
            folder=None if cwd is None else os.fspath(cwd),
            session=session,
            descriptors={number: number if given < 0 else given for number, given in enumerate(ours)}
            | {number: number for number in pass_fds},
            prepare=preexec_fn,
        )
        if shell or executable or not start.forks() or (pid := _fork(start)) is None:
            super()._execute_child(args, executable, preexec_fn, *others)  # type: ignore[misc]
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _fork(start: Start) -> int | None:
    """Its process ID: a child of this process. None if there can be no fork."""
    if _Here.is_fork:
        return _Here.fork(start)
    return None if Server.current is None or start.prepare is not None else Server.current.fork(start)


# ---------------------------------------------------------------- in the tests' process


class Server:
    """The process that forks, as the tests' process sees it."""

    current: Server | None = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _Here.environment = dict(os.environ)
        room = {**os.environ, "ROOM": " " * 2 * ROOM_BYTES}
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), " " * ROOM_BYTES]
        self._process = subprocess.Popen(command, env=room, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        assert self._socket.recv(16) == b"ready", "the server did not start"
        self._lock = threading.Lock()
        Server.current = self

    def fork(self, start: Start) -> int:
        descriptors = list(start.descriptors.values())
        folder = os.getcwd() if start.folder is None else os.path.abspath(start.folder)
        request = [start.command, start.environment, folder, start.session, list(start.descriptors)]
        with self._lock, tempfile.TemporaryFile() as file, _subreaper():  # an environment may be larger than a packet
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._socket, [b"start"], [file.fileno(), *descriptors])
            return int(self._socket.recv(16))

    def close(self) -> None:
        Server.current = None
        self._socket.close()
        self._process.wait()


@contextmanager
def _subreaper() -> Iterator[None]:
    """What a child's child leaves behind when the child ends is this process's own child."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


# ---------------------------------------------------------------- in the server and its forks


class _Here:
    """This process as one that forks."""

    is_fork = False
    environment: Mapping[str, str] = dict(os.environ)  # at its start
    descriptors: frozenset[int] = frozenset()
    filters: list[Any] = []
    path: list[str] = []

    @classmethod
    def fits(cls, environment: Mapping[str, str]) -> bool:
        """Whether a program would have started with the same variables as the server."""
        return all(
            environment.get(name) == cls.environment.get(name)
            for name in {*environment, *cls.environment}
            if AT_START.match(name)
        )

    @classmethod
    def fork(cls, start: Start) -> int | None:
        """A child of this process; None where threads run that may hold locks."""
        if _other_threads():
            return None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none is for our handlers in the fork
        if pid := os.fork():
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pid
        run(start, mask)


def serve(connection: socket.socket) -> NoReturn:
    """Fork what the tests' process asks for, until it closes its end."""
    for name in PRELOADED:
        importlib.import_module(name)
    for name in FORKING:
        importlib.import_module(name).Popen = Forked  # type: ignore[attr-defined]
    os.execv = _exec
    # torchrun's agent has the module of each frame looked up. For runpy's, that is a look at all modules: 2 s in a run.
    inspect.modulesbyfile["<frozen runpy>"] = "runpy"  # type: ignore[attr-defined]
    _Here.is_fork = True
    _Here.descriptors = frozenset(map(int, os.listdir("/proc/self/fd"))) - {connection.fileno()}
    _Here.filters, _Here.path = list(warnings.filters), list(sys.path)
    assert not (others := _other_threads()), f"what was imported has started threads: {', '.join(others)}"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # it clears what an imported module has registered: 40 ms in each fork
    gc.collect()
    gc.freeze()  # or each fork would copy all, as the collector writes into what it looks at
    connection.send(b"ready")
    while True:
        message, received, _, _ = socket.recv_fds(connection, 16, 64)
        if not message:
            os._exit(0)
        file, *descriptors = received
        with open(file, "rb") as request:
            request.seek(0)
            command, environment, folder, session, numbers = json.load(request)
        start = Start(command, environment, folder, session, dict(zip(numbers, descriptors, strict=True)), None)
        connection.send(str(_orphan(start)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _other_threads() -> set[str]:
    """The names of threads, those of libraries too, that may hold locks."""
    ours = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = {int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    del names[threading.get_native_id()]
    return {ours.get(number, name) for number, name in names.items()} - HARMLESS


def _exec(path: str, command: Sequence[str]) -> NoReturn:
    """`os.execv`, by which a rank becomes its program."""
    start = Start(list(command), dict(os.environ), None, False, {number: number for number in range(3)}, None)
    if start.forks() and not _other_threads():
        run(start)
    os.execve(path, command, os.environ)


def _orphan(start: Start) -> int:
    """Fork a fork, which goes to the nearest subreaper, once the one between has ended."""
    told, telling = os.pipe()
    if (between := os.fork()) == 0:
        between = os.getpid()
        if (pid := os.fork()) == 0:
            while os.getppid() == between:  # or its end would be taken for the parent's by a program that asks to hear
                time.sleep(0.001)
            run(start)
        os.write(telling, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 16))
    os.close(told)
    os.close(telling)
    return pid


def run(start: Start, mask: Iterable[int] = ()) -> NoReturn:
    """Become the program, with these signals blocked, and end with it."""
    status = 1
    try:
        _settle(start, mask)
        status = _ended(lambda: _run(start.command))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _settle(start: Start, mask: Iterable[int]) -> None:
    """Make this process's state that of one which has just been started."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _move(start.descriptors)
    if start.session:
        os.setsid()
    if start.folder is not None:
        os.chdir(start.folder)
    if start.prepare is not None:
        start.prepare()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(start.environment)
    _show("arg", start.command)
    _show("env", [f"{name}={value}" for name, value in start.environment.items()])
    sys.argv, sys.orig_argv = [], list(start.command)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _stream(number))
        setattr(sys, f"__{name}__", getattr(sys, name))
    warnings.filters[:] = _Here.filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    tempfile.tempdir = None
    if "workers.launch.output" in sys.modules:
        sys.modules["workers.launch.output"]._outputs.clear()  # whose threads are the launcher's


def _move(descriptors: Mapping[int, int]) -> None:
    """Have exactly these, by their numbers, besides the server's own."""
    high = 1 + max({*map(int, os.listdir("/proc/self/fd")), *descriptors})
    for at, given in enumerate(descriptors.values()):
        os.dup2(given, high + at)
    for at, number in enumerate(descriptors):
        os.dup2(high + at, number)
    for number in {*map(int, os.listdir("/proc/self/fd"))} - _Here.descriptors - {*descriptors}:
        try:
            os.close(number)
        except OSError:
            continue  # the one that listed the folder


def _stream(number: int) -> io.TextIOWrapper:
    """A standard stream, buffered as at an interpreter's start."""
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(raw))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        errors="backslashreplace" if number == 2 else None,
        line_buffering=number == 2 or raw.isatty(),
        write_through=unbuffered,
    )


def _show(what: str, words: Sequence[str]) -> None:
    """Show words in /proc/self/cmdline ("arg") or environ ("env"), in the room that the server was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(field) for field in fields[{"arg": 45, "env": 47}[what] :][:2])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(text) < end - begin, f"{len(text)} bytes of {what}: more room is needed"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _run(command: Sequence[str]) -> None:
    program = _program(command)
    assert program is not None
    safe, kind, words = program
    here = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.realpath(words[0])))
    given = [path or os.getcwd() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if safe else [here]), *given, *_Here.path]
    importlib.invalidate_caches()
    if kind == "-m":
        sys.argv[:] = words
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *words[1:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _ended(program: Callable[[], None]) -> int:
    """Run it; its exit status."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        _show_error(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        _show_error(error)
        return 1
    return 0


def _show_error(error: BaseException) -> None:
    """With the frames of the program alone."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


if __name__ == "__main__":
    sys.modules["forks"] = sys.modules["__main__"]
    serve(socket.socket(fileno=int(sys.argv[1])))
