"""The kinds of faults, each a function of the run and of a seeded generator.

A fault returns a few words on what it did. The run then has to go on, or to end: `ends` says which is allowed. A fault
that restarts the run by itself, because it also damages what lies on disk, returns with the run started again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import zmq

from hytrain.monitoring import Client
from protocol import messages as m
from protocol.address import ROLES, Address
from protocol.channel import Network, PeerNotReading
from tests.fuzz.frames import Maker
from tests.soak.run import LIMIT_S, Broken, Run

Act = Callable[[Run, random.Random], str]
REFUSED: Final = 2
#: Frames of each fault that sends some.
FRAMES: Final = 300


@dataclass(frozen=True)
class Kind:
    """`ends`: whether the run ends by it; None if it may. `cheap`: of the short form, since it needs no restart."""

    name: str
    act: Act
    ends: bool | None

    @property
    def cheap(self) -> bool:
        return self.ends is False and self.name not in RESTARTING


KINDS: Final[dict[str, Kind]] = {}
#: They end the run and start it again by themselves.
RESTARTING: Final = ("remove-sockets", "flip-bit", "cut-file", "no-manifest")


def kind(name: str, *, ends: bool | None) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        KINDS[name] = Kind(name, act, ends)
        return act

    return add


# ---------------------------------------------------------------- deaths and signals


def _killing(role: str, *, ends: bool | None) -> None:
    @kind(f"kill-{role}", ends=ends)
    def kill(run: Run, drawn: random.Random) -> str:
        rank = drawn.randrange(run.ranks) if role in ("trainer", "optimizer") else 0
        run.signal(role, signal.SIGKILL, rank)
        return f"SIGKILL to {role} {rank}"


for _role in ("trainer", "optimizer", "coordinator", "launcher"):
    _killing(_role, ends={"launcher": True, "coordinator": False}.get(_role))


@kind("kill-all", ends=True)
def kill_all(run: Run, drawn: random.Random) -> str:
    """As a reset of the machine does. Nobody is left to remove the socket folder."""
    processes = run.processes()
    drawn.shuffle(processes)
    for process in processes:
        process.kill()
    run.launcher.wait()
    run.until(lambda: not run.processes(), "SIGKILL ends no process")
    folders = [path for path in run.temporary.iterdir() if path.name.startswith("hytrain-")]
    for folder in folders:
        shutil.rmtree(folder)
    return f"SIGKILL to {len(processes)} processes; the socket folder had to be removed by hand"


def _signalling(name: str, to: str, number: signal.Signals, *, ends: bool | None = True) -> None:
    @kind(name, ends=ends)
    def send(run: Run, drawn: random.Random) -> str:
        if to == "group":
            os.killpg(run.launcher.pid, number)  # as a terminal does
        else:
            run.signal(to, number, drawn.randrange(run.ranks) if to == "trainer" else 0)
        return f"{number.name} to the {to}"


_signalling("term-launcher", "launcher", signal.SIGTERM)
_signalling("hup-launcher", "launcher", signal.SIGHUP)
_signalling("int-group", "group", signal.SIGINT)
# With --max-restarts, torchrun starts ranks again that end by themselves.
_signalling("usr1-launcher", "launcher", signal.SIGUSR1, ends=None)
_signalling("term-trainer", "trainer", signal.SIGTERM, ends=None)


def _stopping(role: str) -> None:
    @kind(f"stop-{role}", ends=False)
    def stop(run: Run, drawn: random.Random) -> str:
        rank, stopped_s = drawn.randrange(run.ranks) if role in ("trainer", "optimizer") else 0, drawn.uniform(0.05, 2)
        process = run.process(role, rank)
        process.suspend()
        time.sleep(stopped_s)
        process.resume()
        return f"{role} {rank} stopped for {stopped_s:.2f} s"


for _role in ("trainer", "optimizer", "coordinator", "launcher"):
    _stopping(_role)


# ---------------------------------------------------------------- frames


def _sockets(run: Run) -> list[Path]:
    assert run.cluster is not None
    found = [path for path in Path(run.cluster.socket_dir).iterdir() if path.is_socket()]
    if not found:
        raise Broken("the run has no sockets")
    return sorted(found)


def _send(path: Path, frames: Iterable[list[bytes]]) -> None:
    """Send frames over a connection of their own, until it takes no more: the feed of statuses takes none."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.setsockopt(zmq.LINGER, 500)
        connection.setsockopt(zmq.SNDTIMEO, 500)
        connection.connect(f"ipc://{path}")
        with suppress(zmq.Again):
            for parts in frames:
                connection.send_multipart(parts)


def _maker(run: Run, drawn: random.Random) -> Maker:
    assert run.cluster is not None
    maker = Maker(drawn, token=run.cluster.token, ranks=run.ranks)
    maker.step = run.step()
    return maker


