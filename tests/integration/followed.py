"""Which functions of the project are entered on behalf of one layer, in the processes of a run, and in which order.

A process that imports this with FOLLOWED in its environment notes when it enters certain functions, with the time, in a
file of its own in that folder. The nearest frame that was given something of a layer decides which layer a call is for:
a layer, a parameter, a block, a gate, a message. Without one, it is for all of them.

    FOLLOWED=folder  python -m workers…   ─▶ folder/PID    through sitecustomize, which `environment` adds
    the test         with noting(): …     ─▶ folder/PID    its own threads
    read(folder, lid)                     ─▶ file and name of each function, in order
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = str(Path(__file__).resolve().parents[2]) + "/"
#: Says which layers a call is for where that is not known: all.
ALL: Final = "all"
#: Processes of a run that note what they do.
WORKERS: Final = ("workers.optimize.optimizer", "workers.coordinate.coordinator")
SITE: Final = "import sys\nif any(name in sys.orig_argv for name in {!r}):\n    import followed\n    followed.note()\n"


def environment(folder: Path, functions: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Variables with which a run's processes note in this folder when they enter one of the functions."""
    (folder / "sitecustomize.py").write_text(SITE.format(WORKERS))
    (folder / "functions").write_text("".join(f"{file}\t{name}\n" for file, name in functions))
    paths = [str(folder), str(Path(__file__).parent), os.environ["PYTHONPATH"]]
    return {"FOLLOWED": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def note() -> int:
    """Note what this thread does from now on, and threads that it will start. Returns the file's descriptor."""
    folder = Path(os.environ["FOLLOWED"])
    noted = {tuple(line.split("\t")) for line in (folder / "functions").read_text().splitlines()}
    names = {name for _, name in noted}
    file = os.open(folder / str(os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_qualname in names:
            what = frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname
            if what in noted:
                lids = " ".join(map(str, sorted(_lids(frame)))) or ALL
                os.write(file, "\t".join([str(time.monotonic_ns()), *what, lids]).encode() + b"\n")

    threading.setprofile(profile)
    sys.setprofile(profile)
    return file


@contextmanager
def noting() -> Iterator[None]:
    """This process notes what it does inside. The threads that it starts there end there."""
    file = note()
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        os.close(file)


def read(folder: Path, lid: int, *, since_ns: int = 0) -> list[tuple[str, str]]:
    """File and name of the functions that were entered for a layer, in the order of time."""
    calls = []
    for path in folder.glob("[0-9]*"):
        for line in path.read_text().splitlines():
            at_ns, file, name, lids = line.split("\t")
            if int(at_ns) >= since_ns and (lids == ALL or str(lid) in lids.split()):
                calls.append((int(at_ns), file, name))
    return [(file, name) for _, file, name in sorted(calls)]


def _lids(frame: FrameType | None) -> set[int]:
    """The layers that a call is for; none if that is not known."""
    while frame is not None and frame.f_code.co_filename.startswith(ROOT):
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if found := set(_found_in(given)):
            return found
        frame = frame.f_back
    return set()


def _found_in(values: Any) -> Iterator[int]:
    for value in values:
        value = getattr(value, "layer", value)
        if isinstance(value, list | tuple):
            yield from _found_in(value)
        elif isinstance(lid := getattr(value, "lid", None), int):
            yield lid
        elif (known := getattr(value, "_given", None)) is not None:  # a hook's
            yield from _found_in([known])
        elif (gate := getattr(value, "gate", None)) is not None:
            yield from _found_in(gate.layers)
        elif isinstance(layers := getattr(value, "layers", None), list) and hasattr(value, "entered_before"):
            yield from _found_in(layers)
        elif isinstance(places := getattr(value, "places", None), list):
            yield from (layer.lid for layer, _ in places)
