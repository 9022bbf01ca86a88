"""Muon's matrices that ranks share: the bits of torch's Muon on one rank, given the same gathered gradients.

All matrices are Muon's here, also the embedding's and the head's, and one of which a single rank has all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import muon
import pytest
import torch
import torch.distributed as dist
from helpers import OnMasters, differing, late_weights, opened, wait_for_coordinator
from ranks import RankGroup
from sharded_models import STEPS, Decoder, for_this_rank, local, next_token_loss
from streams import over_host_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import hytrain
from hytrain.memory import visits
from hytrain.memory.visits import Visit, Visits
from hytrain.model.rounds import SharedMatrix
from hytrain.step import check, shared
from hytrain.step.shared import Direction, SharedMatrices
from hytrain.tensors import part_of
from protocol.rules import Hyper, MuonHyper

NUMBERS: dict[str, Any] = {"lr": 0.02, "adamw": {"lr": 1e-2}}
#: By rank. The first of several ranks has the momentum in host memory, the second on the device.
BOTH: dict[str, Any] = {"k": (0.0, 1.0)}
HIDDEN = 48
#: Some steps are clipped.
MAX_NORM = 0.76


@cache
def mesh(*shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def sharded(model: Decoder, over: DeviceMesh, **options: Any) -> Decoder:
    for block in model.blocks:
        fully_shard(block, mesh=over, **options)
    fully_shard(model, mesh=over, **options)
    return model


def plain() -> Decoder:
    return sharded(Decoder(hidden=HIDDEN), mesh(dist.get_world_size()))


def uneven() -> Decoder:
    """Rows that the ranks cannot share evenly."""
    return sharded(Decoder(), mesh(dist.get_world_size()))


def bfloat16() -> Decoder:
    return sharded(Decoder(hidden=HIDDEN).to(torch.bfloat16), mesh(dist.get_world_size()))


def mixed_precision() -> Decoder:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(Decoder(hidden=HIDDEN), mesh(dist.get_world_size()), mp_policy=policy)


def by_columns_and_rows() -> Decoder:
    """The matrices of blocks are divided by rows and by columns; embedding, head and scales are on all ranks."""
    model, over = Decoder(hidden=HIDDEN), mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, over["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def lying_by_columns() -> Decoder:
    """Parts whose columns come one after the other in memory."""
    model = by_columns_and_rows()
    for module in (part for block in model.blocks for part in (block.up, block.down)):
        part = local(module.weight.detach()).T.contiguous().T
        whole = DTensor.from_local(part, module.weight.device_mesh, module.weight.placements, run_check=False)
        module.weight = nn.Parameter(whole)
        assert not local(module.weight).is_contiguous()
    return model


def in_two_dimensions() -> Decoder:
    return sharded(by_columns_and_rows(), mesh(2, 2, names=("data", "tensor"))["data"])


def hybrid() -> Decoder:
    return sharded(Decoder(hidden=HIDDEN), mesh(2, 2))


class Turns(nn.Module):
    """Two matrices that take turns in the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y: Tensor = self.turns[self.count % 2](x)
        return x + y


def taking_turns() -> Decoder:
    model = Decoder()
    model.blocks = nn.ModuleList(Turns() for _ in range(3))
    return sharded(model, mesh(2))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if (p.ndim == 2) is of_muon], "use_muon": of_muon}
        for of_muon in (True, False)
    ]


class Whole(OnMasters, muon.Muon):
    """torch's Muon over whole matrices, which each rank has, and its AdamW over this rank's parts of all others."""

    def __init__(self, model: nn.Module, **numbers: Any) -> None:
        self.found = dict(model.named_parameters())
        self.own = {name: nn.Parameter(self._of(p, p.detach()).clone()) for name, p in self.found.items()}
        super().__init__(model, [{"params": list(self.own.values())}], **{**NUMBERS, **numbers})

    @staticmethod
    def _of(parameter: Tensor, tensor: Tensor) -> Tensor:
        """Gradients of tensor-parallel modules may still be sums."""
        if parameter.ndim == 2 and isinstance(tensor, DTensor):
            return tensor.full_tensor()
        if isinstance(parameter, DTensor) and isinstance(tensor, DTensor):
            tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
        return local(tensor)

    def step(self, closure: Any = None) -> Any:
        for name, p in self.found.items():
            self.own[name].grad = None if p.grad is None else self._of(p, p.grad)
        result = super().step(closure)
        with torch.no_grad():
            for name, p in self.found.items():
                local(p).copy_(part_of(self.own[name], p) if p.ndim == 2 else self.own[name])
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for name, p in self.found.items():
            p.grad = self.own[name].grad = None

    def momentum(self) -> dict[str, Tensor]:
        """This rank's parts."""
        state = {name: self.state[self.master_of.get(own, own)] for name, own in self.own.items()}
        return {
            f"{name}.momentum": part_of(its["momentum_buffer"], self.found[name]).contiguous()
            for name, its in state.items()
            if "momentum_buffer" in its and local(self.found[name]).numel()
        }


