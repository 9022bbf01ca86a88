"""Rules about imports and calls that hold for every module, read off the source without running it.

Imports point one way, workers → hytrain → protocol. A failure names the file, the line and the rule.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import faults
import lines
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hytrain", "workers", "protocol")

NOT_ABOVE = {"protocol": {"hytrain", "workers", "torch"}, "hytrain": {"workers"}, "workers": set[str]()}
ONLY_IN = {"zmq": ("protocol/channel.py",), "msgpack": ("protocol/codec.py",)}
#: The rooms of `workers/`, each with the others that it may import. What lies beside the rooms is below them.
ROOMS: dict[str, set[str]] = {
    "launch": set(),
    "coordinate": {"planning"},
    "planning": set(),
    "optimize": set(),
    "train": set(),
    "watch": {"planning", "optimize"},
}
IMPURE = {"torch", "zmq", "os", "time", "random", "threading", "logging"}
PURE = (
    "hytrain/planner/*.py",
    "hytrain/run/ownership.py",
    "hytrain/model/block_life.py",
    "hytrain/model/lifecycle.py",
    "hytrain/model/rounds.py",
    "hytrain/step/life.py",
    "hytrain/step/numbers.py",
    "protocol/address.py",
    "protocol/messages.py",
    "protocol/handles.py",
    "protocol/metrics.py",
    "protocol/placement.py",
    "protocol/sizes.py",
    "protocol/rules.py",
    "workers/coordinate/coordinator_state.py",
    "workers/coordinate/fleet.py",
    "workers/coordinate/members.py",
    "workers/planning/commands.py",
    "workers/planning/measured.py",
    "workers/planning/mode.py",
    "workers/planning/planning.py",
    "workers/planning/room.py",
    "workers/planning/tried.py",
    "workers/coordinate/records.py",
    "workers/effects.py",
    "workers/watch/alerts.py",
    "workers/watch/troubles.py",
)
# What turns bytes into code. `multiprocessing` pickles what it sends.
UNSAFE_IMPORTS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
#: What torch keeps below a tensor. A tensor class whose data lies elsewhere has to be understood in one file alone.
DOOR = "hytrain/tensors.py"
#: A size as users are shown it; rates of memory are in GB/s.
IN_GB = re.compile(r"(?:^| )GB\b(?!/s)")
BELOW_TENSORS = {"data_ptr", "_version", "as_strided", "increment_version"}


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


def breaches(source: str, module: str) -> list[str]:
    """The walls of `lines.WALLS` that one file's imports go through; `module` is its path from the root."""
    own, found = lines.wall(module), []
    for line, name in imports(ast.parse(source), module):
        other = lines.wall(name.replace(".", "/"))
        if other not in (own, lines.CORE, *lines.MAY_IMPORT[own]):
            found.append(f"{module}:{line}: {own} must not import {name}, which belongs to {other}")
    return found


def violations(source: str, module: str) -> list[str]:
    """The broken rules of one file; `module` is its path from the root."""
    tree, package = ast.parse(source), Path(module).parts[0]
    pure = any(Path(module).match(pattern) for pattern in PURE)
    found = breaches(source, module)
    for line, name in imports(tree, module):
        top = name.partition(".")[0]
        if top in NOT_ABOVE[package]:
            found.append(f"{module}:{line}: {package} must not import {top}")
        room, own = _room(name.split(".")), _room(Path(module).parts)
        if package == "workers" and room not in ("", own, *ROOMS.get(own, ())):
            found.append(f"{module}:{line}: {own or package} must not import {room}")
        if module not in ONLY_IN.get(top, (module,)):
            found.append(f"{module}:{line}: only {' and '.join(ONLY_IN[top])} may import {top}")
        if pure and top in IMPURE:
            found.append(f"{module}:{line}: a pure module must not import {top}")
        if top in UNSAFE_IMPORTS or name.startswith("torch.multiprocessing"):
            found.append(f"{module}:{line}: {name} brings pickles")
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # that nobody is shown
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in texts and IN_GB.search(str(node.value)):
            found.append(f"{module}:{node.lineno}: sizes are told in GiB, by hytrain.readable.gib")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            found.append(f"{module}:{node.lineno}: {node.func.id}() runs text as code")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            found.append(f"{module}:{node.lineno}: {ast.unparse(node)} pickles; use safetensors")
        if isinstance(node, ast.Attribute) and node.attr in BELOW_TENSORS and module != DOOR:
            found.append(f"{module}:{node.lineno}: only {DOOR} may use {node.attr}")
    return found


