"""docs/will-it-fit.md: what its form says is what `doctor` answers, and its table is complete."""

from __future__ import annotations

import json
import random
import re
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from test_report import in_a_browser

from benchmarks import fits as table
from hytrain.readable import GIB
from workers.watch.doctor import PRECISIONS
from workers.watch.fits import Answer, answer, described, model_named

DOCS = Path(__file__).resolve().parent.parent / "docs"
Asked = tuple[str, int, int, str]
#: What fits exactly, what does not, what fits without HyTrain, and what does not fit at all.
KINDS: tuple[Asked, ...] = (
    ("H100", 128, 16, "7 B"),
    ("RTX 4090", 64, 8, "8 B (Llama 3)"),
    ("H100", 64, 8, "3 B"),
    ("RTX 4090", 64, 8, "70 B (Llama 3)"),
)


def doctors(asked: Asked) -> Answer:
    gpu, ram, cores, model = asked
    host = described(gpu, ram * GIB, cores, PRECISIONS.values())
    shape = next(shape for shape in table.MODELS if shape.name == model)
    return answer(shape, host, table.BATCH, table.SEQUENCE, first=True)


def written() -> dict[str, list[table.Cell]]:
    [text] = re.findall(r'"cells": \{\n(.*),\n\}\};', table.TABLE.read_text(), re.S)
    return dict(json.loads(f"{{{text}}}"))


def cell(asked: Asked) -> table.Cell:
    gpu, ram, cores, model = asked
    return written()[f"{gpu}, {model}"][table.RAMS_GIB.index(ram) * len(table.CORES) + table.CORES.index(cores)]


def test_the_table_is_of_these_machines_and_models() -> None:
    """Its head is as `benchmarks.fits` would write it, and it has a cell for each."""
    head = "\n".join(table.lines(iter([]))).splitlines()[:2]
    assert table.TABLE.read_text().splitlines()[:2] == head
    assert written().keys() == {f"{gpu}, {shape.name}" for gpu in table.GPUS for shape in table.MODELS}
    assert {len(cells) for cells in written().values()} == {len(table.RAMS_GIB) * len(table.CORES)}


def some() -> list[Asked]:
    """Each kind, and some at random, each time the same."""
    draw = random.Random(1).choice
    names = [shape.name for shape in table.MODELS]
    drawn = [(draw(table.GPUS), draw(table.RAMS_GIB), draw(table.CORES), draw(names)) for _ in range(3)]
    return [*KINDS, *drawn]


@pytest.mark.parametrize("asked", some(), ids=lambda asked: "-".join(map(str, asked)).replace(" ", ""))
def test_the_table_is_what_doctor_answers(asked: Asked) -> None:
    """If it is not, `python -m benchmarks.fits` writes it again."""
    assert cell(asked) == table.cell(doctors(asked))


@pytest.mark.parametrize("asked", KINDS, ids=lambda asked: asked[-1].replace(" ", ""))
def test_a_browser_says_it_in_doctors_words(asked: Asked, tmp_path: Path) -> None:
    """The verdict, the lines to paste, and a command that asks the same."""
    text = (DOCS / "will-it-fit.md").read_text()
    [form] = re.findall(r'<form id="fit-form">.*(?=<noscript>)', text, re.S)
    scripts = re.findall(r'<script src="(.*?)"></script>', text)
    assert re.findall(r'(?:src|href)="(.*?)"', text) == scripts == ["will-it-fit-table.js", "will-it-fit.js"]
    code = "".join(f"<script>{(DOCS / script).read_text()}</script>" for script in scripts)
    (page := tmp_path / "page.html").write_text(f'<!DOCTYPE html><link rel="icon" href="data:,">{form}{code}')
    query = urlencode(dict(zip(("gpu", "ram", "cores", "model"), asked, strict=True)))
    seen = in_a_browser(f"{page.as_uri()}?{query}", tmp_path / "profile")
    told = doctors(asked)
    shown = {name: unescape(found) for name, found in re.findall(r'id="fit-(\w+)">([^<]*)<', seen)}
    assert (shown["verdict"], shown["paste"]) == (told.verdict(), told.paste())
    words = re.findall(r'"[^"]*"|\S+', shown["command"])
    assert words[:3] == ["bin/hytrain-cluster", "doctor", "--gpu"] and model_named(words[-1]) == told.shape


def test_the_scripts_ask_no_one() -> None:
    for name in ("will-it-fit.js", "will-it-fit-table.js"):
        assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(", (DOCS / name).read_text())
