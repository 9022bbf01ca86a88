"""Made-up layers for tests of the planner: 10 bytes of state and 14 on the host per parameter, as in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from hytrain.planner.book import MeasurementBook
from hytrain.planner.profile import LayerFacts, LayerProfile, Profile

NONE: frozenset[int] = frozenset()
USUAL = {"forward_s": 1.0, "backward_s": 2.0, "d2h_s": 0.0, "h2d_s": 0.0, "cpu_update_s": 3.0, "gpu_update_s": 0.5}


def made(position: int, **changes: Any) -> LayerProfile:
    """A layer with its position for a LID, unless told otherwise. Its state takes five copies of weights to visit."""
    numel = changes.get("numel", 100)
    sizes = {"lid": position, "numel": numel, "gpu_state_bytes": 10 * numel, "host_bytes": 14 * numel}
    fields = USUAL | sizes | changes
    visit_s = 5 * max(fields["d2h_s"], fields["h2d_s"])
    return LayerProfile(position=position, **({"visit_s": visit_s} | fields))


def facts(layers: Iterable[LayerProfile]) -> list[LayerFacts]:
    """What is known of these layers before anything has run."""
    return [LayerFacts(**{field.name: getattr(layer, field.name) for field in fields(LayerFacts)}) for layer in layers]


def around(
    numels: Sequence[int],
    forward_s: Iterable[float],
    *,
    link: float,
    cpu_rate: float,
    gpu_rate: float,
    about: Callable[[float], float] = float,
) -> tuple[LayerProfile, ...]:
    """Layers of these sizes, with backward three times as long as forward; rates in parameters/s, the link's in B/s."""
    return tuple(
        made(
            position,
            numel=numel,
            forward_s=about(t_f),
            backward_s=about(3 * t_f),
            d2h_s=about(2 * numel / link),
            h2d_s=about(2 * numel / link),
            cpu_update_s=about(numel / cpu_rate),
            gpu_update_s=about(numel / gpu_rate),
        )
        for position, (numel, t_f) in enumerate(zip(numels, forward_s, strict=True))
    )


def with_cpu(profile: Profile, slowness: float) -> Profile:
    layers = tuple(replace(layer, cpu_update_s=slowness * layer.cpu_update_s) for layer in profile.layers)
    return replace(profile, layers=layers)


def profile_of(book: MeasurementBook) -> Profile:
    book.check()
    profile = book.profile()
    assert profile is not None
    return profile