def _room(parts: Sequence[str]) -> str:
    """The room of `workers/` that a module's path or name leads into; "" for another place."""
    return parts[1] if parts[0] == "workers" and len(parts) > 1 and parts[1] in ROOMS else ""


def test_every_folder_of_workers_is_a_room() -> None:
    assert {path.parent.name for path in (ROOT / "workers").glob("*/__init__.py")} == ROOMS.keys()


def test_modules_keep_the_rules() -> None:
    assert [each for module in modules() for each in violations((ROOT / module).read_text(), module)] == []


def test_studies_are_imported_by_nobody_else() -> None:
    """What is beside them may import all the rest."""
    for path in (path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")):
        module, others = str(path.relative_to(ROOT)), {"studies"} - {lines.wall(str(path.relative_to(ROOT)))}
        named = [name for _, name in imports(ast.parse(path.read_text()), module)]
        assert others.isdisjoint(lines.wall(name.replace(".", "/")) for name in named), module


def test_the_walls_are_around_all_that_is_counted() -> None:
    """A place that was moved is missed, and so is a wall with nothing behind it."""
    assert [place for places in lines.WALLS.values() for place in places if not [*ROOT.glob(f"{place}*")]] == []
    counted = lines.lines()
    assert counted.keys() == lines.MAY_IMPORT.keys() and min(counted.values()) > 0
    assert {path for path in modules() if not lines.wall(path)} == set()
    assert set(modules()) < set(lines.sources())


def test_imports_have_no_circle() -> None:
    """Drawn from the source, the imports of all packages and of the benchmarks can be put in an order."""
    paths = [*modules(), *(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").glob("*.py"))]
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        found = [what for _, what in imports(ast.parse((ROOT / path).read_text()), path)]
        # What is imported from a module is a module of its own, or a name in it.
        imported[name] = {what if what in names else what.rpartition(".")[0] for what in found} & names.keys()
    assert len(imported) > 100
    graphlib.TopologicalSorter(imported).prepare()


@pytest.mark.parametrize("module", modules())
def test_module_says_what_it_owns(module: str) -> None:
    """A docstring first, then postponed annotations wherever there is any code; and it is packaged."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no docstring"
    if code := tree.body[1:]:
        assert ast.unparse(code[0]) == "from __future__ import annotations"
    assert (ROOT / module).with_name("__init__.py").exists(), "its folder has no __init__.py"


#: Lines that a reader can keep in mind. A table may have more, and what refers to one another in both directions.
MOST_LINES: dict[type[ast.AST], int] = {ast.ClassDef: 350, ast.FunctionDef: 70, ast.AsyncFunctionDef: 70}
MOST_LINES_OF_MODULES = 500
MAY_BE_LONG = {"protocol/messages.py", "hytrain/recipe/config.py", "hytrain/model/trained.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_too_long(package: str) -> None:
    found = []
    for module in [each for each in modules() if each.startswith(f"{package}/")]:
        text = (ROOT / module).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES[type(node)]:
                    found.append(f"{module}:{node.lineno}: {node.name} has {lines} lines")
        if text.count("\n") > MOST_LINES_OF_MODULES and module not in MAY_BE_LONG:
            found.append(f"{module} has {text.count(chr(10))} lines")
    assert found == []


#: A record with more states in truth values than these wants a table of states.
MOST_FLAGS = 4


@pytest.mark.parametrize("package", PACKAGES)
def test_no_record_is_a_heap_of_flags(package: str) -> None:
    """Of fields that others may write: options and messages are frozen."""
    found = []
    for module in [each for each in modules() if each.startswith(f"{package}/")]:
        for record in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
            if not isinstance(record, ast.ClassDef) or any(
                "frozen=True" in ast.unparse(d) for d in record.decorator_list
            ):
                continue
            fields = [node for node in record.body if isinstance(node, ast.AnnAssign)]
            flags = [node for node in fields if ast.unparse(node.annotation) in ("bool", "bool | None")]
            if len(flags) > MOST_FLAGS:
                found.append(f"{module}:{record.lineno}: {record.name} has {len(flags)} flags")
    assert found == []


BRINGS_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} brings torch")
"""


def test_no_pure_module_brings_torch() -> None:
    """Neither by itself nor through what it imports: the launcher pins cores before torch is loaded."""
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in pure_modules()]
    subprocess.run([sys.executable, "-c", BRINGS_TORCH, *names], cwd=ROOT, check=True, timeout=240)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protocol/codec.py", "import torch"),
        ("protocol/codec.py", "def late():\n    from hytrain import config"),
        ("hytrain/optim.py", "from workers.launch.supervisor import Supervisor"),
        ("hytrain/optim.py", "import protocol, workers"),
        ("hytrain/optim.py", "from .. import workers"),
        ("workers/train/trainer.py", "import zmq"),
        ("protocol/handles.py", "from msgpack import packb"),
        ("hytrain/planner/simulate.py", "from time import monotonic"),
        ("hytrain/run/ownership.py", "import os.path"),
        ("protocol/messages.py", "import random as r"),
        ("workers/launch/launcher.py", "from workers.coordinate import fleet"),
        ("workers/coordinate/coordinator.py", "def late():\n    import workers.optimize.arenas"),
        ("workers/run_folder.py", "from workers.launch.output import say"),
        ("workers/planning/planning.py", "from workers.coordinate.records import Records"),
        ("workers/optimize/optimizer.py", "from pickle import loads"),
        ("workers/optimize/optimizer.py", "import torch.multiprocessing"),
        ("workers/train/trainer.py", "exec(text)"),
        ("hytrain/config.py", "value = eval('1')"),
        ("hytrain/optim.py", "torch.save(state, path)"),
        ("hytrain/state/dicts.py", "place = tensor.data_ptr()"),
        ("hytrain/session.py", "from hytrain.recipe import config"),
        ("hytrain/recipe/loop.py", "def late():\n    import examples.studies.cotraining.shares"),
        ("workers/watch/monitor.py", "from hytrain.recipe.config import load"),
        ("hytrain/build.py", "told = f'{nbytes / 1e9:.2f} GB'"),
    ],
)
def test_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def test_what_is_allowed_passes() -> None:
    assert violations("from protocol import codec\nimport torch, os, time\nmodel.eval()", "hytrain/optim.py") == []
    assert violations("import zmq, os", "protocol/channel.py") == []
    assert violations("'a model of 80 GB'\ntold = f'{rate:.0f} GB/s'", "hytrain/build.py") == []
    assert violations("from hytrain.planner import decide\nimport protocol", "workers/coordinate/coordinator.py") == []
    assert (
        violations("from workers import affinity\nfrom workers.planning import room", "workers/watch/doctor.py") == []
    )
    assert violations("from hytrain.recipe import config", "workers/launch/launcher.py") == []
    assert breaches("from hytrain.recipe import loop\nimport workers.watch.web", "examples/studies/digits.py") == []


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