def data_rank(model: nn.Module) -> int:
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return dist.get_rank() // 2 if any("tensor" in (over.mesh_dim_names or ()) for over in meshes) else dist.get_rank()


def backward(model: nn.Module, step: int) -> None:
    next_token_loss(model, step, data_rank(model)).backward()


Practice = Callable[[nn.Module, Any], object]


def loop(model: nn.Module, opt: Any, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        backward(model, step)
        opt.step()
        opt.zero_grad()


def moving(model: nn.Module, opt: Any) -> None:
    """Layers move between the steps, on each rank others."""
    for step in range(3 * STEPS):
        loop(model, opt, [step])
        if isinstance(opt, hytrain.Muon) and opt.statistics().step > 1:
            wait_for_coordinator(opt)
            opt._engine._handover.wait()
    assert not isinstance(opt, hytrain.Muon) or opt.statistics().moved, "some did"


def accumulated(model: nn.Module, opt: Any) -> None:
    """Every backward reduces gradients, and two make a step."""
    for step in range(STEPS):
        for part in range(2):
            backward(model, 10 * step + part)
        opt.step()
        opt.zero_grad()


def clipped_by_the_loop(model: nn.Module, opt: Any) -> None:
    for step in range(STEPS):
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()


def scheduled(model: nn.Module, opt: Any) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
    for step in range(STEPS):
        loop(model, opt, [step])
        schedule.step()


def results(model: nn.Module, opt: Any, practice: Practice) -> dict[str, Tensor]:
    """This rank's parts of weights and momentum after the practice."""
    named = dict(model.named_parameters())
    practice(model, opt)
    if isinstance(opt, hytrain.Muon):
        opt.synchronize()
    found = {name: local(p.detach()).clone() for name, p in named.items()}
    if isinstance(opt, Whole):
        return found | opt.momentum()
    names = [name for group in groups_of(model) for name, _ in group["params"]]
    for index, entry in opt.state_dict()["state"].items():
        if "momentum_buffer" in entry and local(named[names[index]]).numel():
            found[f"{names[index]}.momentum"] = local(entry["momentum_buffer"]).clone()
    return found


def compare(make: Callable[[], nn.Module], practice: Practice, *choices: dict[str, Any]) -> None:
    theirs = make()
    expected = results(theirs, Whole(theirs), practice)
    assert any("momentum" in name for name in expected)
    for choice in choices:
        ours = make()
        with opened(hytrain.Muon, ours, groups_of(ours), **NUMBERS, **for_this_rank(choice)) as opt, late_weights():
            found = results(ours, opt, practice)
        if unequal := differing(found, expected):
            raise AssertionError(f"{choice}: {unequal}")


CPU, GPU = {"k": 0.0}, {"k": 1.0}
ROWS: dict[str, tuple[Any, ...]] = {
    "plain": (plain, loop, CPU, GPU, BOTH),
    "uneven rows": (uneven, loop, BOTH),
    "bfloat16": (bfloat16, loop, CPU, GPU, BOTH),
    "mixed precision": (mixed_precision, loop, BOTH),
    "layers that move": (plain, moving, {"policy": "random"}),
    "without overlap": (plain, loop, {**BOTH, "overlap": False}),
    "tensor-parallel": (by_columns_and_rows, loop, CPU, BOTH),
    "parts that lie by columns": (lying_by_columns, loop, CPU, BOTH),
    "matrices that take turns": (taking_turns, loop, CPU, BOTH),
    "accumulation": (plain, accumulated, {**BOTH, "grad_accumulation": 2}),
    "clipped by the loop": (plain, clipped_by_the_loop, {**BOTH, "updates": "step"}),
    "a scheduler": (plain, scheduled, BOTH),
}


def compare_row(name: str) -> None:
    make, practice, *choices = ROWS[name]
    compare(make, practice, *choices)


@pytest.mark.parametrize("name", ROWS)
def test_the_bits_of_torchs_muon_on_whole_matrices(name: str, two_ranks: RankGroup) -> None:
    two_ranks.run(compare_row, name)


@pytest.mark.parametrize("make", [plain, hybrid, in_two_dimensions])
def test_the_same_on_four_ranks(make: Callable[[], nn.Module], four_ranks: RankGroup) -> None:
    """Of replicas, too, and of matrices that are divided in both dimensions."""
    four_ranks.run(compare, make, loop, {"k": (0.0, 1.0, 0.5, 0.0)})


# ---------------------------------------------------------------- pieces, rounded state, norms, steps without gradients


def placements_agree(make: Callable[[], nn.Module], practice: Practice, **options: Any) -> dict[str, Tensor]:
    """The same bits, whatever each rank's placements are, and however small the pieces in which state visits."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "SLOT_NUMEL", 640)
        for choice in (GPU, CPU, BOTH):
            model = make()
            with opened(hytrain.Muon, model, groups_of(model), **NUMBERS, **for_this_rank(choice), **options) as opt:
                found.append(results(model, opt, practice))
    first, *others = found
    assert [differing(other, first) for other in others] == [[], []]
    return first


def clipped(model: nn.Module, opt: Any) -> None:
    """Some of the steps are."""
    for step in range(STEPS):
        backward(model, step)
        if isinstance(opt, Whole):
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        opt.zero_grad()


def clip() -> None:
    theirs = plain()
    expected = results(theirs, Whole(theirs), clipped)
    found = placements_agree(plain, clipped, max_grad_norm=MAX_NORM)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_clipped_by_one_norm(two_ranks: RankGroup) -> None:
    two_ranks.run(clip)


def rounded() -> None:
    found, exact = (placements_agree(bfloat16, loop, state_dtype=dtype) for dtype in ("float8", "float32"))
    assert not torch.equal(found["head.weight"], exact["head.weight"])


def test_rounded_state_and_pieces(two_ranks: RankGroup) -> None:
    two_ranks.run(rounded)


def poisoned(model: nn.Module, opt: Any) -> None:
    """Rank 1 has an inf in the third step, whose update torch's loop leaves out."""
    for step in range(STEPS):
        loss = next_token_loss(model, step)
        (loss * torch.inf if (step, dist.get_rank()) == (2, 1) else loss).backward()
        if step != 2 or isinstance(opt, hytrain.Muon):
            opt.step()
        opt.zero_grad()


def skip() -> None:
    compare(plain, poisoned, {**BOTH, "on_nonfinite": "skip"})


def test_all_ranks_skip_a_step(two_ranks: RankGroup) -> None:
    two_ranks.run(skip)


def by_hand(model: nn.Module, opt: Any) -> None:
    """Only rank 0 has gradients, which it has set itself: ones. To torch's Muon the others are zeros."""
    for p in model.parameters():
        if dist.get_rank() == 0 or isinstance(opt, Whole):
            p.grad = torch.full_like(p, float(dist.get_rank() == 0), requires_grad=False)
    opt.step()
    opt.zero_grad()


def without_gradients() -> list[str]:
    """What the step has changed on this rank, and nobody waits for ever."""
    ours, theirs = plain(), plain()
    expected = results(theirs, Whole(theirs), by_hand)
    before = {name: local(p.detach()).clone() for name, p in ours.named_parameters()}
    with opened(hytrain.Muon, ours, groups_of(ours), **NUMBERS, **for_this_rank(BOTH)) as opt:
        found = results(ours, opt, by_hand)
        if dist.get_rank() == 0:
            assert differing(found, expected) == []
        changed = differing({name: found[name] for name in before}, before)
        loop(ours, opt, range(2))
    return changed


def test_a_rank_without_gradients_takes_part(two_ranks: RankGroup) -> None:
    first, second = two_ranks.run(without_gradients)
    assert first and second == []


# ---------------------------------------------------------------- who does what, and when


def observed(make: Callable[[], nn.Module], choice: dict[str, Any]) -> tuple[list[list[str]], list[tuple[int, ...]]]:
    """The rounds in which this rank took part in three steps, and the shapes that it orthogonalized."""
    turns, shapes = list[list[str]](), list[tuple[int, ...]]()
    round_, orthogonalized = SharedMatrices._round, shared.orthogonalized

    def noted(self: SharedMatrices, matrices: Sequence[SharedMatrix], *rest: Any) -> dict[str, Tensor]:
        turns.append([matrix.name for matrix in matrices])
        return round_(self, matrices, *rest)

    def counted(matrix: Tensor, hyper: MuonHyper) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return orthogonalized(matrix, hyper)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMatrices, "_round", noted)
        patch.setattr(shared, "orthogonalized", counted)
        model = make()
        with opened(hytrain.Muon, model, groups_of(model), **NUMBERS, **for_this_rank(choice)) as opt:
            loop(model, opt, range(3))
    return turns, shapes


