"""Folders that several processes write and read: locks of them, and files in them that may be anything.

The locks are those of the operating system. On a file system without them, as NFS may be, everybody has his.
`manifest`, `folders` and `recipe` call this; it needs no torch.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path


@contextmanager
def locked(folder: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Lock a folder against all others, or with `shared` against those who do not share it, here and in all processes.

    Gives whether it is locked: without `wait`, it is not if others have locked it. A file system without locks lets all
    have theirs.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have the descriptor, too
        os.close(descriptor)


def _flock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def read(path: Path) -> bytes:
    """What is in a file. Raises OSError if it is none: a pipe, for example, from which reading would wait for ever."""
    with opened(path) as file:
        return file.read()


def opened(path: Path) -> BufferedReader:
    """A file that is read. Raises OSError if it is none."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a file")


def said(error: Exception) -> str:
    """What is wrong, and what helps, where that is known. Not only OSErrors come from the system: see the text, too."""
    text, number = str(getattr(error, "strerror", None) or error), getattr(error, "errno", None)
    if number == errno.EFBIG or os.strerror(errno.EFBIG) in text:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if most != resource.RLIM_INFINITY:
            return f"{text}: this process may write {most:,} bytes into a file (ulimit -f): raise that limit"
    if number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in text:
        return f"{text}: make room, or save elsewhere"
    return text
