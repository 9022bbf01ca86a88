"""docs/errors.md explains each exception at the anchor that its traceback names."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

from hytrain import errors
from hytrain.planner.ladder import Infeasible

PAGE = (Path(__file__).resolve().parent.parent / "docs/errors.md").read_text()
CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HyTrainError)]


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not errors.HyTrainError])
def test_a_traceback_names_the_anchor_of_its_class(kind: type[errors.HyTrainError]) -> None:
    *_, message, where = traceback.format_exception_only(kind("what is wrong"))
    assert message == f"{kind.__module__}.{kind.__name__}: what is wrong\n"
    [anchor] = re.findall(r"docs/errors\.md#(\w+) ", where)
    [row] = re.findall(rf'^\| <span id="{anchor}"></span>`(\w+)` \|', PAGE, re.MULTILINE)
    assert row == kind.__name__


def test_one_of_the_inside_names_a_public_class() -> None:
    assert Infeasible("no").__notes__ == ["docs/errors.md#hytrainerror says more."] and 'id="hytrainerror"' in PAGE
