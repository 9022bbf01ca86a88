"""The parts of a step that know no other part. All others use some of them."""

from __future__ import annotations

from dataclasses import dataclass

from hytrain.memory.lending import Lending
from hytrain.memory.transfer import Transfers
from hytrain.memory.visits import Visits
from hytrain.model.trained import TrainedLayer, TrainedParameter
from hytrain.run.link import Link
from hytrain.step.accumulation import Accumulation
from hytrain.step.activations import Activations
from hytrain.step.health import Health
from hytrain.step.kept import KeptGradients
from hytrain.step.measure import Meter
from hytrain.step.offload import Offload
from hytrain.step.verdict import Verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Those of one model. With `overlap`, updates begin while backward runs; otherwise in `step()`.

    `is_stage`: the model is a pipeline's stage, of which several forwards come before a backward.
    """

    layers: list[TrainedLayer]
    parameters: list[TrainedParameter]
    link: Link
    transfers: Transfers
    health: Health
    meter: Meter
    verdicts: Verdicts
    accumulation: Accumulation
    kept: KeptGradients
    visits: Visits
    offload: Offload
    lending: Lending
    activations: Activations | None
    overlap: bool
    is_stage: bool
