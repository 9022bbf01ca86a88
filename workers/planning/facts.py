"""What is known of a trainer's layers before any step, in the planner's words."""

from __future__ import annotations

from hytrain import planner
from protocol import messages as m
from protocol.handles import layout
from protocol.placement import Placement


def facts(layer: m.Layer, table: m.LayerTable) -> planner.LayerFacts:
    placed, one_bank = layout(layer, table.banks), layout(layer)
    held_bytes = placed.plane_nbytes["grads"] if table.awaits_verdict else 0
    block = next((lids[0] for lids in table.blocks if layer.lid in lids), -1)
    return planner.LayerFacts(
        lid=layer.lid,
        position=layer.position,
        numel=layer.numel,
        gpu_state_bytes=held_bytes + placed.state_nbytes,
        host_bytes=placed.nbytes,
        grads_bytes=placed.plane_nbytes["grads"],
        held_bytes=held_bytes,
        spare_bytes=placed.nbytes - one_bank.nbytes,
        weights_bytes=one_bank.plane_nbytes["weights"] if block >= 0 else 0,
        block=block,
        must_visit=layer.stays_on_device,
    )


def on_gpu_bytes(fact: planner.LayerFacts, placement: Placement) -> int:
    """What the layer takes of GPU memory in this placement, without its weights."""
    return fact.gpu_state_bytes if placement.state == "gpu" else fact.held_bytes if placement.visits else 0


def on_host_bytes(fact: planner.LayerFacts, placement: Placement) -> int:
    """What the layer takes of host memory in this placement."""
    if placement.state == "gpu":
        return 0
    return fact.host_bytes - (fact.grads_bytes if placement.visits else 0)
