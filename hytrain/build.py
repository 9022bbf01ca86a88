"""Builds what a session trains with: a model's layers, what an engine over them is made of, and the layer table.

    model, groups ─▶ Build: layers, gates, blocks, which memory suffices for ─▶ calibration, engine, table
                                                                            ─▶ fill: first values, the first plan

A session builds at its start, and again when other parameters are to be trained. It joins the run itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import astuple
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from hytrain.checks import Groups
from hytrain.config import serves_allocator
from hytrain.errors import BackendUnavailable, UnsupportedError
from hytrain.kernels import choice
from hytrain.kernels.backend import Backend
from hytrain.kernels.torch_backend import vectors
from hytrain.memory.capacity import (
    GpuMemory,
    HostRoom,
    host_bound,
    host_bytes,
    host_free,
    is_integrated,
    require_host_memory,
)
from hytrain.memory.lending import Lending
from hytrain.memory.reclaim import serving
from hytrain.memory.transfer import transfers_for
from hytrain.memory.visits import ring_bytes
from hytrain.model import fsdp
from hytrain.model.blueprint import Planned, Read, blueprints_of, converted
from hytrain.model.layers import ModelLayer, find_blocks, split_layers
from hytrain.model.lifecycle import LayerLife
from hytrain.model.offloaded import load, offloadable_blocks, take_back, take_to
from hytrain.model.parts import Loose
from hytrain.model.rounds import rounds
from hytrain.model.sharing import shared_out
from hytrain.model.trained import Gate, TrainedLayer, TrainedParameter, TrainedSegment
from hytrain.options import Options
from hytrain.readable import gib
from hytrain.run import environment
from hytrain.run.calibration import calibrate
from hytrain.run.cluster import PrivateCluster
from hytrain.run.lender import Lender
from hytrain.run.link import Link
from hytrain.run.ownership import PlanBook
from hytrain.run.ranks import Ranks
from hytrain.run.seats import Seat
from hytrain.run.trace import EVERY_STEP, NO_STEP, TraceWriter
from hytrain.step.accumulation import Accumulation
from hytrain.step.activations import Activations
from hytrain.step.check import SelfCheck
from hytrain.step.engine import Engine
from hytrain.step.offload import window_bytes
from hytrain.step.shared import SharedMatrices
from hytrain.tensors import count_write, flat, has_memory, keeping_versions, local, version, with_memory
from protocol.handles import EXACT, Precision, layout
from protocol.messages import Calibration, LayerTable, Plan
from protocol.placement import GPU
from protocol.rules import ON_DEVICE

#: The coordinator ends an optimizer process that hangs. The trainer waits so much longer, in case that hangs, too.
HANG_GRACE_S: Final = 15.0

_NOT_GATHERED: Final = (
    "offload_weights with several ranks is for blocks that FSDP2 gathers, each as a whole: apply fully_shard to every "
    "block of the model, or leave offload_weights out"
)

_log = logging.getLogger(__name__)


class Site:
    """Where and with what a session trains, at its start and whenever it builds anew. It refers to the model weakly.

    `first` has the parameters' first values that are not on the `device` yet. `stage` is that of a pipeline.
    """

    _model_of: Callable[[], nn.Module | None]
    options: Options
    groups: Groups
    ranks: Ranks
    stage: int | None
    place: PrivateCluster | Seat
    device: torch.device
    memory: GpuMemory
    accumulation: Accumulation
    check: SelfCheck | None
    first: dict[nn.Parameter, Tensor]

    @property
    def model(self) -> nn.Module:
        model = self._model_of()
        assert model is not None, "the optimizer keeps it"
        return model

    def take_model(self, came_from: torch.device, undo: contextlib.ExitStack) -> None:
        """Bring the model to the device, but for weights that rest in host memory. `undo` gets what undoes that."""
        deferred = [planned for each in blueprints_of(self.model) for planned in each.planned]
        if deferred or self.device != came_from:
            undo.callback(take_back, self.model, came_from, self.first)
            blocks = find_blocks(self.model) if self.options.offload_weights != 0.0 else ()
            take_to(self.model, self.device, blocks, deferred, self.first)


class Build:
    """A model's layers, gates and offloadable blocks, and what an engine over them is made of."""

    def __init__(self, site: Site, before: Sequence[TrainedParameter], theirs: Set[int]) -> None:
        """All ranks call this. It starts nothing: it checks what is to be trained, and that memory suffices.

        `before` are the parameters of the build that this replaces, `theirs` what other sessions train.
        """
        self._site = site
        fsdp.reshard(site.model)
        with site.ranks.together():
            if site.options.offload_weights != 0.0:
                fsdp.prepare(site.model)
            self.gates = self._split(before, theirs)
            groups = site.groups.read()
        if (
            site.ranks.world > 1
            and site.options.offload_weights != 0.0
            and not any(site.ranks.gather(bool(self.blocks)))
        ):
            raise UnsupportedError(_NOT_GATHERED)
        by_id = {id(known.parameter): known for known in self.parameters}
        named = [(name, p) for name, p in site.model.named_parameters() if id(p) in by_id]
        hyper = [astuple(groups[by_id[id(parameter)].group]) for _, parameter in named]
        self._sharing = shared_out(site.ranks, site.stage or 0, named, hyper)

    def _split(self, before: Sequence[TrainedParameter], theirs: Set[int]) -> list[tuple[Any, Gate]]:
        site, options = self._site, self._site.options
        groups = [[p for p in group["params"] if p.requires_grad and id(p) not in theirs] for group in site.groups.now]
        wanted = {id(parameter) for group in groups for parameter in group}
        fsdp.require_reduced(site.model, wanted)
        rules = [options.algorithm.rule(group) for group in site.groups.now]
        whole = {id(p) for group, rule in zip(groups, rules, strict=True) if rule in ON_DEVICE for p in group}
        parts = split_layers(site.model, wanted, whole=whole)
        if not parts:
            raise UnsupportedError(
                "param_groups have no parameter that needs a gradient: nothing to train"
                if site.ranks.world == 1
                else "this rank has no elements to train: train a model this small on fewer ranks"
            )
        empty = [(n, p) for n, p in site.model.named_parameters() if id(p) in wanted and not local(p).numel()]
        empty = [(name, parameter) for name, parameter in empty if parameter.numel()]
        self.layers, self.parameters = build_layers(
            parts, groups, rules, options.gradient_dtype, before, empty, options.precision
        )
        self._bound_memory()
        gates = build_gates(self.layers, parts)
        blocks = find_blocks(site.model)
        self.blocks = [] if options.offload_weights == 0.0 else offloadable_blocks(gates, blocks)
        if options.offload_activations:  # without blocks, all modules count as blocks; and so do FSDP2's groups
            ids = {id(block) for block in blocks}
            for reader, gate in gates:
                gate.is_block = not ids or id(reader) in ids or not isinstance(reader, nn.Module)
        for known in self.parameters:
            for layer, index in known.places if known.parameter in site.first else ():
                segment = layer.segments[index]
                segment.first = segment.part(flat(site.first[known.parameter]))
        return gates

    def _bound_memory(self) -> None:
        """Raise `CapacityError` if memory cannot suffice, and give layers a second bank if host memory allows."""
        site, options, layers = self._site, self._site.options, self.layers
        limit, ranks = site.place.settings.host_memory_limit, len(site.ranks.node)
        # A given k says which share of one memory is the GPU's.
        shared = site.memory.shared_bytes if options.k is None else lambda: 0
        self._host_bytes, self._is_stated = host_bound(limit, ranks, shared()), limit is not None
        self._host_free = host_free(limit, site.device, ranks, shared)
        numel = sum(layer.spec.numel for layer in layers)
        must_visit = sum(layer.spec.numel for layer in layers if layer.spec.stays_on_device) / numel
        require_host_memory(
            [layer.layout for layer in layers],
            options.k,
            limit,
            ranks=ranks,
            gpu_bytes=site.memory.for_state_bytes(),
            awaits_verdict=options.awaits_verdict,
            visit=1.0 if options.visit is None else max(options.visit, must_visit),
            shared=shared(),
        )
        # A second bank would be of no use to layers that the CPU cannot update, or need not.
        if shared() or not (options.may_speculate and (options.speculate or not must_visit)):
            return
        double = [layout(layer.spec, banks=2) for layer in layers]
        if host_bytes(double, options.k or 0.0) <= self._host_bytes:  # with "auto" it is not worth a larger k
            for layer, placed in zip(layers, double, strict=True):
                layer.layout = placed
            return
        _log.warning(
            "updates wait for the norm of all gradients: making them earlier, and undoing those that were wrong, "
            "would take %s of host memory, which are not free",
            gib(int(host_bytes(double) * (1.0 - (options.k or 0.0)))),
        )

    def calibration(self) -> Calibration:
        """Load or build what copies and updates, and measure it."""
        site, options = self._site, self._site.options
        builds = options.backend in ("auto", "native")  # before the optimizer process needs it
        if builds and (reason := choice.why_not_native(fuses=vectors().fuses)) and options.backend == "auto":
            _log.warning("the CPU updates with torch, which is slower and not bit for bit the same: %s", reason)
        self.transfers, self._hold_bytes = transfers_for(site.device), site.memory.for_waiting_bytes()
        self._host = _host_backend(options.backend) if site.device.type == "cpu" else None
        site.memory.serving = _reclaim_library(site.device)
        return calibrate([layer.spec for layer in self.layers], site.device, self.transfers, self._host)

    def engine(self, link: Link, plans: PlanBook) -> Engine:
        """After `calibration`."""
        site, options, cluster = self._site, self._site.options, self._site.place.cluster
        there = [*site.model.parameters(), *site.model.buffers()]
        free = host_free(None, site.device, len(site.ranks.node))  # a stated limit is one for planes
        activations = Activations(self.transfers, site.device, there, free) if options.offload_activations else None
        rank, at = site.place.rank, {"socket_dir": cluster.socket_dir, "token": cluster.token}
        engine = Engine(
            self.layers,
            self.parameters,
            link=link,
            plans=plans,
            transfers=self.transfers,
            host=self._host,
            read_groups=site.groups.read,
            memory=site.memory,
            host_room=HostRoom(self._host_free, self._host_bytes if self._is_stated else None),
            hold_bytes=self._hold_bytes,
            accumulation=site.accumulation,
            check=site.check,
            options=options,
            ranks=site.ranks,
            counted=self._sharing.counted,
            shared=self._shared_matrices(),
            activations=activations,
            blocks=self.blocks,
            is_stage=site.stage is not None,
            lending=Lending(self.parameters, self.transfers, lambda of: Lender(of, **at, rank=rank).close),
            trace=TraceWriter(cluster.run_dir, link.address, EVERY_STEP if cluster.config.trace else NO_STEP),
            updater=f"optimizer-{rank} (process {cluster.optimizer_pids[rank]})",
            hang_timeout_s=cluster.config.hang_timeout_s + HANG_GRACE_S,
        )
        engine.reads.loose = [gate for reader, gate in self.gates if isinstance(reader, Loose)]
        return engine

    def _shared_matrices(self) -> SharedMatrices | None:
        """Those of this rank's stage. The stage's ranks call this together, and come to the same ones."""
        ranks, parts = self._site.ranks, self._sharing.parts
        matrices = {known.name: known.parameter for known in self.parameters if known.rule in ON_DEVICE}
        named = [name for name, _ in self._site.model.named_parameters() if name in matrices]
        wholes = {name: tuple((0, size) for size in matrices[name].shape) for name in named}
        divided = [
            name for name in named if any(theirs.get(name, wholes[name]) != wholes[name] for theirs in parts.values())
        ]
        if not divided:
            return None
        shapes = {name: (matrices[name].shape[0], matrices[name].shape[1]) for name in divided}
        return SharedMatrices(
            self.layers,
            rounds(shapes, parts),
            self.transfers,
            rank=ranks.rank,
            ranks=[*parts],
            group=ranks.among([*parts]),
        )

    def table(self, inbox: str, *, continues: bool) -> LayerTable:
        """What coordinator and optimizer need to know, before an engine takes its first step."""
        site, options = self._site, self._site.options
        layers = tuple(layer.spec for layer in self.layers)
        free = site.memory.for_state_bytes()  # also for weights of blocks that can be offloaded, which are there by now
        there = sum(known.own.nbytes for b in self.blocks for known in b.parameters if has_memory(known.own))
        return LayerTable(
            layers=layers,
            inbox=inbox,
            device=site.device.type,
            policy=options.policy,
            objective=options.objective,
            awaits_verdict=options.awaits_verdict,
            speculate=options.speculate if self.layers[0].layout.banks == 2 else False,
            k=options.k,
            backend=options.backend,
            gpu_bytes=None if free is None else free + there,
            host_bytes=self._host_bytes,
            continues=continues,
            rank=site.ranks.rank,
            world=site.ranks.world,
            visit=options.visit,
            offload_weights=options.offload_weights if self.blocks else 0.0,
            blocks=tuple(tuple(layer.lid for layer in block.layers) for block in self.blocks),
            window_bytes=window_bytes(self.blocks),
            ring_bytes=ring_bytes([segment for layer in layers for segment in layer.segments]),
            hold_bytes=self._hold_bytes,
            in_step=site.accumulation.timing.in_step,
            gpu=environment.gpu_uuid(site.device),
        )

    def fill(self, engine: Engine, plan: Plan) -> None:
        """Start the engine with its first plan. First values come to the device, but for blocks that stay away."""
        site = self._site
        away = [b for b in self.blocks if plan.places.offloaded.issuperset(one.lid for one in b.layers)]
        stays = {known.parameter for block in away for known in block.parameters}
        for parameter in site.first.keys() - stays:
            load(parameter, site.first[parameter])
        engine.start(plan)
        for blueprint in blueprints_of(site.model):
            blueprint.make(partial(self._give, engine), site.device)
        site.memory.begin_session()

    def _give(self, engine: Engine, planned: Planned, read: Read) -> None:
        """A blueprint has made a parameter's first values."""
        if planned.parameter.is_meta:
            return  # the model does not have it any more
        known = next((known for known in self.parameters if known.parameter is planned.parameter), None)
        values = converted(read(tuple(slice(0, size) for size in planned.parameter.shape)), planned.through)
        if known is None:
            planned.parameter.data.copy_(values)
        else:
            engine.masters.begin_with(known, values)

    def end_beginning(self) -> None:
        """All first values are where they belong."""
        self._site.first.clear()
        for segment in (segment for layer in self.layers for segment in layer.segments):
            segment.first = None


