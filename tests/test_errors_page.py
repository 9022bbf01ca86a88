"""docs/errors.md explains each exception at the anchor that its traceback names, and each refusal at one of its own."""

from __future__ import annotations

import ast
import re
import shutil
import traceback
from pathlib import Path

import pytest
import torch

import hytrain
from hytrain import errors
from hytrain.model import consumed
from hytrain.planner.ladder import Infeasible
from tests.sentences import Sentences, text_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/errors.md").read_text()
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HyTrainError)]
FILES = [file for folder in ("hytrain", "workers", "protocol", "examples") for file in (ROOT / folder).rglob("*.py")]
#: Those that refuse something, and the table of `hytrain.step.life`.
REFUSALS = ("UsageError", "UnsupportedError", "StaleReadError", "NonFiniteGradients", "Refusal")


def anchor_of(error: errors.HyTrainError) -> str:
    *_, where = traceback.format_exception_only(error)
    [anchor] = re.findall(r"docs/errors\.md#([\w-]+) ", where)
    return str(anchor)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not errors.HyTrainError])
def test_a_traceback_names_the_anchor_of_its_class(kind: type[errors.HyTrainError]) -> None:
    error = kind("what is wrong")
    message = traceback.format_exception_only(error)[-2]
    assert message == f"{kind.__module__}.{kind.__name__}: what is wrong\n"
    [row] = re.findall(rf'^\| <span id="{anchor_of(error)}"></span>`(\w+)` \|', PAGE, re.MULTILINE)
    assert row == kind.__name__


def test_one_of_the_inside_names_a_public_class() -> None:
    assert Infeasible("no").__notes__ == ["docs/errors.md#hytrainerror says more."] and 'id="hytrainerror"' in PAGE


def test_each_refusal_has_an_anchor() -> None:
    """A sentence without a row fails here, and so does one that this test cannot find in the code."""
    sentences = Sentences(REFUSALS, FILES)
    given = {sentence: where for where, _, sentence in sentences.found if "already consumed" not in sentence}
    given |= {
        f"mul on a gradient that HyTrain has already consumed: {way}": key for key, way in consumed.ADVICE.items()
    }
    assert sentences.unknown == set() and len(given) > 130
    assert {where: sentence for sentence, where in given.items() if errors._explained_at(sentence) is None} == {}


def test_each_message_of_the_page_is_in_the_code() -> None:
    texts = {text_of(node) or "" for file in FILES for node in ast.walk(ast.parse(file.read_text()))}
    assert [anchor for anchor, said in errors._rows() if not any(map(said.search, texts))] == []
    anchors = re.findall(r'<span id="([\w-]+)">', PAGE)
    assert len(anchors) == len(set(anchors)) > 200


@pytest.mark.parametrize(
    ("message", "anchor"),
    [
        ("rank 1: blocks.0.weight makes sparse gradients: construct it with sparse=False", "sparse-embeddings"),
        ("betas in opt.param_groups are (1, 1): they lie in [0, 1)", "param-groups-betas"),
        ("opt.save between backward and step(): call it after opt.step()", "middle-of-a-step"),
    ],
)
def test_the_longest_message_that_fits_is_meant(message: str, anchor: str) -> None:
    assert anchor_of(errors.UsageError(message)) == anchor


def test_a_program_learns_the_anchor() -> None:
    with pytest.raises(errors.UnsupportedError) as caught:
        hytrain.AdamW(torch.nn.ReLU())
    assert anchor_of(caught.value) == "model-without-trainable-parameters"


def test_without_the_page_the_class_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where no descriptor is left to read it."""
    sentence = "embedding makes sparse gradients: construct it with sparse=False"
    monkeypatch.setattr(errors, "_PAGES", (tmp_path / "errors.md",))
    errors._rows.cache_clear()
    assert anchor_of(errors.UnsupportedError(sentence)) == "unsupportederror"
    shutil.copy(ROOT / "docs/errors.md", tmp_path)
    assert anchor_of(errors.UnsupportedError(sentence)) == "sparse-embeddings"
    errors._rows.cache_clear()
