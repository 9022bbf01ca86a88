"""Shards that rest in host memory: FSDP2's all-gathers find them, few are on the device at once, and no bit differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_fsdp2 as fsdp2
import torch
import torch.distributed as dist
from helpers import LR, adamw, differing, opened
from ranks import RankGroup
from sharded_models import (
    Decoder,
    clip,
    for_this_rank,
    fused,
    local,
    next_token_loss,
    require_one_norm,
    same_as,
)
from test_fsdp2 import ROWS, backward, loop, plain, shard, update
from test_sharded_saving import dcp_load, dcp_save, train, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hytrain
from hytrain.errors import UnsupportedError, UsageError
from hytrain.model import fsdp
from hytrain.step import activations, offload
from hytrain.tensors import saves_with_other_hooks, storage_of

CPU: dict[str, Any] = {"k": 0.0, "offload_weights": 1.0}
VISITS: dict[str, Any] = {**CPU, "visit": 1.0}
#: The first rank's weights rest in host memory, and the other's on the device, but for some.
MIXED: dict[str, Any] = {"k": (0.0, 0.5), "visit": 0.5, "offload_weights": 0.5}
RANDOM: dict[str, Any] = {"policy": "random", "offload_weights": "auto"}


@contextmanager
def one_slot() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SLOTS", 1)
        yield patch


def present(opt: Any) -> set[str]:
    """The blocks of which this rank's shards have memory."""
    known = [known for known in opt._session.parameters if known.places and known.own.untyped_storage().nbytes()]
    return {".".join(each.name.split(".")[:2]) for each in known if each.name.startswith("blocks.")}


# ---------------------------------------------------------------- the same bits as torch


def compare(name: str, choices: list[dict[str, Any]]) -> None:
    row = ROWS[name]
    common = {key: value for key, value in row.choices[0].items() if key not in ("k", "policy")}
    with one_slot():
        same_as(row.reference, row.practice, row.make, [{**choice, **common} for choice in choices])


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_torch(name: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare, name, [RANDOM] if ROWS[name].choices[0].get("policy") else [CPU, VISITS, MIXED])


def ends_with_a_block() -> Decoder:
    """No group is after the last block's, and the root has none."""
    model: Any = Decoder()
    model.blocks.append(nn.Sequential(model.norm, model.head))
    model.norm = model.head = nn.Identity()
    fully_shard(model.embedding, mesh=fsdp2.mesh(2))
    return shard(model)


def compare_gathered_again() -> None:
    with one_slot():
        same_as(fused, fsdp2.evaluated, ends_with_a_block, [CPU, VISITS])


def test_shards_that_are_gathered_for_nobody(two_ranks: RankGroup) -> None:
    """After an evaluation, at the end of the next backward, which has updated them."""
    two_ranks.run(compare_gathered_again)


def compare_with_activations() -> None:
    """What blocks save for backward rests in host memory, too."""
    with one_slot() as patch:
        patch.setattr(activations, "MIN_BYTES", 512)
        for name in ("mixed precision and prefetch", "activation checkpointing"):
            row = ROWS[name]
            same_as(row.reference, row.practice, row.make, [{**CPU, "offload_activations": True}])


def test_the_same_bits_with_activations_in_host_memory(two_ranks: RankGroup) -> None:
    two_ranks.run(compare_with_activations)


def compare_meshes(*shape: int) -> None:
    with one_slot():
        for choice in (CPU, VISITS):
            same_as(fused, loop, lambda: shard(Decoder(), fsdp2.mesh(*shape)), [choice])


def test_a_rank_that_has_whole_parameters(two_ranks: RankGroup) -> None:
    """HSDP with one shard: nothing is gathered, and FSDP2 copies later."""
    two_ranks.run(compare_meshes, 2, 1)


@pytest.mark.slow
def test_shards_with_replicas(four_ranks: RankGroup) -> None:
    four_ranks.run(compare_meshes, 2, 2)


def clip_offloaded() -> list[list[float]]:
    with one_slot():
        choices = (CPU, VISITS, {**MIXED, "speculate": False})
        return clip(fsdp2.clipped, plain, 0.76, *choices)


def test_clipping(two_ranks: RankGroup) -> None:
    require_one_norm(two_ranks.run(clip_offloaded), 0.76)


def compare_muon() -> None:
    found = []
    for options in ({"k": 1.0}, CPU, VISITS):
        model = plain()
        groups = [
            {"params": [p for p in model.parameters() if (p.ndim == 2) is is_matrix], "use_muon": is_matrix}
            for is_matrix in (True, False)
        ]
        with one_slot(), opened(hytrain.Muon, model, groups, lr=LR, **options) as opt:
            list(loop(model, opt))
            opt.synchronize()
            found.append({name: local(p.detach()).clone() for name, p in model.named_parameters()})
        assert differing(found[-1], found[0]) == [], options