def test_planted_faults_still_apply() -> None:
    """`python -m tests.faults` can plant each one, and the tests that are to notice it exist."""
    known = faults.read()
    assert len({fault.name for fault in known}) == len(known) >= 60
    assert [(fault.name, fault.places(ROOT)) for fault in known if fault.places(ROOT) != 1] == []
    for fault in known:
        if fault.file.endswith(".py"):  # or any test would notice it
            ast.parse((ROOT / fault.file).read_text().replace(fault.old, fault.new), fault.name)
        for file, _, function in (arguments.split()[0].partition("::") for arguments in fault.tests):
            text = (ROOT / file).read_text()
            assert not function or f"def {function.partition('[')[0]}(" in text, f"{fault.name}: {file}::{function}"


def test_a_fault_is_caught_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of other packages, which take seconds
    (tmp_path / "doubling.py").write_text("def double(x):\n    return 2 * x\n")
    test = "from doubling import double\ndef test_zero():\n    assert double(0) == 0\n"
    (tmp_path / "test_code.py").write_text(test + "def test_one():\n    assert double(1) == 2\n")
    made = functools.partial(faults.Fault, name="x", file="doubling.py", old="2 * x", new="x * x")
    zero, one = ("test_code.py::test_zero",), ("test_code.py -k one",)
    assert faults.examine(made(tests=one), tmp_path) == ("test_code.py::test_one", "caught by test_code.py::test_one")
    assert faults.examine(made(tests=zero), tmp_path) == (None, "NOT CAUGHT by test_code.py::test_zero")
    assert faults.examine(made(tests=one, old="3 * x"), tmp_path)[1].startswith("DOES NOT APPLY")
    assert (tmp_path / "doubling.py").read_text() == "def double(x):\n    return 2 * x\n"


def test_the_readme_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_nothing_is_installed_from_an_index() -> None:
    """HyTrain is on none: pages and messages name the folder."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("hytrain/**/*.py"), *ROOT.glob("workers/**/*.py")]
    assert [str(page) for page in pages if re.search(r"pip install\s+'?hytrain", page.read_text())] == []
