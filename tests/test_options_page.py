"""docs/options.md has every option with its default, and none that there is not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import hytrain
from hytrain.config import ClusterConfig
from hytrain.optim import Optimizer, SharedOptions
from hytrain.recipe.config import Recipe, Section

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "options.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| (?:`(.+?)`|(required)) \|", re.MULTILINE)


def table(heading: str) -> dict[str, str]:
    """Option -> default, as a section of the page has them."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return {name: default or required for name, default, required in ROW.findall(section)}


def said(value: Any) -> str:
    return f'"{value}"' if isinstance(value, (str, Path)) else repr(value)


def of_section(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        parts = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        below = [kind for kind in parts if issubclass(kind, Section)]
        if below:
            yield from of_section(below[0], f"{prefix}{name}.")
        else:
            yield prefix + name, "required" if field.is_required() else said(field.default)


def of(kind: Callable[..., Any]) -> dict[str, str]:
    """The optional parameters of a class or a method, without what it hands on to its base class."""
    parameters = inspect.signature(kind).parameters.values()
    defaults = {known.name: known.default for known in parameters if known.default is not inspect.Parameter.empty}
    return {name: said(default) for name, default in defaults.items() if name != "param_groups"}


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Every optimizer", of(Optimizer)),
        ("opt.cotrain", {**dict.fromkeys(("build", "loss", "parts"), "required"), **of(Optimizer.cotrain)}),
        ("hytrain.AdamW", of(hytrain.AdamW)),
        ("hytrain.Adam", of(hytrain.Adam)),
        ("hytrain.SGD", of(hytrain.SGD)),
        ("hytrain.Lion", of(hytrain.Lion)),
        ("hytrain.Muon", of(hytrain.Muon)),
        ("Processes", dict(of_section(ClusterConfig))),
        ("Recipes", dict(of_section(Recipe))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_page_has_every_option_with_its_default(heading: str, expected: dict[str, str]) -> None:
    assert table(heading) == expected


def test_each_setting_of_the_processes_has_its_variable() -> None:
    for name in ClusterConfig.model_fields:
        assert re.search(rf"^\| `{name}` \|.*\| `HYTRAIN_{name.upper()}` \|", PAGE, re.MULTILINE), name


def test_each_algorithm_takes_what_every_optimizer_has() -> None:
    assert SharedOptions.__annotations__.keys() == of(Optimizer).keys()
