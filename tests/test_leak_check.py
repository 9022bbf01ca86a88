"""The leak check of conftest.py finds what it is there to find, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PREAMBLE = """
import os, socket, subprocess, sys, tempfile
import pytest
pytestmark = pytest.mark.spawns
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
kept = []
"""

LEAKS = {  # kind: (a test's body, what is said about it)
    "process": ("kept.append(subprocess.Popen(SLEEP))", "process * (*): *sleep(60)"),
    "zombie": (
        """kept.append(subprocess.Popen(["true"]))
    os.waitid(os.P_PID, kept[-1].pid, os.WEXITED | os.WNOWAIT)""",
        "process * (zombie): true",
    ),
    "orphan": (
        """spawn = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", spawn], check=True)""",
        "process * (*): *sleep(60)",
    ),
    "descriptor": ("kept.append(os.pipe())", "file descriptor * -> pipe:*"),
    "shared_memory": (
        """name = f"/dev/shm/leak-check-{os.getpid()}"
    request.getfixturevalue("remove_later").append(name)
    open(name, "w").close()""",
        "shared memory /dev/shm/leak-check-*",
    ),
    "socket_folder": (
        """with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(tempfile.mkdtemp(), "s"))""",
        "temporary file or folder */tmp*",
    ),
}

CLEAN = """with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory() as folder:
        server.bind(os.path.join(folder, "s"))
        subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True).wait()"""

REMOVE_LATER = """
@pytest.fixture(scope="session")
def remove_later():
    names = []
    yield names
    for name in names:
        os.unlink(name)
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test run of its own under the project's conftest, which gives up sooner."""
    source = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    assert "GRACE_S = 10.0" in source
    pytester.makeconftest(source.replace("GRACE_S = 10.0", "GRACE_S = 0.1") + REMOVE_LATER)
    pytester.makeini("[pytest]\nmarkers =\n    spawns\n    gpu\n    slow\n")
    return pytester


def test_each_kind_of_leak_is_found(inner: pytest.Pytester) -> None:
    bodies = (f"def test_{kind}(request):\n    {body}\n" for kind, (body, _) in LEAKS.items())
    inner.makepyfile(PREAMBLE + "\n".join(bodies))
    result = inner.runpytest_subprocess()
    result.assert_outcomes(passed=len(LEAKS), errors=len(LEAKS))
    for kind, (_, said) in LEAKS.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of test_{kind} *", "left behind:", f"  {said}"])


def test_clean_tests_pass_even_after_a_leak(inner: pytest.Pytester) -> None:
    leak, _ = LEAKS["process"]
    inner.makepyfile(PREAMBLE + f"def test_leak():\n    {leak}\ndef test_clean():\n    {CLEAN}\n")
    inner.runpytest_subprocess().assert_outcomes(passed=2, errors=1)


def test_only_marked_tests_are_checked(inner: pytest.Pytester) -> None:
    inner.makepyfile("import os\ndef test_leak():\n    os.pipe()\n")
    inner.runpytest_subprocess().assert_outcomes(passed=1)


def test_slow_tests_run_when_asked_for(inner: pytest.Pytester) -> None:
    inner.makepyfile("import pytest\n@pytest.mark.slow\ndef test_slow():\n    pass\n")
    inner.runpytest_subprocess().assert_outcomes(skipped=1)
    inner.runpytest_subprocess("-m", "slow").assert_outcomes(passed=1)
    inner.runpytest_subprocess("--run-slow").assert_outcomes(passed=1)
