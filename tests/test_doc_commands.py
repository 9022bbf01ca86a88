"""The commands of all pages: their programs, options, recipe keys and targets exist, and what needs a GPU is marked.

A mark is a comment, at the command or above it, that says "needs a GPU" or how many. What takes seconds runs here. The
demo, recipes, scripts and studies run in tests of their own (`test_examples`, `test_hf_examples`, `test_studies`,
`integration/test_chat_recipe`), as do monitors. What needs a GPU, hours or another program is only read.
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
from integration.programs import environment, run

from hytrain.errors import ConfigError
from hytrain.recipe import config
from workers.launch import launcher
from workers.watch import bill, doctor, monitor, report

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    ROOT / "benchmarks/README.md",
    ROOT / "examples/cluster/README.md",
)
#: A command inside a sentence has no mark. Rows of tables have commands of the past.
SENTENCES = re.compile(r"^```.*?^```|^\|.*?$|<!--.*?-->", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python -m|bin/hytrain-\w+|make) [^`…]+)`")
BLOCK = re.compile(r"^```(?:sh\n(.*?)|\n(\$ .*?))^```", re.MULTILINE | re.DOTALL)
#: Files that stand for the reader's own.
OWN = ("script.py", "train.py", "RECIPE.yaml", "mine.yaml")
#: Programs of others, and lines of a shell.
OTHERS = {"torchrun", "sbatch", "docker", "apptainer", "export", "if", "exit"}
MARK = re.compile(r"#.*\bneeds? (?:a GPU|\w+ GPUs)")
MAKEFILE = (ROOT / "Makefile").read_text()
#: Commands that run here, by words of them, and their exit status.
QUICK = {"--dry-run": 0, "--list": 0, "hytrain-cluster init": 0, "doctor --gpu": 0, "train.stesp": 2}


def commands() -> Iterator[tuple[str, list[str], bool | None]]:
    """Page, words, and whether it is marked, of each; None inside a sentence."""
    for page in sorted(PAGES):
        for given in dict.fromkeys(INLINE.findall(SENTENCES.sub("", page.read_text()))):
            yield page.stem, shlex.split(given.replace("\n", " ")), None
        for whole, shown in BLOCK.findall(page.read_text()):
            lines = whole or "\n".join(line[2:] for line in shown.splitlines() if line.startswith("$ "))
            above = ""  # the comment over a command and those that follow without an empty line
            for line in lines.replace("\\\n", "").splitlines():
                above = line if line.startswith("#") else above if line else ""
                words = shlex.split(line, comments=True)
                while words and "=" in words[0]:  # a variable
                    words.pop(0)
                if words and words[0] not in OTHERS:
                    yield page.stem, words, any(map(MARK.search, (above, line)))


COMMANDS = [pytest.param(words, marked, id=f"{page}: {' '.join(words)[:60]}") for page, words, marked in commands()]
RUN = [
    pytest.param(words, status, id=" ".join(words), marks=[pytest.mark.slow] if part == "--dry-run" else [])
    for words in map(shlex.split, sorted({shlex.join(words) for _, words, _ in commands()}))
    for part, status in QUICK.items()
    if part in " ".join(words) and "hytrain-monitor" not in words[0]
]


def made_on_a_gpu(target: str) -> bool:
    """Whether a target of the Makefile runs what needs one."""
    [body] = re.findall(rf"^{target}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    return "-m gpu" in body or ("benchmarks.suite" in body and "--device cpu" not in body)


class Parsed(Exception):
    """The arguments are those of the program: with the device that it, or its recipe, trains on, if one is named."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__(device)
        self.device = device


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
        found = parse(parser, *given, **more)
        if parser.prog in ("hytrain-cluster", "hytrain-cluster RECIPE.yaml"):  # it parses twice
            return found
        if recipe := getattr(found, "recipe", None):
            raise Parsed(config.load(recipe, getattr(found, "overrides", [])).train.device)
        raise Parsed(None if getattr(found, "list", False) else getattr(found, "device", None))

    def run_recipe(path: Path, arguments: argparse.Namespace) -> int:
        raise Parsed(None if arguments.dry_run else config.load(path, arguments.set).train.device)

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


@pytest.mark.parametrize(("words", "marked"), COMMANDS)
def test_a_command_is_one_and_marked_if_it_needs_a_gpu(
    words: list[str], marked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *arguments = words
    name = Path(program).name
    if name == "make":
        targets = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
        assert arguments[0] in " ".join(targets).split() and marked in (None, made_on_a_gpu(arguments[0]))
    elif name == "hytrain-cluster":
        with pytest.raises(ConfigError if "train.stesp=5" in arguments else Parsed) as read:
            launcher._run(launcher._parse(arguments))
        assert marked in (None, getattr(read.value, "device", None) == "cuda")
    elif name == "hytrain-monitor":
        own = {"report": report.main, "trace": bill.main}.get(arguments[0] if arguments else "")
        with pytest.raises(Parsed):
            own(arguments[1:]) if own else monitor._parse(arguments)
        assert not marked
    else:
        assert name == "python"
        if arguments[0] != "-m":
            assert (ROOT / arguments[0]).is_file()
        elif len(arguments) == 2 or arguments[1] in ("pip", "mkdocs"):
            assert importlib.util.find_spec(arguments[1])
        else:
            monkeypatch.setattr(sys, "argv", arguments[1:])
            monkeypatch.delitem(sys.modules, arguments[1], raising=False)
            with pytest.raises(Parsed) as parsed:
                runpy.run_module(arguments[1], run_name="__main__")
            assert marked in (None, parsed.value.device == "cuda")


@pytest.mark.spawns
@pytest.mark.parametrize(("words", "status"), RUN)
def test_a_command_that_takes_seconds_runs(words: list[str], status: int, tmp_path: Path) -> None:
    program, *arguments = words
    script = [] if Path(program).name == "python" else [ROOT / program]
    ran = run(sys.executable, *script, *arguments, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert ran.returncode == status, ran.stdout + ran.stderr
