"""Arenas: one memory in two mappings, handed over by descriptor, with nothing left behind on any refusal."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hytrain.memory import arena as arena_module
from hytrain.memory.arena import (
    HUGE_PAGE_BYTES,
    Arena,
    Mapping,
    allow_descriptors,
    receive_arena,
    refuse_arena,
    send_arena,
)
from protocol.address import Address
from protocol.codec import WireError, encode
from protocol.handles import ArenaLayout, layout
from protocol.messages import Goodbye, Layer, Message, PlanesReady, PlanesRefused, Segment

TOKEN = "token"
SENDER = Address("optimizer", 0)


def layout_of(lid: int = 4, numel: int = 1000) -> ArenaLayout:
    segments = (
        Segment(name="a", numel=numel, dtype="bfloat16", grads_dtype="bfloat16", group=0),
        Segment(name="b", numel=7, dtype="float32", grads_dtype="float32", group=0),
    )
    return layout(Layer(lid=lid, position=0, name="layer", segments=segments))


LAYOUT = layout_of()


def open_descriptors() -> set[str]:
    """`number -> target` of each descriptor of this process, but for the one that lists them."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {f"{path} -> {os.readlink(path)}" for path in paths if os.path.lexists(path)}


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() == before


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.settimeout(20)
    with here, there:
        yield here, there


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(LAYOUT)) as arena:
        yield arena


def write(arena: Arena, plane: str, segment: int, data: bytes) -> None:
    handle = LAYOUT.handles[plane][segment]
    assert handle is not None
    os.pwrite(arena.descriptor, data, handle.offset)


def read(buffer: memoryview, plane: str, segment: int) -> bytes:
    handle = LAYOUT.handles[plane][segment]
    assert handle is not None
    return bytes(buffer[handle.offset : handle.offset + handle.nbytes])


def test_more_layers_may_have_more_descriptors() -> None:
    def soft_limit(layers: int) -> int:
        allow_descriptors(layers)
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        assert soft_limit(10) == 600, "as it was, where it suffices"
        assert soft_limit(200) > 600, "two for each, and some"
        assert soft_limit(10) > 600, "never less again"
        assert hard == resource.RLIM_INFINITY or soft_limit(10**9) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_both_sides_see_one_memory(arena: Arena, connection: tuple[socket.socket, socket.socket]) -> None:
    here, there = connection
    assert os.pread(arena.descriptor, LAYOUT.nbytes + 1, 0) == bytes(LAYOUT.nbytes), "zeros at first"
    send_arena(here, arena, token=TOKEN, sender=SENDER)
    file = receive_arena(there, {3: layout_of(3), 4: LAYOUT}, token=TOKEN)
    assert file.layout == LAYOUT and file.descriptor != arena.descriptor
    assert not os.get_inheritable(file.descriptor)
    shared, everything = (Mapping(file.descriptor, nbytes) for nbytes in (LAYOUT.shared_nbytes, LAYOUT.nbytes))
    file.close()  # mappings live on without it
    write(arena, "weights", 1, b"w" * 28)
    write(arena, "exp_avg_sq", 0, b"v" * 4000)
    assert read(shared.buffer, "weights", 1) == b"w" * 28 == read(everything.buffer, "weights", 1)
    assert read(everything.buffer, "exp_avg_sq", 0) == b"v" * 4000
    handle = LAYOUT.handles["grads"][0]
    assert handle is not None
    shared.buffer[handle.offset : handle.offset + 4] = b"grad"
    assert os.pread(arena.descriptor, 4, handle.offset) == b"grad"


def test_a_mapping_begins_where_a_huge_page_can_and_ends_with_its_last_view(arena: Arena) -> None:
    mappings = [Mapping(arena.descriptor, LAYOUT.nbytes) for _ in range(4)]
    assert all(mapping.address % HUGE_PAGE_BYTES == 0 for mapping in mappings)
    places = [f"{mapping.address:x}-" for mapping in mappings]
    view = mappings[0].buffer[4000:]
    assert all(place in Path("/proc/self/maps").read_text() for place in places)
    del mappings
    gc.collect()
    view[0] = 7
    assert os.pread(arena.descriptor, 1, 4000) == b"\7"
    assert [place in Path("/proc/self/maps").read_text() for place in places] == [True, False, False, False]


