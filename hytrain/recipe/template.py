"""A recipe with every key, for `hytrain-cluster init`: sections, defaults and comments are those of `config`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml

from hytrain.recipe.config import Recipe, Section, sections

#: The values of keys that have no default.
EXAMPLE: dict[str, dict[str, Any]] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 256,
        }
    },
    "data": {"paths": ["data"]},
    "train": {"steps": 1000},
    "sample": {"prompt": "Once upon a time"},
}
FIELD = re.compile(r"^    (\w+): .+?(?:  # (.+))?$", re.MULTILINE)


def template() -> str:
    """The recipe as YAML. Sections that a recipe may leave out are commented out."""
    lines = ["# Every key of a recipe. Those with a default can be left out; docs/options.md explains them."]
    for name, field in Recipe.model_fields.items():
        [section] = sections(field)
        optional = field.default is None
        [summary, *_] = (section.__doc__ or "").split("\n")
        block = [f"{name}:", *_keys(section, EXAMPLE.get(name, {}))]
        lines += ["", f"# {summary}", *(f"# {line}" if optional else line for line in block)]
    return "\n".join(lines) + "\n"


def _keys(section: type[Section], example: dict[str, Any]) -> Iterator[str]:
    comments = dict(FIELD.findall(inspect.getsource(section)))
    defaults = {name: field.default for name, field in section.model_fields.items() if not field.is_required()}
    plain = section.model_construct(**{**defaults, **example}).model_dump(mode="json", warnings=False)
    for name in section.model_fields:
        value = yaml.safe_dump(plain[name], default_flow_style=True, sort_keys=False, width=1000).split("\n")[0]
        kind = section.model_fields[name].annotation
        others = [str(each) for each in get_args(kind) if get_origin(kind) is Literal and each != plain[name]]
        comment = "; ".join(filter(None, (f"or {', '.join(others)}" if others else "", comments.get(name))))
        yield f"  {name}: {value}" + (f"  # {comment}" if comment else "")
