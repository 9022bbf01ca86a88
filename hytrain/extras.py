"""Packages that HyTrain needs only for some of its parts: a missing one is one sentence, not a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hytrain.errors import MissingPackage

OWN = ("hytrain", "workers", "protocol")


@contextmanager
def needed(what: str, install: str) -> Iterator[None]:
    """Around imports that `what` needs and that `pip install` brings with `install`.

    Raises `MissingPackage` if one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OWN:
            raise
        raise MissingPackage(
            f"{what} needs {error.name}, which is not installed: python -m pip install '{install}'"
        ) from None
