"""The parts of the optimizer process: memory in pieces, times and timeline of its work, its rate at the start."""

from __future__ import annotations

import ctypes
import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hytrain.kernels.backend import Operands
from hytrain.kernels.scalars import TYPICAL, scalars
from hytrain.memory.arena import Arena, Mapping, receive_arena, send_arena
from hytrain.run import trace
from hytrain.run.trace import TraceWriter
from protocol.address import Address
from protocol.handles import layout
from protocol.messages import CpuUpdate, Layer, Segment
from protocol.rules import TILE_NUMEL
from workers.optimize import arenas as memory
from workers.optimize import update_rate
from workers.optimize.arenas import Arenas, SegmentPlanes
from workers.optimize.optimizer import Session
from workers.optimize.update_rate import seconds_per_parameter
from workers.optimize.work_log import Progress

TOKEN = "0123456789abcdef"
OPTIMIZER, TRAINER = Address("optimizer", 0), Address("trainer", 0)
OWN: dict[str, Any] = {"token": TOKEN, "address": OPTIMIZER}


def layer(lid: int, *numels: int, dtype: str = "bfloat16") -> Layer:
    segments = tuple(
        Segment(name=f"s{i}", numel=n, dtype=dtype, grads_dtype=dtype, group=0) for i, n in enumerate(numels)
    )
    return Layer(lid=lid, position=lid, name=f"layer {lid}", segments=segments)


class Backend:
    """Notes what it is asked to do. `work_s` is how long an update seems to take."""

    name, threads = "noting", 1

    def __init__(self) -> None:
        self.updated: list[dict[str, Any]] = []
        self.now_s, self.work_s = 0.0, 0.0

    def update(self, of: Operands) -> None:
        self.updated.append({field.name: getattr(of, field.name) for field in fields(of)})
        self.now_s += self.work_s


LAYERS = [layer(0, 1000), layer(1, 40_000, 300), layer(2, 5000)]
LAYOUTS = {spec.lid: layout(spec) for spec in LAYERS}


