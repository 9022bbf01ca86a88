"""docs/command-line.md has every option of every command, as its parser has it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.launch import launcher
from workers.watch import bill, doctor, monitor, report

PAGE = (Path(__file__).resolve().parent.parent / "docs/command-line.md").read_text()
COMMANDS: dict[str, Callable[[], Any]] = {
    "hytrain-cluster": lambda: launcher._parse(["x"]),
    "hytrain-cluster init": lambda: launcher._init([]),
    "hytrain-cluster doctor": lambda: doctor.main([]),
    "hytrain-monitor": lambda: monitor._parse([]),
    "hytrain-monitor report": lambda: report.main(["x"]),
    "hytrain-monitor trace": lambda: bill.main(["x"]),
}


class Parsing(Exception):
    """In the place of parsing: the parser that was made."""


def rows(parser: argparse.ArgumentParser) -> str:
    """A table's rows for all arguments that `--help` shows."""
    found, formatter = [], parser._get_formatter()
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or action.dest == "help":
            continue
        shown = str(action.metavar or action.dest)
        name = max(action.option_strings, key=len, default=shown).replace("_", "-")
        value = str(action.metavar or action.dest.upper()) if action.option_strings and action.nargs != 0 else ""
        value = f"[{value}]" if action.nargs == "?" and value else value
        meaning = formatter._expand_help(action).replace(str(Path.home()), "~").replace("|", "\\|")
        found.append(f"| `{f'{name} {value}'.strip()}` | {meaning} |")
    return "\n".join(found)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_every_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Parsing(parser)

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", made)
    with pytest.raises(Parsing) as caught:
        COMMANDS[command]()
    section = PAGE.split(f"\n## {command}\n")[1].split("\n## ")[0]
    assert section.split("| --- | --- |\n")[1].strip() == rows(caught.value.args[0])
