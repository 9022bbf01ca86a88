"""Runs a program of this checkout, installed or not: `hytrain-cluster` and `hytrain-monitor` call it.

The interpreter that was asked for wins if it has what HyTrain needs: an activated environment, the one that
`python bin/hytrain-cluster` names. Otherwise the .venv that `make setup` made takes over, if it is there.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
NEEDED = ("torch", "zmq", "msgpack", "psutil", "pydantic", "safetensors", "yaml")


def run(module: str) -> int:
    """The exit status of `module.main()`, or 2 if no interpreter at hand can run it."""
    problem = lacking()
    if problem and (VENV / "bin/python").exists() and Path(sys.prefix) != VENV:
        os.execv(VENV / "bin/python", [str(VENV / "bin/python"), *sys.argv])
    if problem:
        name = Path(sys.argv[0]).name
        print(f"{name}: {sys.executable} {problem}; run `make setup` in {ROOT} first", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    # The processes that it starts import the same checkout.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)
    status: int = import_module(module).main()
    return status


def lacking() -> str:
    """What keeps this interpreter from running HyTrain, found without importing it; empty if nothing does."""
    if sys.version_info < (3, 11):  # noqa: UP036, `python3` may be any
        return f"is Python {sys.version_info[0]}.{sys.version_info[1]}, and HyTrain needs 3.11 or newer"
    missing = [name for name in NEEDED if find_spec(name) is None]
    return f"has no {', '.join(missing)}" if missing else ""
