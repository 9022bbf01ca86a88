"""Co-training on several ranks, which have one CPU trainer: with FSDP2, and with a pipeline.

The bits do not depend on the CPU's share, and the result is that of the whole batch within rounding. `Decoder`'s
micro-batches are `tokens`; those of the ranks differ, those of a pipeline's stages do not.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from helpers import LR, adamw, differing, late_weights
from ranks import COLLECTIVE_LIMIT_S, RankGroup
from sharded_models import STEPS, Block, Decoder, part_loss, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from variants import slow

from examples.studies.cotraining import shares, whole
from examples.studies.cotraining.partner import Partner, hang_s
from examples.studies.cotraining.planner import Step
from examples.studies.cotraining.shares import CoTraining, cotrain
from examples.studies.cotraining.team import Team
from examples.studies.cotraining.whole import Gradients, Layout, Shared
from hytrain.errors import ClusterError, UnsupportedError, UsageError
from hytrain.run.ranks import Ranks
from hytrain.tensors import local, part_of
from protocol.handles import PAGE_BYTES

PARTS = 4
LOSS = partial(part_loss, parts=PARTS)
#: The CPU's parts in each step, from each number to another one.
ALL = (0, 1, 3, 2, 0, 3)


class Scheduled:
    """A planner that has the next number of parts in each step. Only the first rank makes one."""

    why = "the test says so"

    def __init__(self, parts: int, most: int, after: int) -> None:
        assert dist.get_rank() == 0 and (parts, most) == (PARTS, PARTS - 1)
        self.cpu_parts, self._left = -1, iter(ALL)

    def observe(self, step: Step) -> None:
        """What was measured changes nothing."""

    def decide(self) -> bool:
        self.cpu_parts = next(self._left)
        return True


@contextmanager
def scheduled() -> Iterator[None]:
    with patch.object(shares, "CpuPartsPlanner", Scheduled), patch.object(shares, "FIRST_TRIAL", 10**9):
        yield


def micro_batches(step: int, rank: int, count: int = PARTS) -> list[dict[str, Tensor]]:
    return [{"tokens": tokens(100 * step + index, rank)} for index in range(count)]


# ---------------------------------------------------------------- ways to share a model


class Forgetful(Block):
    """A block with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.2, self.training)


def forgetful() -> Decoder:
    return Decoder(block=partial(Forgetful, 35, True))


def in_bfloat16() -> Decoder:
    return Decoder().to(torch.bfloat16)


@cache
def mesh(device: str, *shape: int) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model: Decoder, *shape: int, **options: Any) -> Decoder:
    device = next(model.parameters()).device.type
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh(device, *shape), **options)
    return model


class Part(nn.Module):
    """A pipeline's stage of two, with the names of the whole decoder."""

    def __init__(self, whole: Decoder, index: int) -> None:
        super().__init__()
        self.is_first = index == 0
        self.blocks = nn.ModuleDict({str(each): whole.blocks[each] for each in ([0, 1], [2])[index]})
        if self.is_first:
            self.embedding = whole.embedding
        else:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.is_first else x
        for block in self.blocks.values():
            x = block(x)
        logits: Tensor = x if self.is_first else self.head(self.norm(x))
        return logits


def pipe(part: Part) -> Callable[[Sequence[Any]], Tensor | None]:
    """What trains micro-batches through the pipeline: 1F1B, or GPipe where there are fewer than stages."""
    schedules, device = dict[int, Any](), next(part.parameters()).device

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten()) / PARTS

    def run(batches: Sequence[Any]) -> Tensor | None:
        count = len(batches)
        if count not in schedules:
            stage = PipelineStage(part, dist.get_rank(), 2, device)
            kind = Schedule1F1B if count >= 2 else ScheduleGPipe
            schedules[count] = kind(stage, count, loss_fn=loss_of, scale_grads=False)
        whole, losses = torch.cat([batch["tokens"] for batch in batches]).to(device), list[Tensor]()
        if part.is_first:
            schedules[count].step(whole[:, :-1].contiguous())
            return None
        schedules[count].step(target=whole[:, 1:], losses=losses)
        return torch.stack(losses)

    return run


# ---------------------------------------------------------------- in a rank

#: A model as a rank has it, and with a pipeline what trains through it.
Made = tuple[Any, Callable[[Sequence[Any]], Tensor | None] | None]