class Owner:
    """`Arenas` with pieces of four pages, and the trainer's end of its connection."""

    def __init__(self) -> None:
        self.backend = Backend()
        here, self.trainer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.arenas = Arenas(LAYERS, self.backend, here, **OWN)

    def touch_all(self) -> None:
        while self.arenas.pending is not None:
            self.arenas.touch_next()

    def announced(self) -> int | None:
        """The layer whose descriptor has arrived, if one has."""
        try:
            self.trainer.setblocking(False)
            file = receive_arena(self.trainer, LAYOUTS, token=TOKEN)
        except BlockingIOError:
            return None
        file.close()
        return file.layout.lid


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(memory, "PIECE_BYTES", 4 * 4096)
    before = len(os.listdir("/proc/self/fd"))
    owner = Owner()
    yield owner
    owner.arenas.close()
    owner.trainer.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where memory was touched, and how much."""
    ranges, populate = list[tuple[int, int]](), Mapping.populate

    def noted(mapping: Mapping, *wanted: tuple[int, int], threads: int) -> None:
        assert threads == Backend.threads
        ranges.extend(wanted)
        populate(mapping, *wanted, threads=threads)

    monkeypatch.setattr(Mapping, "populate", noted)
    return ranges


def without_gradients(lid: int) -> int:
    return LAYOUTS[lid].nbytes - LAYOUTS[lid].plane_nbytes["grads"]


def test_memory_that_a_trainer_waits_for_is_touched_in_one_go(owner: Owner, touched: list[tuple[int, int]]) -> None:
    """Threads share it out, and each asks for its huge pages in one call."""
    owner.arenas.request(1)
    owner.arenas.touch_next(whole=True)
    assert owner.announced() == 1
    assert [size for _, size in touched] == [without_gradients(1)]


def test_a_descriptor_comes_after_the_last_piece(owner: Owner, touched: list[tuple[int, int]]) -> None:
    owner.arenas.request(1)
    nbytes = without_gradients(1)
    pieces = math.ceil(nbytes / (4 * 4096))
    assert pieces > 2
    for _ in range(pieces - 1):
        owner.arenas.touch_next()
        assert owner.arenas.pending == 1 and 1 not in owner.arenas
        assert owner.announced() is None
    owner.arenas.touch_next()
    assert owner.arenas.pending is None and 1 in owner.arenas
    assert owner.announced() == 1
    assert [start + size for start, size in touched[:-1]] == [start for start, _ in touched[1:]]
    assert sum(size for _, size in touched) == nbytes and max(size for _, size in touched) == 4 * 4096
    for lid in (2, 0):
        owner.arenas.request(lid)
    owner.touch_all()
    assert [owner.announced(), owner.announced()] == [2, 0], "in the order of requests"
    assert sum(size for _, size in touched) == sum(map(without_gradients, LAYOUTS))
    owner.arenas.release(2)
    owner.arenas.request(2)
    owner.arenas.touch_next()
    owner.arenas.close()  # half-way: the fixture counts descriptors
    assert owner.arenas.pending is None and not owner.arenas.segments


def test_a_layer_gets_memory_once_until_it_is_released(owner: Owner) -> None:
    for unknown in (-1, 3):
        with pytest.raises(ValueError, match="unknown"):
            owner.arenas.request(unknown)
    owner.arenas.request(0)
    with pytest.raises(ValueError, match="has them"):
        owner.arenas.request(0)  # still on its way
    owner.touch_all()
    with pytest.raises(ValueError, match="has them"):
        owner.arenas.request(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    owner.arenas.release(0)
    assert 0 not in owner.arenas and len(os.listdir("/proc/self/fd")) < descriptors
    owner.arenas.request(0)
    owner.touch_all()
    assert [owner.announced(), owner.announced()] == [0, 0]


def test_an_arena_that_the_trainer_has_made_is_like_any_other(owner: Owner) -> None:
    file = Arena(LAYOUTS[1])
    trainers = Mapping(file.descriptor, file.layout.nbytes)
    to = {"token": TOKEN, "sender": Address("trainer", 0)}
    send_arena(owner.trainer, file, **to)
    owner.arenas.adopt(1)
    assert 1 in owner.arenas and owner.arenas.pending is None
    handle = file.layout.handles["exp_avg"][0]
    assert handle is not None
    trainers.buffer[handle.offset : handle.offset + 4] = b"bits"
    address, _ = owner.arenas.segments[1][0].banks[0]["exp_avg"]
    assert ctypes.string_at(address, 4) == b"bits"
    for known, reason in ((1, "already has planes"), (3, "unknown")):
        with pytest.raises(ValueError, match=reason):
            owner.arenas.adopt(known)
    send_arena(owner.trainer, file, **to)
    with pytest.raises(ValueError, match="expected one arena"):
        owner.arenas.adopt(0)
    file.close()
    owner.arenas.release(1)
    owner.arenas.request(1)
    owner.touch_all()
    assert owner.announced() == 1


def test_memory_that_the_trainer_waits_for_is_touched_by_all_cores() -> None:
    backend, seen, queue = SimpleNamespace(threads=1), [], SimpleNamespace(next_tile=lambda: None, step=-1)
    arenas = SimpleNamespace(pending=0, touch_next=lambda whole: seen.append((backend.threads, whole)))
    progress = SimpleNamespace(touched=lambda *times: None)
    session: Any = SimpleNamespace(_backend=backend, _arenas=arenas, _queue=queue, _progress=progress, _max_threads=4)
    Session._work(session)
    queue.step = 0  # from now on, it trains meanwhile
    Session._work(session)
    assert seen == [(4, True), (1, False)] and backend.threads == 1


@pytest.mark.parametrize(("dtype", "banks"), [("bfloat16", 1), ("bfloat16", 2), ("float32", 2)])
def test_a_range_of_a_segment_is_updated_in_all_planes(owner: Owner, dtype: str, banks: int) -> None:
    """With two banks, from the second into the first."""
    layers = [layer(0, 256, 640, dtype=dtype)]
    numbered = [replace(segment, key=7, start=1 << 20) for segment in layers[0].segments]
    layers = [replace(layers[0], segments=tuple(numbered))]
    owner.arenas = Arenas(layers, owner.backend, owner.arenas._connection, **OWN, banks=banks)
    owner.arenas.request(0)
    owner.touch_all()
    segment: SegmentPlanes = owner.arenas.segments[0][1]
    segment.update(owner.backend, 128, 640, scalars(TYPICAL["adamw"], 1), source=banks - 1, target=0)
    [update] = owner.backend.updated
    assert (update["state_dtype"], update["elements"][:2]) == ("float32", (7, (1 << 20) + 128))
    assert update["numel"] == 512 and update["weights_dtype"] == update["grads_dtype"] == dtype
    width = 2 if dtype == "bfloat16" else 4
    assert update["grads"] == segment.grads[0] + 128 * width
    assert bool(update["remainder"]) == (dtype == "bfloat16")
    assert (update["into"] is None) == (banks == 1)
    into = update["into"] and (update["into"].weights, update["into"].remainder, *update["into"].moments)
    read = update["weights"], update["remainder"], *update["moments"]
    planes = (("weights", width), ("remainder", 2), ("exp_avg", 4), ("exp_avg_sq", 4))
    for index, (plane, each) in enumerate(planes):
        if plane != "remainder" or dtype == "bfloat16":
            here, there = segment.banks[0][plane][0], segment.banks[-1][plane][0]
            assert read[index] == there + 128 * each
            if banks == 2:
                assert into[index] == here + 128 * each
                assert abs(here - there) >= (256 + 640) * each, "each bank is whole"


NAMES = ["a", "b", "c"]


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    return Progress(TraceWriter(tmp_path, OPTIMIZER), NAMES)


def drawn(run_dir: Path) -> dict[str, list[tuple[str, float, float]]]:
    """By track: what was at work, from when to when, in seconds."""
    events = json.loads(trace.merge(run_dir).read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] in "Xi":
            began_s, ended_s = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0.0)) / 1e6
            found.setdefault(tracks[event["tid"]], []).append((event["name"], began_s, ended_s))
    return found


def test_one_layer_from_its_gradient_to_its_weights(progress: Progress, tmp_path: Path) -> None:
    progress.arrived(0, 1.0)
    progress.updated(0, 5, 2.0, 3.0)
    progress.updated(0, 5, 3.25, 4.5)  # messages between two tiles take the update's time
    progress.touched(2, 4.5, 5.0)  # another layer's new memory does not
    progress.updated(0, 5, 5.0, 5.5)
    progress.sent(0, 5, 5.75)
    report = progress.report(5, 7)
    assert (report.step, report.threads, report.busy_s) == (5, 7, 3.0)
    assert report.updates == (CpuUpdate(lid=0, update_s=3.0),)
    assert drawn(tmp_path) == {
        "waiting": [("a", 1.0, 2.0)],
        "CPU update": [("a", 2.0, 4.5), ("a", 5.0, 5.5)],
        "planes": [("touch c", 4.5, 5.0)],
        "messages": [("WeightsReady a", 5.75, 5.75)],
    }


def test_a_layer_that_lets_another_pass_has_two_spans_and_waits_once(progress: Progress, tmp_path: Path) -> None:
    progress.arrived(1, 0.0)
    progress.updated(1, 0, 1.0, 2.0)
    progress.arrived(0, 1.5)
    progress.updated(0, 0, 2.0, 3.0)
    progress.sent(0, 0, 3.0)
    progress.updated(1, 0, 3.0, 4.0)
    progress.sent(1, 0, 4.0)
    updates = {update.lid: update for update in progress.report(0, 1).updates}
    assert updates[1] == CpuUpdate(lid=1, update_s=2.0)
    assert updates[0] == CpuUpdate(lid=0, update_s=1.0)
    assert list(updates) == [0, 1] and progress.report(1, 1).updates == (), "what came since the last report"
    tracks = drawn(tmp_path)
    assert tracks["CPU update"] == [("b", 1.0, 2.0), ("a", 2.0, 3.0), ("b", 3.0, 4.0)]
    assert tracks["waiting"] + tracks.get("waiting 2", []) == [("b", 0.0, 1.0), ("a", 1.5, 2.0)]


def test_what_was_for_nothing_is_work_and_no_update(progress: Progress, tmp_path: Path) -> None:
    """Of a layer that begins anew its last update counts, of one that is left alone none."""
    for lid in (0, 1):
        progress.arrived(lid, 0.0)
        progress.updated(lid, 0, 1.0 + lid, 2.0 + lid)
    progress.undone(0)
    progress.updated(0, 0, 3.0, 5.0)
    progress.undone(1)
    for lid in (0, 1):
        progress.sent(lid, 0, 5.0)
    report = progress.report(0, 1)
    assert report.busy_s == 4.0 and report.updates == (CpuUpdate(lid=0, update_s=2.0),)
    assert drawn(tmp_path)["CPU update"] == [("a", 1.0, 2.0), ("b", 2.0, 3.0), ("a", 3.0, 5.0)]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend whose work is all that takes time."""
    backend = Backend()
    monkeypatch.setattr(update_rate.time, "perf_counter", lambda: backend.now_s)
    return backend


