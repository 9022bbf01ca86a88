"""Rules about imports and calls that hold for every module, read off the source without running it.

Imports point one way, workers → hytrain → protocol. A failure names the file, the line and the rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hytrain", "workers", "protocol")

NOT_ABOVE = {"protocol": {"hytrain", "workers", "torch"}, "hytrain": {"workers"}, "workers": set[str]()}
ONLY_IN = {"zmq": "protocol/channel.py", "msgpack": "protocol/codec.py"}
IMPURE = {"torch", "zmq", "os", "time", "random", "threading", "logging"}
PURE = (
    "hytrain/planner/*.py",
    "hytrain/run/ownership.py",
    "hytrain/model/lifecycle.py",
    "protocol/address.py",
    "protocol/handshake.py",
    "protocol/messages.py",
    "protocol/handles.py",
    "protocol/placement.py",
    "workers/coordinator_state.py",
    "workers/fleet.py",
    "workers/planning.py",
    "workers/records.py",
    "workers/effects.py",
)
# What turns bytes into code. `multiprocessing` pickles what it sends.
UNSAFE_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def modules() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def pure_modules() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in PURE for path in ROOT.glob(pattern))


def imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """`(line, dotted name)` of each import, inside functions and type-checking blocks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = Path(module).parts[: -node.level] if node.level else ()
            base = (*above, node.module) if node.module else above
            yield from ((node.lineno, ".".join((*base, alias.name))) for alias in node.names)


def violations(source: str, module: str) -> list[str]:
    """The broken rules of one file; `module` is its path from the root."""
    tree, package = ast.parse(source), Path(module).parts[0]
    pure = any(Path(module).match(pattern) for pattern in PURE)
    found = []
    for line, name in imports(tree, module):
        top = name.partition(".")[0]
        if top in NOT_ABOVE[package]:
            found.append(f"{module}:{line}: {package} must not import {top}")
        if module != ONLY_IN.get(top, module):
            found.append(f"{module}:{line}: only {ONLY_IN[top]} may import {top}")
        if pure and top in IMPURE:
            found.append(f"{module}:{line}: a pure module must not import {top}")
        if top in UNSAFE_IMPORTS or name.startswith("torch.multiprocessing"):
            found.append(f"{module}:{line}: {name} brings pickles")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            found.append(f"{module}:{node.lineno}: {node.func.id}() runs text as code")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            found.append(f"{module}:{node.lineno}: {ast.unparse(node)} pickles; use safetensors")
    return found


@pytest.mark.parametrize("module", modules())
def test_module_keeps_the_rules(module: str) -> None:
    assert violations((ROOT / module).read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("module", modules())
def test_module_says_what_it_owns(module: str) -> None:
    """A docstring first, then postponed annotations wherever there is any code; and it is packaged."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no docstring"
    if code := tree.body[1:]:
        assert ast.unparse(code[0]) == "from __future__ import annotations"
    assert (ROOT / module).with_name("__init__.py").exists(), "its folder has no __init__.py"


@pytest.mark.parametrize("module", pure_modules())
def test_pure_module_does_not_bring_torch(module: str) -> None:
    """Neither by itself nor through what it imports: the launcher pins cores before torch is loaded."""
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    check = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=240)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protocol/codec.py", "import torch"),
        ("protocol/codec.py", "def late():\n    from hytrain import config"),
        ("hytrain/optim.py", "from workers.launcher import main"),
        ("hytrain/optim.py", "import protocol, workers"),
        ("hytrain/optim.py", "from .. import workers"),
        ("workers/trainer.py", "import zmq"),
        ("protocol/handles.py", "from msgpack import packb"),
        ("hytrain/planner/simulate.py", "from time import monotonic"),
        ("hytrain/run/ownership.py", "import os.path"),
        ("protocol/messages.py", "import random as r"),
        ("workers/optimizer.py", "from pickle import loads"),
        ("workers/optimizer.py", "import torch.multiprocessing"),
        ("workers/trainer.py", "exec(text)"),
        ("hytrain/config.py", "value = eval('1')"),
        ("hytrain/optim.py", "torch.save(state, path)"),
    ],
)
def test_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def test_what_is_allowed_passes() -> None:
    assert violations("from protocol import codec\nimport torch, os, time\nmodel.eval()", "hytrain/optim.py") == []
    assert violations("import zmq, os", "protocol/channel.py") == []
    assert violations("from hytrain.planner import decide\nimport protocol", "workers/coordinator.py") == []


NAMED_TEST = re.compile(r"`((?:tests/)?[\w/]+\.py)::(\w+)`")


def named_tests() -> list[tuple[str, str, str]]:
    """Page, file and function of each test that a page names; a file without a folder is an integration test."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for file, function in NAMED_TEST.findall(page.read_text()):
            folder = "" if file.startswith("tests/") else "tests/" if "/" in file else "tests/integration/"
            found.append((page.name, folder + file, function))
    return found


def test_tests_that_the_pages_name_exist() -> None:
    named = named_tests()
    assert {page for page, _, _ in named} >= {"architecture.md", "semantics.md"}
    lost = [each for each in named if not re.search(rf"^def {each[2]}\(", (ROOT / each[1]).read_text(), re.MULTILINE)]
    assert lost == []