def test_each_matrix_is_orthogonalized_once_and_all_ranks_keep_one_order(two_ranks: RankGroup) -> None:
    """Whatever their placements are. Both have work; what one rank has all of is no other's."""
    (first, of_first), (second, of_second) = two_ranks.run(observed, plain, BOTH)
    assert first == second and len(first) % 3 == 0
    names = [name for turn in first for name in turn]
    assert len(names) == 3 * len({*names}) == 3 * 8 and not any("scale" in name for name in names)
    expected = 3 * (2 * [(67, 32)] + 3 * [(48, 32), (32, 48)])
    assert sorted([*of_first, *of_second]) == sorted(expected)
    assert {len(of_first), len(of_second)} == {12}


def test_replicas_are_orthogonalized_once(four_ranks: RankGroup) -> None:
    found = four_ranks.run(observed, hybrid, {"k": (0.0, 1.0, 1.0, 0.0)})
    assert all(turns == found[0][0] for turns, _ in found)
    assert [len(shapes) for _, shapes in found] == 4 * [6]


# ---------------------------------------------------------------- saved, checked, added


def whole(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Weights and momentum of all ranks together."""
    names = [name for group in groups_of(model) for name, _ in group["params"]]
    found: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    for index, entry in opt.state_dict()["state"].items():
        found |= {f"{names[index]}.{plane}": value for plane, value in entry.items()}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in found.items()}


def save(folder: Path) -> dict[str, Tensor]:
    model = plain()
    with opened(hytrain.Muon, model, groups_of(model), **NUMBERS, **for_this_rank({"k": (0.0, 1.0, 0.5, 0.0)})) as opt:
        loop(model, opt, range(3))
        opt.save(folder)
        return whole(model, opt)


def resume(folder: Path, saved: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is loaded, and what torch's Muon and HyTrain make of it in the same steps."""
    ours, theirs = plain(), plain()
    for model in (ours, theirs):
        with torch.no_grad():
            for name, p in model.named_parameters():
                local(p).copy_(part_of(saved[name], p))
    reference = Whole(theirs)
    with opened(hytrain.Muon, ours, groups_of(ours), **NUMBERS, **for_this_rank(BOTH)) as opt:
        opt.load(folder)
        loaded = whole(ours, opt)
        for name, own in reference.own.items():
            of, prefix = own if own.ndim == 2 else theirs.get_parameter(name), f"{name}."
            entry = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
            planes = {plane: part_of(value, of) for plane, value in entry.items() if plane != "step"}
            reference.state[own] = {plane: value.clone() for plane, value in (planes | {"step": entry["step"]}).items()}
        found = results(ours, opt, lambda model, opt: loop(model, opt, range(3, STEPS)))
    expected = results(theirs, reference, lambda model, opt: loop(model, opt, range(3, STEPS)))
    assert differing(found, expected) == []
    return loaded, found


def test_saved_on_four_and_loaded_on_two_and_one(four_ranks: RankGroup, two_ranks: RankGroup, tmp_path: Path) -> None:
    saved, *_ = four_ranks.run(save, tmp_path)
    (loaded, _), *_ = two_ranks.run(resume, tmp_path, saved)
    assert differing(loaded, saved) == []
    model = Decoder(hidden=HIDDEN)
    with opened(hytrain.Muon, model, groups_of(model), k=0.5, **NUMBERS) as opt:
        opt.load(tmp_path)
        alone, shared_by_four = ({n: v for n, v in of.items() if "momentum" in n} for of in (whole(model, opt), saved))
        assert alone and differing(alone, shared_by_four) == []


def checked() -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_say", lambda level, text: said.append(text))
        model = plain()
        with opened(hytrain.Muon, model, check=2, **NUMBERS) as opt:
            loop(model, opt, range(2))
    return said


def test_the_check_names_what_it_leaves_out(two_ranks: RankGroup) -> None:
    """Of a model without groups, the matrices of the blocks that are shared."""
    for [said] in two_ranks.run(checked):
        assert "the same bits as torch.optim.Muon; not compared: blocks.0.down.weight, blocks.0.up.weight" in said


def added() -> None:
    """Matrices that are unfrozen, and a group that is added: all ranks agree anew."""

    def practice(model: Any, opt: Any) -> None:
        loop(model, opt, range(2))
        model.blocks[1].up.weight.requires_grad_(True)
        loop(model, opt, range(2, 4))

    def made() -> Decoder:
        model = Decoder(hidden=HIDDEN)
        model.blocks[1].up.weight.requires_grad_(False)
        return sharded(model, mesh(2))

    compare(made, practice, BOTH)


def test_matrices_that_are_unfrozen(two_ranks: RankGroup) -> None:
    two_ranks.run(added)


# ---------------------------------------------------------------- streams, as far as they can be shown without a GPU


def on_streams(**options: Any) -> None:
    """Directions are made on another stream than the one that sends them, and their memory is kept for that one."""
    kept: list[tuple[int, Any]] = []
    of: dict[int, Any] = {}  # streams, by the memory that was made on them
    empty_like = torch.empty_like
    direction, keep, visit = SharedMatrices._direction, SharedMatrices.keep, Visits.update
    orthogonalize = SharedMatrices.orthogonalize
    with pytest.MonkeyPatch.context() as patch:
        current = over_host_memory(patch)
        first, second = current.streams
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: kept.append((tensor.data_ptr(), stream)))

        def allocated(like: Tensor, **others: Any) -> Tensor:
            found = empty_like(like, **others)
            of[found.data_ptr()] = current.stream
            return found

        def made(self: SharedMatrices, *first_passes: Any, visits: bool) -> None:
            current.stream = second
            keep(self, *first_passes, visits=visits)

        def sent(self: SharedMatrices, matrix: SharedMatrix, waiting: Mapping[str, Direction]) -> Tensor:
            own = waiting[matrix.name]
            assert own.ready.done in first.waited_for, "the first pass has ended"
            assert (own.elements.data_ptr(), first) in kept
            return direction(self, matrix, waiting)

        def ended(self: SharedMatrices, groups: Sequence[Hyper]) -> Iterator[Any]:
            current.stream = first
            return orthogonalize(self, groups)

        def visited(self: Visits, visits: Sequence[Visit], **others: Any) -> Any:
            found = visit(self, visits, **others)
            for each in visits:
                if each.direction is not None:
                    assert of[each.direction.data_ptr()] is self._transfers._visiting, "or it waits for the host"
            return found

        patch.setattr(SharedMatrices, "_direction", sent)
        patch.setattr(SharedMatrices, "keep", made)
        patch.setattr(SharedMatrices, "orthogonalize", ended)
        patch.setattr(Visits, "update", visited)
        patch.setattr(torch, "empty_like", allocated)
        compare(plain, loop, *({**options, **choice} for choice in (CPU, GPU)))


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e9}], ids=str)
def test_streams_that_send_wait_for_those_that_have_made(options: dict[str, Any], two_ranks: RankGroup) -> None:
    two_ranks.run(on_streams, **options)


# ---------------------------------------------------------------- stages of a pipeline, each shared by two ranks


def stages() -> DeviceMesh:
    return mesh(2, 2, names=("pipeline", "shard"))


def staged() -> nn.Module:
    torch.manual_seed(dist.get_rank() // 2)
    stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 32)) for _ in range(2)))
    for block in stage:
        fully_shard(block, mesh=stages()["shard"])
    fully_shard(stage, mesh=stages()["shard"])
    return stage


def piped(model: nn.Module, opt: Any) -> None:
    stage = PipelineStage(model, dist.get_rank() // 2, 2, torch.device("cpu"), group=stages()["pipeline"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, y: functional.mse_loss(out, y) / 4, scale_grads=False)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank() % 2)
        batch = torch.randn(8, 32, generator=generator)
        schedule.step(*[batch] * stage.is_first, **({"target": batch.roll(1, 1)} if stage.is_last else {}))
        opt.step()
        opt.zero_grad()


def compare_stages() -> None:
    group = stages()["pipeline"].get_group()
    compare(staged, piped, {"k": (0.0, 1.0, 1.0, 0.0), "pipeline_group": group})


def test_stages_exchange_their_own_matrices(four_ranks: RankGroup) -> None:
    four_ranks.run(compare_stages)