@pytest.mark.parametrize(("passes_s", "rate_s"), [((9.0, 0.01, 0.05, 0.02), 0.02), ((200.0, 200.0), 200.0)])
def test_the_rate_is_the_median_pass_after_a_warm_up(
    clocked: Backend, monkeypatch: pytest.MonkeyPatch, passes_s: tuple[float, ...], rate_s: float
) -> None:
    """A slow backend makes one pass."""
    monkeypatch.setattr(update_rate, "BUDGET_S", 100.0)
    passes, update = iter(passes_s), clocked.update

    def timed(of: Operands) -> None:
        clocked.work_s = next(passes)
        update(of)

    monkeypatch.setattr(clocked, "update", timed)
    assert seconds_per_parameter(clocked, [layer(0, 1000)]) == pytest.approx(rate_s / 1000)
    assert len(clocked.updated) == len(passes_s)


def test_the_scratch_is_like_most_of_the_model_and_no_larger_than_a_tile(
    clocked: Backend, touched: list[tuple[int, int]]
) -> None:
    clocked.work_s = 0.001
    layers = [layer(0, 4 * TILE_NUMEL), layer(1, 4 * TILE_NUMEL, dtype="float32"), layer(2, 64, dtype="float32")]
    seconds_per_parameter(clocked, layers)
    assert {(u["numel"], u["weights_dtype"]) for u in clocked.updated} == {(TILE_NUMEL, "float32")}
    [(_, nbytes)] = touched
    assert nbytes >= 16 * TILE_NUMEL, "its memory was there before anything was timed"
    clocked.updated.clear()
    seconds_per_parameter(clocked, [layer(0, 100, 28)])
    assert {u["numel"] for u in clocked.updated} == {128}, "a small model's layers are small"
