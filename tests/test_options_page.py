"""docs/options.md has every option with its default, and none that there is not."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

import hytrain
from hytrain.config import ClusterConfig
from hytrain.options import TABLE, OneOf, SharedOptions
from hytrain.recipe import config
from hytrain.recipe.config import Recipe, Section

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "options.md").read_text()
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
    """Its choices are a Literal's, so that an editor offers them, and mypy finds what is misspelt."""
    types = get_type_hints(SharedOptions)
    assert types.keys() == TABLE.keys()
    for name, row in TABLE.items():
        if isinstance(row["check"], OneOf) and name != "gradient_dtype":
            assert {*words(types[name])} == {each for each in row["check"].choices if each is not None}, name


@pytest.mark.parametrize("kind", [hytrain.AdamW, hytrain.Adam, hytrain.SGD, hytrain.Lion, hytrain.Muon])
def test_help_lists_every_option(kind: type) -> None:
    said = pydoc.plain(pydoc.render_doc(kind))
    for name, row in TABLE.items():
        assert re.search(rf"^ [| ] +{name}: .*Default: {re.escape(repr(row['default']))}\.$", said, re.MULTILINE), name
    assert "](" not in said and "see below" not in said


def test_completion_offers_the_public_names() -> None:
    assert dir(hytrain) == sorted(hytrain.__all__)


def test_a_type_checker_finds_what_is_misspelt(tmp_path: Path) -> None:
    """With the cache of `make lint`, if that ran before."""
    lines = {
        "import hytrain": "",
        "import torch": "",
        "model = torch.nn.Linear(2, 2)": "",
        'opt = hytrain.AdamW(model, lr=1e-3, max_grad_norm=1.0, updates="step", k="auto", objective="gpu-memory")': "",
        "hytrain.Adamm(model)": "attr-defined",
        "hytrain.AdamW(model, max_gradnorm=1.0)": "call-arg",
        'hytrain.AdamW(model, updates="steps")': "arg-type",
        'hytrain.AdamW(model, k="half")': "arg-type",
        'hytrain.Muon(model, adjust_lr_fn="orignal")': "arg-type",
    }
    (file := tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", file]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    codes = {int(line): code for line, code in re.findall(r"script\.py:(\d+): error: .*\[([\w-]+)\]", found)}
    assert codes == {number: code for number, code in enumerate(lines.values(), 1) if code}, found


def test_an_editable_install_is_a_path_that_type_checkers_follow() -> None:
    """They do not follow the finder that setuptools installs otherwise."""
    installed = [path.name for path in Path(sysconfig.get_path("purelib")).glob("__editable__*hytrain*")]
    assert installed in ([], [f"__editable__.hytrain-{hytrain.__version__}.pth"])


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
