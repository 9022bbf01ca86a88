"""The leak check of conftest.py finds what it is there to find, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PREAMBLE = """
import os, socket, subprocess, sys, tempfile
import pytest
pytestmark = pytest.mark.spawns
SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
kept = []
"""

LEAKS = {  # kind: (a test's body, what is said about it)
    "process": ("kept.append(subprocess.Popen(SLEEP))", "process * (*): *sleep(60)"),
    "orphan": (
        # Once it runs: while it is being loaded, the system shows no environment, by which it is found.
        """begin = f"subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=subprocess.PIPE)"
    spawn = f"import subprocess; {begin}.stdout.readline()"
    subprocess.run([sys.executable, "-c", spawn], check=True)""",
        "process * (*): *sleep(60)",
    ),
    "descriptor": ("kept.append(os.pipe())", "file descriptor * -> pipe:*"),
    "shared_memory": ("kept.append(os.memfd_create('planes'))", "file descriptor * -> /memfd:planes *"),
    "socket_folder": (
        """with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(tempfile.mkdtemp(), "s"))""",
        "temporary file or folder */tmp*",
    ),
}

CLEAN = """with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory() as folder:
        server.bind(os.path.join(folder, "s"))
        subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True).wait()"""

UNMARKED = """
import os, pytest
def test_unmarked():
    os.pipe()
@pytest.mark.slow
def test_slow():
    pass
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test run of its own under the project's conftest, which gives up sooner."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of other packages, which take seconds
    source = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    assert "GRACE_S = 60.0" in source
    pytester.makeconftest(source.replace("GRACE_S = 60.0", "GRACE_S = 0.1"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    pytester.makeini("[pytest]\nmarkers =\n    spawns\n    gpu\n    slow\n")
    return pytester


def test_each_kind_of_leak_is_found_in_marked_tests_and_clean_ones_pass_after_it(inner: pytest.Pytester) -> None:
    bodies = [f"def test_{kind}():\n    {body}\n" for kind, (body, _) in LEAKS.items()]
    inner.makepyfile(test_marked=PREAMBLE + "\n".join([*bodies, f"def test_clean():\n    {CLEAN}\n"]))
    inner.makepyfile(test_unmarked=UNMARKED)
    result = inner.runpytest_subprocess()
    result.assert_outcomes(passed=len(LEAKS) + 2, errors=len(LEAKS), skipped=1)
    for kind, (_, said) in LEAKS.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of test_{kind} *", "left behind:", f"  {said}"])
