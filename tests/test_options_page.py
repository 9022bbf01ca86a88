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
from hytrain.options import TABLE, OneOf, SharedOptions
from hytrain.recipe import config
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


def test_the_page_says_of_each_option_what_the_table_says() -> None:
    section = PAGE.split("\n## Every optimizer\n")[1].split("\n## ")[0]
    rows = [f"| `{name}` | `{said(row['default'])}` | {row['meaning']} |" for name, row in TABLE.items()]
    assert section.split("| --- | --- | --- |\n")[1].splitlines() == rows


def test_each_option_has_a_type_for_editors() -> None:
    assert SharedOptions.__annotations__.keys() == TABLE.keys()


def words(kind: Any) -> Iterator[str]:
    """The texts in a type."""
    for part in get_args(kind):
        yield from [part] if isinstance(part, str) else words(part)


def test_a_recipe_has_the_defaults_and_choices_of_the_options() -> None:
    """The same names mean the same. A recipe's word for the parameters' own dtype is "auto"."""
    fields = {**config.Optimizer.model_fields, **config.Run.model_fields, **config.Train.model_fields}
    shared = fields.keys() & TABLE.keys()
    assert shared >= {*config.Optimizer.model_fields, "log_to", "grad_accumulation", "max_grad_norm", "loss_scale"}
    for name in shared - {"gradient_dtype", "device", "threads"}:
        default, check = TABLE[name]["default"], TABLE[name]["check"]
        assert fields[name].default == default, name
        if isinstance(check, OneOf):
            assert {*words(fields[name].annotation)} == {each for each in check.choices if each is not None}, name