def _reclaim_library(device: torch.device) -> ctypes.CDLL | None:
    """What serves torch's allocator of a GPU; None on a CPU, if turned off, or, with a warning, where it cannot be."""
    if device.type == "cpu" or not serves_allocator() or is_integrated(device):  # there, nothing would be freed
        return None
    try:
        return serving(device)
    except BackendUnavailable as reason:
        _log.warning("state cannot leave the GPU while torch allocates, only before a larger batch: %s", reason)
        return None


def _host_backend(name: str) -> Backend:
    """The backend that updates the trainer's own layers on device "cpu". Raises `BackendUnavailable`.

    The native backend gets a single thread: more OpenMP threads would compete with torch's for the cores.
    """
    threads = torch.get_num_threads()
    backend, _ = choice.load(name, 1)
    if backend.name != "native":
        backend.threads = threads
    return backend


def build_layers(
    layers: list[ModelLayer],
    groups: list[list[nn.Parameter]],
    rules: Sequence[str],
    grad_dtype: torch.dtype | None,
    before: Sequence[TrainedParameter] = (),
    empty: Sequence[tuple[str, nn.Parameter]] = (),
    precision: Precision = EXACT,
) -> tuple[list[TrainedLayer], list[TrainedParameter]]:
    """Build the trained layers and their parameters, with state of this `precision`. `rules[i]` updates group i.

    `before` are the parameters of the build that this replaces. `empty` are parameters that other ranks have shards of,
    but this one none: they are in no layer. The parameters are in the order of their group, if there is one: so the
    norm of all gradients adds them up as torch does for the same parameters; else in the model's.
    """
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
    owners: dict[int, TrainedParameter] = {}
    built: list[TrainedLayer] = []

    def known(name: str, parameter: nn.Parameter) -> TrainedParameter:
        group = group_of[id(parameter)]
        return TrainedParameter(name, parameter, group, rules[group], precision)

    for layer in layers:
        spec = layer.describe(group_of, rules, grad_dtype, precision)
        trained = TrainedLayer(layer.lid, layer.name, spec, layout(spec), [], LayerLife(layer.lid, GPU))
        for index, (piece, segment) in enumerate(zip(layer.pieces, spec.segments, strict=True)):
            if (owner := owners.get(id(piece.parameter))) is None:
                owner = owners[id(piece.parameter)] = known(piece.name, piece.parameter)
            with with_memory(owner.own):
                weights = flat(owner.own)[piece.start : piece.start + piece.numel]
            trained.segments.append(TrainedSegment(segment, owner, piece.start, weights))
            owner.places.append((trained, index))
        built.append(trained)
    parameters = [*owners.values(), *(known(name, parameter) for name, parameter in empty)]
    if len(groups) == 1:
        place = {id(parameter): index for index, parameter in enumerate(groups[0])}
        parameters.sort(key=lambda known: place[id(known.parameter)])
    _check_memory(parameters, before)
    return built, parameters