def test_what_cannot_be_mapped(arena: Arena, tmp_path: Path) -> None:
    before = mapped_bytes()
    with pytest.raises(OSError, match="its file is shorter"):
        Mapping(arena.descriptor, LAYOUT.nbytes + mmap.PAGESIZE)
    (tmp_path / "file").write_bytes(bytes(LAYOUT.nbytes))
    with (tmp_path / "file").open("rb") as file:
        for _ in range(20):
            with pytest.raises(OSError, match="cannot be mapped"):
                Mapping(file.fileno(), LAYOUT.nbytes)  # only to be read
    for nbytes in (0, LAYOUT.nbytes - 1, LAYOUT.nbytes + 1):  # one that shrank would end its users with SIGBUS
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, nbytes)
    gc.collect()
    assert mapped_bytes() < before + 10 * HUGE_PAGE_BYTES, "nothing stays mapped"


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def test_what_is_reserved_around_a_mapping_is_not_charged_as_memory(arena: Arena) -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this kernel charges all private memory")
    mapping = Mapping(arena.descriptor, LAYOUT.nbytes)
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    ends = f"-{mapping.address + -(-LAYOUT.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE:x} "
    starts = ends.strip(" -") + "-"
    [after] = [flags for area, flags in zip(areas, areas[1:], strict=False) if f"\n{starts}" in area]
    assert "nr" in after.splitlines()[0].split()


def test_an_arena_that_cannot_be_mapped_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(descriptor: int, nbytes: int) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(arena_module, "Mapping", no_memory)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        _ = Arena(LAYOUT).mapping


# ---------------------------------------------------------------- refusals


READY = PlanesReady(lid=4)


@pytest.mark.parametrize(
    ("message", "token", "error", "reason"),
    [
        (READY, "another", WireError, "wrong run token"),
        (b"junk", TOKEN, WireError, "not msgpack|not an array"),
        (Goodbye(), TOKEN, ValueError, "expected one arena's descriptor"),
        (replace(READY, lid=5), TOKEN, ValueError, "expected one arena's descriptor"),
        (replace(READY, lid=3), TOKEN, ValueError, "arena of layer 3"),
        (b"\x00" * 8000, TOKEN, WireError, "extra data"),
        (b"", TOKEN, EOFError, "the optimizer closed the socket"),
    ],
    ids=["token", "junk", "another message", "unknown layer", "another layer", "too long", "empty"],
)
def test_what_does_not_fit_the_table_is_refused_and_its_descriptor_closed(
    arena: Arena,
    connection: tuple[socket.socket, socket.socket],
    message: Message | bytes,
    token: str,
    error: type[Exception],
    reason: str,
) -> None:
    here, there = connection
    before = open_descriptors()
    frame = message if isinstance(message, bytes) else encode(message, token=token, sender=SENDER, seq=0)
    socket.send_fds(here, [frame], [arena.descriptor])
    with pytest.raises(error, match=reason):
        receive_arena(there, {3: layout_of(3, numel=5000), 4: LAYOUT}, token=TOKEN)
    assert open_descriptors() == before
    send_arena(here, arena, token=TOKEN, sender=SENDER)  # the connection goes on
    receive_arena(there, {4: LAYOUT}, token=TOKEN).close()


def test_no_memory_there_and_no_descriptor_here_are_refusals(
    arena: Arena, connection: tuple[socket.socket, socket.socket]
) -> None:
    here, there = connection
    refuse_arena(here, 4, "Cannot allocate memory", token=TOKEN, sender=SENDER)
    assert receive_arena(there, {4: LAYOUT}, token=TOKEN) == PlanesRefused(lid=4, reason="Cannot allocate memory")
    send_arena(here, arena, token=TOKEN, sender=SENDER)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        refused = receive_arena(there, {4: LAYOUT}, token=TOKEN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(refused, PlanesRefused) and "no free descriptor" in refused.reason


def test_descriptors_of_something_else_and_too_many_are_refused(
    arena: Arena, connection: tuple[socket.socket, socket.socket]
) -> None:
    here, there = connection
    before = open_descriptors()
    with open(os.memfd_create("short"), "wb") as short, socket.socket() as other:
        short.truncate(LAYOUT.nbytes - 4096)
        for descriptors, error, reason in (
            ([], ValueError, "and 0 descriptors"),
            ([short.fileno()], ValueError, "in the layer table"),
            ([other.fileno()], ValueError, "in the layer table"),
        ):
            socket.send_fds(here, [encode(READY, token=TOKEN, sender=SENDER, seq=0)], descriptors)
            with pytest.raises(error, match=reason):
                receive_arena(there, {4: LAYOUT}, token=TOKEN)
    socket.send_fds(here, [encode(READY, token=TOKEN, sender=SENDER, seq=0)], [arena.descriptor] * 3)
    receive_arena(there, {4: LAYOUT}, token=TOKEN).close()
    assert open_descriptors() == before
    there.settimeout(0.01)
    with pytest.raises(TimeoutError):
        receive_arena(there, {4: LAYOUT}, token=TOKEN)


def test_a_limit_on_files_that_memory_is_under_is_named() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"1,000 bytes into a file \(ulimit -f\): raise that limit"):
            Arena(layout_of())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