@kind("raw-bytes", ends=False)
def raw_bytes(run: Run, drawn: random.Random) -> str:
    """Bytes that are not even ZeroMQ's, to every socket."""
    sent = 0
    for path in _sockets(run):
        for style in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            with socket.socket(socket.AF_UNIX, style) as connection:
                try:
                    connection.connect(str(path))
                    connection.sendall(drawn.randbytes(drawn.randint(1, 4000)))
                except OSError:
                    continue  # of the other style, or closed at the first wrong byte
                sent += 1
    return f"{sent} connections"


@kind("junk-frames", ends=False)
def junk_frames(run: Run, drawn: random.Random) -> str:
    """Bytes that are no messages, in one part or several, to every inbox."""
    paths = [path for path in _sockets(run) if not path.name.startswith("arena")]

    def junk() -> list[bytes]:
        return [drawn.randbytes(drawn.randrange(200)) for _ in range(drawn.choice([1, 1, 2, 5]))]

    for path in paths:
        _send(path, [junk() for _ in range(FRAMES)])
    return f"{FRAMES} frames to each of {len(paths)} sockets"


@kind("damaged-messages", ends=False)
def damaged_messages(run: Run, drawn: random.Random) -> str:
    """Messages with the token, each damaged so that it cannot be read, and messages with a wrong token."""
    maker = _maker(run, drawn)
    paths = [path for path in _sockets(run) if not path.name.startswith("arena")]

    def damaged() -> list[bytes]:
        frame = maker.valid()
        wrong = frame.replace(maker.token.encode(), drawn.randbytes(16).hex().encode())
        return [drawn.choice([frame[: drawn.randrange(len(frame))], frame + b"\x00", wrong])]

    for path in paths:
        _send(path, [damaged() for _ in range(FRAMES)])
    return f"{FRAMES} frames to each of {len(paths)} sockets"


@kind("wrong-messages", ends=False)
def wrong_messages(run: Run, drawn: random.Random) -> str:
    """Valid messages with the token, from a connection of its own, in the name of any process."""
    assert run.cluster is not None
    maker = _maker(run, drawn)
    paths = [path for path in _sockets(run) if not path.name.startswith("arena") and path.name != "status"]
    for path in paths:
        address = Address(drawn.choice(ROLES), drawn.randrange(run.ranks))
        maker.inbox = name = f"{drawn.choice([address, 'x'])}-{drawn.getrandbits(32):x}"
        with Network(run.cluster.socket_dir, token=run.cluster.token, address=address, name=name) as network:
            outbox = network.outbox(path.name, linger_s=1.0)
            for _ in range(FRAMES):
                try:
                    outbox.send(maker.message())
                except PeerNotReading:
                    break
    return f"{FRAMES} messages to each of {len(paths)} inboxes"


# ---------------------------------------------------------------- the disk


@contextmanager
def _no_room(process: psutil.Process) -> Iterator[None]:
    """Whatever this process writes to files fails, as on a full disk, but with EFBIG in the place of ENOSPC.

    A limit of the kernel's on the size of files. It needs no root and strikes one process of a live run.
    """
    process.rlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        try:
            process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except psutil.NoSuchProcess:
            pass


@kind("full-disk-metrics", ends=False)
def full_disk_metrics(run: Run, drawn: random.Random) -> str:
    """The coordinator can write no records; a later one says how many are missing."""
    assert run.cluster is not None
    before = run.metrics.read_text().count("missing_records")
    with _no_room(run.process("coordinator")), Client(run.cluster) as monitor:
        run.until(
            lambda: run.launcher.poll() is not None or json.loads(monitor.status().record)["step"] > run.step(),
            "the coordinator has every record written",
        )
    run.until(
        lambda: run.launcher.poll() is not None or run.metrics.read_text().count("missing_records") > before,
        "no record says that records are missing",
    )
    return "records are missing, and a record says how many"


@kind("full-disk-logs", ends=False)
def full_disk_logs(run: Run, drawn: random.Random) -> str:
    """The launcher can write neither the trainer's log nor its own output, which goes to a file."""
    at = run.step()
    with _no_room(run.process("launcher")):
        run.reaches(at + 40, "while the launcher could write nothing")  # a line every 30 steps
    return "the launcher wrote nothing for 40 steps"


@kind("full-disk-optimizer", ends=False)
def full_disk_optimizer(run: Run, drawn: random.Random) -> str:
    """The optimizer can write no log, and make no shared memory: layers stay where they are."""
    with _no_room(run.process("optimizer", drawn.randrange(run.ranks))):
        time.sleep(drawn.uniform(0.3, 1.0))
    return "no room for logs and for shared memory"


@kind("full-disk-checkpoint", ends=False)
def full_disk_checkpoint(run: Run, drawn: random.Random) -> str:
    """A checkpoint cannot be written: it goes, and training goes on to the next."""
    said = "no checkpoint, and training goes on"
    before = run.output().count(said)
    with _no_room(run.process("trainer", drawn.randrange(run.ranks))):
        run.until(
            lambda: run.launcher.poll() is not None or run.output().count(said) > before,
            "nothing was said about a checkpoint that could not be written",
        )
    if left := [path.name for path in run.checkpoints.glob(".step-*")]:
        raise Broken(f"what was written of the checkpoint has stayed: {left}")
    return "a checkpoint was not written"