def made(way: str, build: Callable[[], Decoder], device: str = "cpu") -> Made:
    torch.manual_seed(7)
    model = build().to(device)
    match way:
        case "pipeline":
            part = Part(model, dist.get_rank())
            return part, pipe(part)
        case "ZeRO-2":
            return shard(model, 2, reshard_after_forward=False), None
        case "HSDP":
            return shard(model, 2, 1), None
        case _:
            return shard(model, 2), None


def options_of(way: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, **({"pipeline_group": dist.group.WORLD} if way == "pipeline" else {})}


def trained(
    way: str,
    build: Callable[[], Decoder],
    cpu_parts: int | str,
    before: Callable[[CoTraining, int], object] = lambda cotraining, step: None,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Tensor]:
    """This rank's parts of weights and state, and its losses. The last step has fewer micro-batches."""
    model, pipeline = made(way, build, device)
    named, found, torch_seed = dict(model.named_parameters()), dict[str, Tensor](), dist.get_rank()
    with adamw(model, **options_of(way, options)) as opt:
        if pipeline is None:  # an evaluation, after which FSDP2's root has whole parameters
            with torch.no_grad():
                model(tokens(0, 0).to(device))
        cotraining = cotrain(opt, model, build, LOSS, parts=PARTS, cpu_parts=cpu_parts, pipeline=pipeline)
        torch.manual_seed(torch_seed)
        for step in range(STEPS):
            before(cotraining, step)
            data_rank = 0 if pipeline else dist.get_rank()
            count = PARTS if step < STEPS - 1 else 2
            batches = micro_batches(step, data_rank, count)
            for batch in batches if pipeline and dist.get_rank() == 1 else ():
                batch["tokens"][:, 0] = 0  # which this stage does not see: the CPU trains the first rank's
            losses = cotraining.backward(batches)
            opt.step()
            opt.zero_grad()
            if pipeline is None or dist.get_rank() == 1:
                found[f"losses.{step}"] = losses
        opt.synchronize()
        cotraining.close()
        found |= {name: local(each.detach()).clone() for name, each in named.items()}
        for index, entry in opt.state_dict()["state"].items():
            found |= {f"{name}.{index}": local(torch.as_tensor(each)).clone() for name, each in entry.items()}
    return found


def whole_batch(way: str) -> dict[str, Tensor]:
    """Weights after the same steps of torch's AdamW on one rank, each with all micro-batches at once."""
    model = Decoder()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for step in range(STEPS):
        data_ranks = [0] if way == "pipeline" else [0, 1]
        count = PARTS if step < STEPS - 1 else 2
        batches = chain(*(micro_batches(step, each, count) for each in data_ranks))
        batch = torch.cat([each["tokens"] for each in batches])
        (part_loss(model, {"tokens": batch}, parts=PARTS) * count).backward()
        opt.step()
        opt.zero_grad()
    return dict(model.named_parameters())


def compare(way: str, build: Callable[[], Decoder], **options: Any) -> None:
    expected = trained(way, build, 0, **options)
    with scheduled(), late_weights():
        found = trained(way, build, "auto", **options)
    assert not (unequal := differing(found, expected)), unequal
    if build is Decoder:
        beside_the_whole_batch(way, found, 1e-4)


def beside_the_whole_batch(way: str, found: dict[str, Tensor], rounding: float) -> None:
    """This rank's weights are those of the whole batch, but for a small part of what they have learned."""
    start, whole = dict(Decoder().named_parameters()), whole_batch(way)
    for name, parameter in made(way, Decoder)[0].named_parameters():
        before, after = (part_of(values[name].detach(), parameter) for values in (start, whole))
        assert (found[name].cpu() - after).norm() <= rounding * (after - before).norm(), name


@pytest.mark.parametrize(
    ("way", "build", "options"),
    [
        ("FSDP2", Decoder, {"k": 0.4}),
        ("FSDP2", forgetful, {"k": 0.0, "max_grad_norm": 0.5}),
        slow("FSDP2", Decoder, {"k": 0.0, "visit": 0.5, "offload_weights": 1.0}),
        slow("ZeRO-2", in_bfloat16, {"k": 1.0}),
        slow("HSDP", Decoder, {"k": 0.0}),
        ("pipeline", Decoder, {"k": 0.4}),
        slow("pipeline", in_bfloat16, {"k": 0.0, "max_grad_norm": 0.5}),
    ],
    ids=["FSDP2", "dropout", "offloaded", "ZeRO-2", "HSDP", "pipeline", "clipped-pipeline"],
)
def test_the_bits_of_every_share_and_the_result_of_the_whole_batch(
    way: str, build: Any, options: dict[str, Any], two_ranks: RankGroup
) -> None:
    two_ranks.run(compare, way, build, **options)


