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
        package = (error.name or "").partition(".")[0]
        if not package or package in OWN:
            raise
        raise MissingPackage(
            f"{what} needs {package}, which is not installed: python -m pip install '{install}'"
        ) from None