@kind("leftovers", ends=False)
def leftovers(run: Run, drawn: random.Random) -> str:
    """What a killed save leaves is there, and goes with the next save."""
    left = run.checkpoints / f".step-{drawn.randrange(1000)}.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(drawn.randbytes(1000))
    (run.checkpoints / ".history.partial").write_text("step-1\n")
    run.until(lambda: run.launcher.poll() is not None or not left.exists(), f"{left.name} has stayed")
    return "they went with the next save"


@kind("kill-in-save", ends=None)
def kill_in_save(run: Run, drawn: random.Random) -> str:
    """A rank is killed while a checkpoint is written."""
    trainer = run.process("trainer", drawn.randrange(run.ranks))
    ends_s = time.monotonic() + 120.0
    while not (saving := list(run.checkpoints.glob(".step-*.partial"))) and time.monotonic() < ends_s:
        time.sleep(0.0005)
    time.sleep(drawn.uniform(0.0, 0.15))
    trainer.kill()
    trainer.wait(LIMIT_S)
    left = "a part of it is left" if list(run.checkpoints.glob(".step-*.partial")) else "it was complete"
    return f"SIGKILL in the save of {saving[0].name if saving else 'nothing'}: {left}"


def _damaging(name: str, damage: Callable[[Path, random.Random], Path]) -> None:
    @kind(name, ends=False)
    def act(run: Run, drawn: random.Random) -> str:
        """The newest checkpoint is skipped by name, for the one before. If there is none, it is refused by name."""
        run.signal("launcher", signal.SIGTERM)
        run.ended()
        folder = run.newest_checkpoint()
        assert folder is not None
        damaged = damage(folder, drawn)
        run.start()
        ended = run.goes_on_or_ends(0)
        said = run.output() if ended is None else ended.output
        if str(damaged) not in said and damaged.name not in said:
            raise Broken(f"{damaged} is damaged, and the run does not name it: {said}")
        what = f"{folder.name}/{damaged.relative_to(folder)}"
        if ended is None:
            if f"skipped {folder.name}" not in said:
                raise Broken(f"{damaged} is damaged, and was used: {said}")
            return f"{what} skipped"
        if ended.status != REFUSED:
            raise Broken(f"{damaged} is damaged: {ended}")
        shutil.rmtree(folder)
        run.start()
        return f"{what} refused; from the start"


def _flip_bit(folder: Path, drawn: random.Random) -> Path:
    path = drawn.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    data = bytearray(path.read_bytes())
    data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    path.write_bytes(data)
    return path


def _cut_file(folder: Path, drawn: random.Random) -> Path:
    path = drawn.choice(sorted(folder.rglob("*.safetensors")))
    os.truncate(path, drawn.randrange(path.stat().st_size))
    return path


def _without_manifest(folder: Path, drawn: random.Random) -> Path:
    path = drawn.choice(sorted(folder.rglob("SHA256SUMS")))
    path.unlink()
    return path


_damaging("flip-bit", _flip_bit)
_damaging("cut-file", _cut_file)
_damaging("no-manifest", _without_manifest)


# ---------------------------------------------------------------- the rest


@kind("remove-sockets", ends=False)
def remove_sockets(run: Run, drawn: random.Random) -> str:
    """The files of the socket folder go, or the folder. The run goes on, and ends when it is told to."""
    assert run.cluster is not None
    folder, at = Path(run.cluster.socket_dir), run.step()
    if whole := drawn.random() < 0.5:
        shutil.rmtree(folder)
    else:
        for path in _sockets(run):
            path.unlink()
    run.reaches(at + 10, f"after {folder} was removed")
    run.signal("launcher", signal.SIGTERM)
    ended = run.ended()
    run.start()
    return f"{'the folder' if whole else 'the sockets'} removed: 10 more steps, then SIGTERM: status {ended.status}"


@kind("commands", ends=False)
def commands(run: Run, drawn: random.Random) -> str:
    """A monitor steers the run."""
    assert run.cluster is not None
    given = []
    with Client(run.cluster) as monitor:
        for _ in range(drawn.randint(1, 6)):
            name = drawn.choice(["k", "threads", "policy", "objective", "nonsense"])
            value = {
                "k": drawn.choice(["0", "1", f"{drawn.random():.3f}", "auto", "2", "none"]),
                "threads": drawn.choice(["1", "2", "0", "-1", "99999999"]),
                "policy": drawn.choice(["deadline", "random", "balance", "fixed", "other"]),
                "objective": drawn.choice(["speed", "gpu-memory", "host-memory", "other"]),
                "nonsense": "1",
            }[name]
            reply = monitor.require(m.Command(name=name, value=value), m.CommandReply)
            given.append(f"{name}={value}{'' if reply.ok else ' (refused)'}")
        monitor.status()
        if drawn.random() < 0.8:
            monitor.require(m.Command(name="policy", value="random"), m.CommandReply)
    return ", ".join(given)
