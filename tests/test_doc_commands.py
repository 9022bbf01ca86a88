"""The commands of all pages: their programs, options, recipe keys and targets exist.

The demo, recipes, scripts and studies run in tests of their own (`test_examples`, `test_hf_examples`, `test_studies`,
`integration/test_chat_recipe`). What needs a GPU, hours or another program is only read here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hytrain.errors import ConfigError
from hytrain.recipe import config
from workers.launch import launcher
from workers.watch import doctor, monitor, report, timeline

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    ROOT / "benchmarks/README.md",
    ROOT / "examples/cluster/README.md",
)
BLOCK = re.compile(r"^```(?:sh\n(.*?)|\n(\$ .*?))^```", re.MULTILINE | re.DOTALL)
#: Files that stand for the reader's own.
OWN = ("script.py", "train.py", "RECIPE.yaml", "mine.yaml")
#: Programs of others, and lines of a shell.
OTHERS = {"torchrun", "sbatch", "docker", "apptainer", "export", "if", "exit"}


def commands() -> Iterator[Any]:
    for page in sorted(PAGES):
        for whole, shown in BLOCK.findall(page.read_text()):
            lines = whole or "\n".join(line[2:] for line in shown.splitlines() if line.startswith("$ "))
            for line in lines.replace("\\\n", "").splitlines():
                words = shlex.split(line, comments=True)
                while words and "=" in words[0]:  # a variable
                    words.pop(0)
                if words and words[0] not in OTHERS:
                    yield pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")


class Parsed(Exception):
    """The arguments are those of the program."""


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
        found = parse(parser, *given, **more)
        if parser.prog in ("hytrain-cluster", "hytrain-cluster RECIPE.yaml"):  # it parses twice
            return found
        raise Parsed

    def run_recipe(path: Path, arguments: argparse.Namespace) -> int:
        config.load(path, arguments.set)
        raise Parsed

    def run_program(command: list[str], name: str, arguments: argparse.Namespace) -> int:
        raise Parsed

    def executed(path: str, command: list[str], environment: Any) -> None:
        assert doctor.__name__ in command
        doctor.main(command[command.index(doctor.__name__) + 1 :])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setenv("HYTRAIN_CHECK", "0")  # which the command "check" would set for all tests after this one
    monkeypatch.setattr(launcher, "_run_recipe", run_recipe)
    monkeypatch.setattr(launcher, "_run_program", run_program)
    monkeypatch.setattr(os, "execve", executed)
    for name in OWN:
        example = "demo.yaml" if name.endswith(".yaml") else "plain_script.py"
        shutil.copy(ROOT / "examples" / example, tmp_path / name)
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", [*commands()])
def test_a_command_is_one(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = words
    name = Path(program).name
    if name == "make":
        targets = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in " ".join(targets).split()
    elif name == "hytrain-cluster":
        with pytest.raises(ConfigError if "train.stesp=5" in arguments else Parsed):
            launcher._run(launcher._parse(arguments))
    elif name == "hytrain-monitor":
        own = {"report": report.main, "trace": timeline.main}.get(arguments[0] if arguments else "")
        with pytest.raises(Parsed):
            own(arguments[1:]) if own else monitor._parse(arguments)
    else:
        assert name == "python"
        if arguments[0] != "-m":
            assert (ROOT / arguments[0]).is_file()
        elif len(arguments) == 2 or arguments[1] in ("pip", "mkdocs"):
            assert importlib.util.find_spec(arguments[1])
        else:
            monkeypatch.setattr(sys, "argv", arguments[1:])
            monkeypatch.delitem(sys.modules, arguments[1], raising=False)
            with pytest.raises(Parsed):
                runpy.run_module(arguments[1], run_name="__main__")
