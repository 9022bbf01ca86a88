"""Imports that take long, and packages that may be missing: then that is one sentence, not a traceback."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hytrain.errors import MissingPackage

OWN = ("hytrain", "workers", "protocol")


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Around imports that `what` needs and that an extra of the package brings.

    Raises `MissingPackage` if one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OWN:
            raise
        source, where = Path(__file__).resolve().parents[1], ""
        if not (source / "setup.cfg").is_file():  # it was installed from a folder that is not known; no index has it
            source, where = Path("."), " in HyTrain's folder"
        raise MissingPackage(
            f"{what} needs {package}, which is not installed: python -m pip install '{source}[{extra}]'{where}"
        ) from None


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of many modules: what they make stays, so it is not looked through for garbage, again and again.

    That takes a sixth of the time of importing torch and Transformers.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
