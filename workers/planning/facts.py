"""What is known of a trainer's layers before any step, in the planner's words."""

from __future__ import annotations

from hytrain.planner.profile import LayerFacts
from protocol import messages as m
from protocol.handles import layout
from protocol.placement import CPU, GPU, VISIT
from protocol.sizes import WEIGHTS, Sizes


def sizes_of(table: m.LayerTable) -> Sizes:
    return Sizes(table.layers, banks=table.banks, waits=table.awaits_verdict or table.in_step)


def facts(layer: m.Layer, table: m.LayerTable, sizes: Sizes) -> LayerFacts:
    of_cpu, of_visit = (sum(sizes.host(layer.lid, placement).values()) for placement in (CPU, VISIT))
    owned, held = (sum(sizes.gpu(layer.lid, placement).values()) for placement in (GPU, VISIT))
    weights_bytes = sizes.gpu(layer.lid, GPU)[WEIGHTS]
    block = next((lids[0] for lids in table.blocks if layer.lid in lids), -1)
    return LayerFacts(
        lid=layer.lid,
        position=layer.position,
        numel=layer.numel,
        gpu_state_bytes=owned - weights_bytes,
        host_bytes=of_cpu,
        grads_bytes=of_cpu - of_visit,
        held_bytes=held - weights_bytes,
        spare_bytes=of_cpu - layout(layer).nbytes,
        weights_bytes=weights_bytes if block >= 0 else 0,
        block=block,
        must_visit=layer.stays_on_device,
    )