def test_matrices_that_ranks_share(two_ranks: RankGroup) -> None:
    two_ranks.run(compare_muon)


# ---------------------------------------------------------------- how many are there


def seen_at_blocks(options: dict[str, Any]) -> tuple[list[int], list[int], int, tuple[int, ...]]:
    """How many shards are there as blocks compute, forward and backward; a step's fetches; what is offloaded."""
    model, forwards, backwards, fetched = plain(), list[int](), list[int](), list[Any]()
    with one_slot() as patch, adamw(model, **options) as opt:
        fetch = offload.Offload._fetch
        patch.setattr(offload.Offload, "_fetch", lambda self, block: (fetched.append(block), fetch(self, block))[1])
        for block in model.blocks:
            block.up.register_forward_hook(lambda module, inputs, output: forwards.append(len(present(opt))))
            block.up.register_full_backward_hook(lambda module, *_: backwards.append(len(present(opt))))
        for step in range(4):
            fetched.clear()
            backward(model, step)
            update(opt)
        fetches = len(fetched)
        with torch.no_grad():
            next_token_loss(model, 4)
        assert not saves_with_other_hooks(), "autograd saves what was gathered, and no shards"
        return forwards, backwards, fetches, opt.statistics().offloaded_layers


@pytest.mark.parametrize(("options", "most"), [(CPU, 1), (VISITS, 3)], ids=["cpu", "visit"])
def test_few_shards_are_on_the_device(options: dict[str, Any], most: int, two_ranks: RankGroup) -> None:
    """The next group's, which is fetched once for forward and once for backward.

    What visits stays for its update: until its gradient has come, or until the visit is over.
    """
    for forwards, backwards, fetches, offloaded in two_ranks.run(seen_at_blocks, options):
        assert len(offloaded) == 3 and len(forwards) == 15 and len(backwards) == 12
        assert max(forwards[3:]) == 1 and max(backwards) <= most, (forwards, backwards)
        assert fetches <= 6