def on_gpus(way: str) -> None:
    torch.use_deterministic_algorithms(True)
    results = []
    for k in (1.0, 0.4, 0.0):
        with scheduled(), late_weights():
            results.append(trained(way, Decoder, "auto", device="cuda", k=k))
        assert not (unequal := differing(results[-1], results[0])), (k, unequal)
    torch.use_deterministic_algorithms(False)
    beside_the_whole_batch(way, results[0], 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["FSDP2", "pipeline"])
def test_two_gpus_and_the_cpu_make_the_batch_within_rounding(way: str, two_gpus: RankGroup) -> None:
    """What the CPU trains is rounded in another way, but for each share its bits are the same for any owner."""
    two_gpus.run(on_gpus, way)


def lost(way: str, number: int) -> list[str]:
    """The CPU trainer gets a signal before the third step. Returns what this rank has said.

    While ranks wait for it, torch's own collectives wait less long than the first one does.
    """
    said, receive = list[str](), Team.receive

    def hurt(cotraining: CoTraining, step: int) -> None:
        cotraining.say = said.append
        if step == 2 and (team := cotraining._team) is not None and team.partner is not None:
            team.partner._timeout_s = 2.0
            os.kill(team.partner.pid, number)

    def received(self: Team, job: int) -> Any:
        _set_pg_timeout(timedelta(seconds=0.1))
        try:
            return receive(self, job)
        finally:
            _set_pg_timeout(timedelta(seconds=COLLECTIVE_LIMIT_S))

    with patch.object(Team, "receive", received), patch.object(dist, "new_group", wraps=dist.new_group) as made:
        found = trained(way, Decoder, 2, hurt, k=0.4)
    assert made.call_args.kwargs["timeout"].total_seconds() > hang_s()
    assert not (unequal := differing(found, trained(way, Decoder, 0, k=0.4))), unequal
    return said


@pytest.mark.parametrize(
    ("way", "number", "reason"),
    [
        ("FSDP2", signal.SIGKILL, "it was killed by SIGKILL"),
        ("FSDP2", signal.SIGSTOP, "it has not answered for 2 s"),
        ("pipeline", signal.SIGKILL, "it was killed by SIGKILL"),
        slow("pipeline", signal.SIGSTOP, "it has not answered for 2 s"),
    ],
    ids=["FSDP2-dies", "FSDP2-hangs", "pipeline-dies", "pipeline-hangs"],
)
def test_a_cpu_trainer_that_is_lost_costs_no_bit(way: str, number: int, reason: str, two_ranks: RankGroup) -> None:
    two_ranks.environment["HYTRAIN_HANG_TIMEOUT_S"] = "7200"  # longer than torch waits
    try:
        [sentence], others = two_ranks.run(lost, way, number)
    finally:
        two_ranks.environment.clear()
    assert f"is lost: {reason}; from here on, all parts are trained without" in sentence
    assert others == [], "one rank says it"


def automatic(way: str, seconds: float) -> tuple[list[str], float]:
    """Train until the share is chosen: a part takes so long on the CPU. Returns what was said, and the CPU's parts."""
    (model, pipeline), said, receive, ranks = made(way, Decoder), list[str](), Partner.receive, Ranks.of_job()

    def received(self: Partner, job: int, *, wait: bool = True) -> Any:
        answer = receive(self, job)  # waits: here, steps are too short for an answer in the next one
        assert answer is not None
        return replace(answer, seconds=seconds)

    with adamw(model, **options_of(way, {"k": 0.4})) as opt, patch.object(Partner, "receive", received):
        cotraining = cotrain(opt, model, Decoder, LOSS, parts=PARTS, pipeline=pipeline)
        cotraining.say = said.append
        while not ranks.gather(said)[0]:
            cotraining.backward(micro_batches(0, 0 if pipeline else ranks.rank))
            opt.step()
            opt.zero_grad()
        cotraining.close()
    return said, cotraining.numbers["cpu_parts"]


