"""Parameters of tests of which `make test` runs some of the combinations, and `make test-slow` the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter, or several together, with which the test is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def every_second(**axes: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """All combinations of parameters, of which every second one is slow: each value is left with some of the others.

    The keys of mappings are IDs. The last name's values come first in the test's ID, as with stacked decorators.
    """
    assert len(axes) > 1, "every second value of one would be in no fast test"
    named = [list(axis.items() if isinstance(axis, Mapping) else zip(map(str, axis), axis)) for axis in axes.values()]
    found = []
    for combination in product(*(enumerate(axis) for axis in named)):
        ids, values = zip(*(pair for _, pair in combination))
        marks = [pytest.mark.slow] if sum(at for at, _ in combination) % 2 else []
        found.append(pytest.param(*values, marks=marks, id="-".join(reversed(ids))))
    return pytest.mark.parametrize(tuple(axes), found)