def build_gates(layers: list[TrainedLayer], parts: list[ModelLayer]) -> list[tuple[Any, Gate]]:
    """A gate for each reader of layers. It covers the layers' parameters that the reader has."""
    read: dict[int, tuple[Any, list[TrainedLayer]]] = {}
    for layer, part in zip(layers, parts, strict=True):
        for reader in part.readers:
            read.setdefault(id(reader), (reader, []))[1].append(layer)
    gates = []
    for reader, waited in read.values():
        own = reader.parameters() if isinstance(reader, nn.Module) else fsdp.sharded(reader)
        gate, ids = Gate(waited), {id(parameter) for parameter in own}
        gate.parameters = [known for known in gate.parameters if id(known.parameter) in ids]
        gates.append((reader, gate))
    return gates


def _check_memory(parameters: list[TrainedParameter], before: Sequence[TrainedParameter]) -> None:
    """Refuse parameters that share memory. Turn off write detection for those that share a version counter.

    To find the latter, count one write on each parameter that was not known `before`, for a moment: a graph may be
    waiting for its backward, and a write would invalidate it.
    """
    by_address = sorted((known for known in parameters if known.address), key=lambda known: known.address)
    for first, second in zip(by_address, by_address[1:], strict=False):
        if first.address + first.own.nbytes > second.address:
            raise UnsupportedError(f"{first.name} and {second.name} share memory: tie them as one Parameter")
    shares = {id(known.parameter): known.version is None for known in before}
    new = [known for known in parameters if id(known.parameter) not in shares]
    versions = [version(known.parameter) for known in new]
    with keeping_versions(tuple(known.own for known in new)):
        count_write([known.own for known in new])
        for known, counted in zip(new, versions, strict=True):
            known.version = counted if version(known.parameter) == counted + 1 else None
    for known in parameters:
        if shares.get(id(known.parameter)):
            known.version = None
