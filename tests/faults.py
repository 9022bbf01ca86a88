"""Plants one fault at a time in a copy of the checkout, and says whether the tests that should notice it do.

    python -m tests.faults [NAME…] [--list] [--jobs N]

`faults.toml` is the list: for each fault a unique text in one file, what replaces it, and the tests that must fail. A
fault counts as caught if one of them fails, and that one passes without the fault. Exit status 1 unless all are caught.

    tracked files ─copy─▶ temporary folder ─plant─▶ pytest -x ─▶ caught by … / NOT CAUGHT / DOES NOT APPLY
                                              all tests that failed ─▶ pytest, without any fault
"""

from __future__ import annotations

import argparse
import compileall
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`old`, which `file` has exactly once, becomes `new`; each of `tests` is pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def places(self, root: Path) -> int:
        """How often `old` stands in the file."""
        path = root / self.file
        return path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")


def read(path: Path = LIST) -> list[Fault]:
    """The faults of a list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def examine(fault: Fault, copy: Path) -> tuple[str | None, str]:
    """What pytest calls the test that fails with the fault planted in this copy, "" if a signal ended pytest, None if
    the fault is not caught; and what there is to say."""
    if (places := fault.places(copy)) != 1:
        return None, f"DOES NOT APPLY: {fault.file} has the old text {places} times"
    with fault.planted(copy):
        for arguments in fault.tests:
            status, failed, said = run_tests(["-x", *shlex.split(arguments)], copy)
            if status < 0:
                return "", f"caught by {arguments}: signal {-status}"
            if status > 1:
                return None, f"NOT CAUGHT: pytest {arguments} ended with status {status}\n{said}"
            if failed:
                return failed[0], f"caught by {failed[0]}"
    return None, f"NOT CAUGHT by {', '.join(fault.tests)}"


def run_tests(arguments: Sequence[str], copy: Path) -> tuple[int, list[str], str]:
    """Run pytest in a copy: its exit status, the tests that failed, the end of what it said."""
    changed = {"PYTHONPATH": str(copy), "HYTRAIN_CACHE": str(copy.parent / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *arguments]
    done = subprocess.run(command, cwd=copy, env={**os.environ, **changed}, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed, (done.stdout + done.stderr)[-2000:]


@contextmanager
def copies(count: int) -> Iterator[list[Path]]:
    """So many copies of the checkout's tracked files, as they are now, with bytecode that is known by its source."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        first, *others = (Path(folder, str(number)) for number in range(count))
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # not deleted since
                (first / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, first / name)
        # Known by its source's length and second, as usual, it could be that of the code without the fault.
        compileall.compile_dir(first, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        for other in others:
            shutil.copytree(first, other)
        yield [first, *others]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Do the tests notice these faults?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the faults; all without any")
    parser.add_argument("--list", action="store_true", help="print their names, and the files that they are in")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many to examine at a time")
    asked = parser.parse_args()
    faults = read()
    if unknown := set(asked.names) - {fault.name for fault in faults}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    wanted = [fault for fault in faults if not asked.names or fault.name in asked.names]
    if asked.list:
        print("\n".join(f"{fault.name:48}  {fault.file}" for fault in wanted))
        return 0

    with copies(asked.jobs) as made, ThreadPoolExecutor(asked.jobs) as pool:
        free = queue.SimpleQueue[Path]()
        for copy in made:
            free.put(copy)

        def one(fault: Fault) -> str | None:
            copy = free.get()
            try:
                failed, said = examine(fault, copy)
            finally:
                free.put(copy)
            print(f"{fault.name}: {said}", flush=True)
            return failed

        found = list(pool.map(one, wanted))
        status, unsound = 0, list[str]()
        if failed := sorted(set(filter(None, found))):
            status, unsound, said = run_tests(["-n", str(asked.jobs), *failed], made[0])
    if status > 1:
        print(f"NOT CAUGHT: without a fault, pytest ended with status {status}\n{said}")
    for test in unsound:
        print(f"NOT CAUGHT: {test} fails without a fault, too")
    caught = 0 if status > 1 else sum(failed is not None and failed not in unsound for failed in found)
    print(f"{caught} of {len(wanted)} faults are caught")
    return 0 if caught == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