@pytest.mark.parametrize("way", ["FSDP2", slow("pipeline")])
@pytest.mark.parametrize(("seconds", "is_worth_it"), [(0.0, True), (1e3, False)])
def test_the_first_rank_chooses_the_share_by_measured_speed(
    seconds: float, is_worth_it: bool, way: str, two_ranks: RankGroup
) -> None:
    """Where none pays, it says why."""
    ([sentence], cpu_parts), others = two_ranks.run(automatic, way, seconds)
    assert others == ([], cpu_parts), "the other rank does the same, and says nothing"
    assert (cpu_parts > 0) is is_worth_it
    if not is_worth_it:
        assert re.fullmatch(
            r"step \d+: the CPU trains 0 of 4 parts of each batch, since a part takes \S+ s on the GPU and 1e\+03 s on "
            r"the CPU, so a step \S+ s with 1 of them on the CPU and \S+ s with none",
            sentence,
        )


def refuse_ways() -> None:
    """Ways to share a model of which no CPU trainer can train micro-batches."""
    split: Any = Decoder()
    parallelize_module(split, mesh("cpu", 2), {f"blocks.{index}.up": ColwiseParallel() for index in range(3)})
    divided: Any = shard(Decoder(), 2)
    divided.set_gradient_divide_factor(1.0)
    mixed = shard(Decoder(), 2, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    for model, pipeline in ((split, None), (divided, None), (mixed, None), (shard(Decoder(), 2), max)):
        with (
            adamw(model) as opt,
            pytest.raises(UnsupportedError, match=r"^cotrain\(\) on several ranks: a CPU trainer"),
        ):
            cotrain(opt, model, Decoder, LOSS, parts=PARTS, pipeline=pipeline)
    model = shard(Decoder(), 2)
    here = Ranks(dist.get_rank(), 2, node=(dist.get_rank(),))
    with adamw(model) as opt, patch.object(Ranks, "of_job", lambda: here):
        with pytest.raises(UnsupportedError, match="on several machines: ranks and CPU trainer share memory"):
            cotrain(opt, model, Decoder, LOSS, parts=PARTS)
    model = nn.Linear(2, 2)
    with adamw(model, pipeline_group=dist.group.WORLD) as opt:
        with pytest.raises(UnsupportedError, match="several stages have a bias, so the CPU trainer cannot"):
            cotrain(opt, model, Decoder, LOSS, parts=PARTS, pipeline=lambda batches: None)


def test_other_ways_to_share_a_model_are_refused(two_ranks: RankGroup) -> None:
    two_ranks.run(refuse_ways)


def refuse_together() -> None:
    """What goes wrong on one rank is raised on both, so none waits for the other."""
    model, rank = shard(Decoder(), 2), dist.get_rank()
    there = "rank 1: " if rank == 0 else ""
    with adamw(model) as opt:
        with pytest.raises(UsageError, match=r"ranks give cotrain\(\) other parts or cpu_parts"):
            cotrain(opt, model, Decoder, LOSS, parts=PARTS, cpu_parts=rank)
        wrong: Any = partial(Decoder, 2)
        with pytest.raises(ClusterError, match="^(rank 0: )?the CPU trainer did not start: ConfigError: build"):
            cotrain(opt, model, wrong, LOSS, parts=PARTS, cpu_parts=1)
        cotraining = cotrain(opt, model, Decoder, LOSS, parts=PARTS, cpu_parts=2)
        batches = micro_batches(0, rank)
        with pytest.raises(UnsupportedError, match=rf"^{there}a micro-batch\['more'\] is of set"):
            cotraining.backward([{**batch, "more": {1} if rank else 1} for batch in batches])
        opt.zero_grad()
        model.train(rank == 0)
        with pytest.raises(UsageError, match=f"^{there}the mode of the model has changed"):
            cotraining.backward(batches)
        model.train()
        with pytest.raises(UsageError, match=r"^backward\(\) got 4 and 5 micro-batches: from 1 to parts=4, "):
            cotraining.backward(micro_batches(0, rank, PARTS + rank))
        with patch.object(Partner, "hand_over", side_effect=ClusterError("no")):
            with pytest.raises(ClusterError, match=r"^no\b" if rank == 0 else r"^rank 0: no\b"):
                cotraining.backward(batches)
        opt.zero_grad()
        cotraining.backward(batches)
        opt.step()
        cotraining.close()


def descriptors() -> list[str]:
    """What this process has open of the memory that is shared."""
    found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sorted(each for each in found if "memfd:hytrain-others" in each)


def refuse_memory() -> None:
    """What the first rank has made is closed if another one cannot map it."""
    model, before, rank = shard(Decoder(), 2), descriptors(), dist.get_rank()
    with adamw(model) as opt, patch.object(whole, "_mapped", side_effect=ClusterError("no room")):
        with pytest.raises(ClusterError, match="no room") as raised:
            cotrain(opt, model, Decoder, LOSS, parts=PARTS, cpu_parts=1)
        assert descriptors() == before
        assert str(raised.value).startswith("rank 1: ") is (rank == 0)


class Told(Decoder):
    """With a buffer, and a module that has modes, which ranks may have of their own."""

    def __init__(self, value: float = 0.0, size: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((size,), value, dtype=dtype))


def refuse_unlike() -> None:
    """Ranks that differ in what the CPU trainer is told once: it has one of it for all."""
    rank = dist.get_rank()
    arguments: dict[str, Any]
    for arguments in ({"value": float(rank)}, {"size": 2 - rank}, {"dtype": (torch.float32, torch.float64)[rank]}):
        model: Any = shard(Told(**arguments), 2)
        refuse_as("the value of shift", model)
    model = shard(Told() if rank else Decoder(), 2)
    refuse_as("the value of shift", model)
    model = shard(Told(), 2)
    model.norm.train(rank == 0)
    refuse_as("the mode of norm", model)
    part: Any = Part(Told(), rank)
    part.register_buffer("shift", torch.full((), float(rank)))
    refuse_as("the value of shift", part, pipe(part), pipeline_group=dist.group.WORLD)
    model = shard(Told(float("nan")), 2)
    with adamw(model) as opt:
        cotraining = cotrain(opt, model, partial(Told, 1.0), LOSS, parts=PARTS, cpu_parts=1)
        cotraining.backward(micro_batches(0, rank))
        opt.step()
        cotraining.close()


def refuse_as(what: str, model: Any, pipeline: Any = None, **options: Any) -> None:
    """In the same words on all ranks, or, of values, on those that do not have the CPU trainer's."""
    with adamw(model, **options) as opt:
        with pytest.raises(UsageError, match=f"^(rank .: )?{what} is not the same on all ranks, but they have one"):
            cotrain(opt, model, Told, LOSS, parts=PARTS, cpu_parts=1, pipeline=pipeline)


def test_ranks_that_differ_in_what_the_cpu_trainer_is_told_are_refused(two_ranks: RankGroup) -> None:
    two_ranks.run(refuse_unlike)


def pinned() -> None:
    """Each rank pins what it reads of a slot, and nobody else's parts."""
    model = shard(Decoder(), 2)
    layout = Layout(Ranks.of_job(), dict(model.named_parameters()))
    shared, calls = Shared(Ranks.of_job(), "gradients", layout, 2), Mock()
    with patch.object(whole, "transfers_for", return_value=calls):
        gradients = Gradients(shared, torch.device("cpu"))
    gradients.of(1, [True] * len(layout.like))
    places = [call.args for call in calls.pin.call_args_list]
    pages = [{*range(start, start + nbytes, PAGE_BYTES)} for start, nbytes in places]
    read = [each for each in shared.own(1).values() if each.nbytes]
    ends = [(each.data_ptr(), each.data_ptr() + each.nbytes - 1) for each in read]
    assert set().union(*pages) == {
        page for first, last in ends for page in range(first - first % PAGE_BYTES, last + 1, PAGE_BYTES)
    }
    assert sum(map(len, pages)) == len(set().union(*pages)), "none twice"
    gradients.close()
    assert [call.args for call in calls.unpin.call_args_list] == places
    shared.close()


def test_a_rank_pins_what_it_reads_of_the_gradients(two_ranks: RankGroup) -> None:
    two_ranks.run(pinned)


def test_memory_that_one_rank_cannot_map_is_closed(two_ranks: RankGroup) -> None:
    two_ranks.run(refuse_memory)


def test_an_error_of_one_rank_is_raised_on_all(two_ranks: RankGroup) -> None:
    two_ranks.run(refuse_together)