@pytest.mark.parametrize(("ranks", "expected"), [
    (2, ["before, copies", "gather, compute", "read, copies", "after, gathers", "wait, compute"]),
    (1, ["before, compute", "gather, compute", "after, compute", "wait, compute", "read, compute"]),
])  # fmt: skip
def test_shards_may_leave_when_they_are_copied(
    ranks: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when all ranks' have been gathered. A rank alone copies when it waits. Streams of a GPU, without one."""
    seen, now = list[str](), ["compute"]
    note = lambda what: lambda *_: seen.append(f"{what}, {now[-1]}")  # noqa: E731

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        now.append(name)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    group: Any = SimpleNamespace(
        unshard=note("gather"),
        wait_for_unshard=note("wait"),
        is_unsharded=False,
        _all_gather_result=None,
        _training_state=None,
        device=torch.device("cuda"),
        mesh_info=SimpleNamespace(shard_mesh_size=ranks),
        comm_ctx=SimpleNamespace(get_all_gather_streams=lambda *_: ("copies", "gathers")),
    )
    reader = SimpleNamespace(
        before_gather=note("before"),
        after_read=note("read"),
        after_gather=note("after"),
        before_use=lambda: None,
        after_use=lambda: None,
    )
    fsdp.read_by(group, reader)
    group.unshard()
    group.wait_for_unshard()
    assert seen == expected


# ---------------------------------------------------------------- who else reads and writes


def keeps_views(model: Any, opt: Any) -> Iterable[Tensor]:
    """Detached parameters, parts of them, and a graph over others, while groups come and leave."""
    first = model.blocks[0].down.weight
    for step in range(6):
        views = [p.detach() for p in model.blocks[1].parameters()] + [model.blocks[2].up.weight.to_local()]
        norm = first.pow(3).sum()
        loss = next_token_loss(model, step)
        [gradient] = torch.autograd.grad(norm, first)
        yield local(gradient)
        with torch.no_grad():
            yield torch.stack([local(view).sum() for view in views])
        loss.backward()
        del views
        update(opt)
        yield loss.detach()


def loads_a_part(model: Any, opt: Any) -> Iterable[Tensor]:
    """Parameters that are not loaded keep their values, though FSDP2 looks at them then."""
    list(loop(model, opt, 2))
    some = {name: value for name, value in model.state_dict().items() if name.endswith("down.weight")}
    model.load_state_dict({name: value * 0.5 for name, value in some.items()}, strict=False)
    yield from loop(model, opt, 3)


def compare_practice(practice: Callable[[Any, Any], Iterable[Tensor]]) -> None:
    with one_slot():
        same_as(fused, practice, plain, [CPU, VISITS])


@pytest.mark.parametrize("practice", [keeps_views, loads_a_part])
def test_other_readers_and_writers(practice: Callable[[Any, Any], Iterable[Tensor]], two_ranks: RankGroup) -> None:
    two_ranks.run(compare_practice, practice)


def state_dicts() -> None:
    """Of all parameters alike, also of those that never leave: full_tensor() is a collective on one device."""
    model: Any = plain()
    with one_slot(), adamw(model, **for_this_rank(MIXED)) as opt:
        list(loop(model, opt, 3))
        opt.synchronize()
        before, saved = present(opt), model.state_dict()
        assert present(opt) == before and all(type(value) is DTensor for value in saved.values())
        expected = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        assert differing({name: value.full_tensor() for name, value in saved.items()}, expected) == []
        ours = {storage_of(known.own) for known in opt._session.parameters}
        assert ours.isdisjoint(storage_of(local(value)) for value in saved.values())
        gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            assert differing(gathered, expected) == []
        local(saved["head.weight"]).mul_(0.5)
        with pytest.raises(UsageError, match=r"head\.weight of model\.state_dict\(\) was written"):
            list(loop(model, opt, 1))


def test_state_dicts_have_copies_of_all_shards(two_ranks: RankGroup) -> None:
    two_ranks.run(state_dicts)


def lend_shards() -> None:
    model: Any = plain()
    with one_slot(), adamw(model, **CPU) as opt:
        list(loop(model, opt, 3))
        expected = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
        with opt.lend_weights() as lent:
            found = {name: fsdp2.lent_view(each) for name, each in lent.items()}
            assert differing(found, expected) == []


def test_each_rank_lends_its_shards(two_ranks: RankGroup) -> None:
    two_ranks.run(lend_shards)


# ---------------------------------------------------------------- saved, and resumed on another number of ranks


def sharded() -> Decoder:
    return shard(Decoder())


def save(folder: Path) -> dict[str, Tensor]:
    """Three steps, saved in two ways; then weights and state."""
    model = sharded()
    with one_slot(), adamw(model, **for_this_rank({"k": (0.0, 0.4), "offload_weights": 1.0})) as opt:
        train(model, opt, range(3))
        opt.save(folder / "own")
        dcp_save(model, opt, folder / "sharded")
        return whole(model, opt)


def resume(folder: Path, options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Loaded in each way: weights and state, and those of two steps later."""
    found = {}
    for way in ("own", "sharded"):
        model = sharded()
        with one_slot(), adamw(model, **options) as opt:
            if way == "own":
                weights = {name: p for name, p in model.named_parameters()}
                opt.load(folder / way)
                del weights
                load_weights(model, folder)
            else:
                dcp_load(model, opt, folder / way)
            opt.synchronize()
            found[way] = whole(model, opt)
            train(model, opt, range(3, 5))
            found[f"{way}, later"] = whole(model, opt)
    return found


def load_weights(model: nn.Module, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weights = get_model_state_dict(model)
    dcp.load({"model": weights}, checkpoint_id=folder / "sharded")
    model.load_state_dict(weights)


@pytest.mark.slow
def test_resumed_on_another_number_of_ranks(two_ranks: RankGroup, four_ranks: RankGroup, tmp_path: Path) -> None:
    saved = two_ranks.run(save, tmp_path)[0]
    [on_device, *_] = four_ranks.run(resume, tmp_path, {"k": 1.0})
    for options in (CPU, VISITS):
        for found in four_ranks.run(resume, tmp_path, options):
            for way, values in found.items():
                assert differing(values, on_device[way] if "later" in way else saved) == [], (options, way)


# ---------------------------------------------------------------- refused


def refused() -> str:
    """Modules compute with the shards of tensor parallelism."""
    model = Decoder(hidden=48)
    for block in model.blocks:
        parallelize_module(block, fsdp2.mesh(2), {"up": ColwiseParallel()})
    with pytest.raises(UnsupportedError) as caught:
        hytrain.AdamW(model, lr=LR, **CPU)
    return str(caught.value)


def test_shards_that_are_not_gathered_are_refused(two_ranks: RankGroup) -> None:
    assert all("is for blocks that FSDP2 gathers" in said for said in two_ranks.run(refused))
