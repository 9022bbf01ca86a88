"""What a job on several ranks does otherwise than one on one device. `step` calls this in each of torchrun's processes.

    suite ─▶ torchrun ─▶ step on every rank: join ─▶ model ─▶ one of SYSTEMS ─▶ a segment's steps ─▶ merged ─▶ rank 0
                                                                                                       writes the row
All ranks build the same model and then keep their part of it: a shard of each block (FSDP2), a slice of each matrix
(tensor parallelism), some of the layers (a pipeline), or everything (DDP). Under FSDP2 they may share sequences, too.
FSDP2 without HyTrain has fp32 shards and computes in bf16; with HyTrain the shards are bf16.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from benchmarks import systems, text
from benchmarks.parts import Job
from benchmarks.pipelines import MICRO_BATCHES, pipelined
from benchmarks.systems import Pass, Running, Setting, System, forward_and_backward

#: What a GPU could do at most, in TFLOP/s: dense bf16 products, from the data sheets.
PEAK_TFLOPS: Final = {"H100": 989.4, "H200": 989.4, "A100": 312.0}


def rank() -> int:
    """Of this process in its job; 0 of a job without ranks."""
    return int(os.environ.get("RANK", 0))


def leads() -> bool:
    return rank() == 0


def join(job: Job, run_dir: str) -> str:
    """Take this rank's device and join the others. Returns the first rank's `run_dir`.

    Peers compute with an equal share of the cores; HyTrain shares them out by itself.
    """
    local = int(os.environ["LOCAL_RANK"])
    if not job.system.startswith("hytrain"):
        cores = sorted(os.sched_getaffinity(0))
        share = max(len(cores) // job.ranks, 1)
        os.sched_setaffinity(0, cores[local * share : (local + 1) * share])
        torch.set_num_threads(share)
    if job.device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo")
    return str(gathered(run_dir)[0])


def report(error: Exception) -> None:
    """Tell torchrun, which prints the error that came first: the others may follow from it."""
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)


def leave() -> None:
    """Wait for all ranks: one that ends early would take the others with it."""
    dist.barrier()


def gathered(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def merged(row: dict[str, Any], job: Job) -> dict[str, Any]:
    """All ranks' rows as one: the slowest rank's time of each step, the most memory, the mean loss.

    Of a pipeline only the last rank has a loss.
    """
    rows = gathered(row)
    times = {name: [max(each) for each in zip(*(row[name] for row in rows))] for name in ("settling_s", "steps_s")}
    step_s = statistics.median(times["steps_s"])
    tokens = row["batch"] * job.sequence * job.ranks
    found = {
        **rows[0],
        **times,
        "step_s": step_s,
        "tokens_per_s": round(tokens / step_s, 1),
        "samples_per_s": round(tokens / job.length / step_s, 3),
        "gpu_peak_gb": max(row["gpu_peak_gb"] for row in rows),
        "gpu_peak_gb_by_rank": [row["gpu_peak_gb"] for row in rows],
    }
    for name in {"loss", "held_out_loss", "accuracy"} & row.keys():
        found[name] = round(statistics.mean(row[name] for row in rows), 4)
    if job.schedule:
        found["loss"] = rows[-1]["loss"]
    if "k" in row:
        found |= {"k": statistics.mean(row["k"] for row in rows), "k_by_rank": [row["k"] for row in rows]}
        found["stall_s"] = max(row["stall_s"] for row in rows)
    return found


def peak_tflops() -> float | None:
    """This GPU's, None if it is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for model, peak in PEAK_TFLOPS.items() if model in name), None)


# ---------------------------------------------------------------- FSDP2, tensor parallelism, DDP


def sharded(model: nn.Module, job: Job, **options: Any) -> nn.Module:
    """FSDP2 over each block and the root, over tensor parallelism if the job asks for it. `options`: fully_shard's."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(job.device, (job.ranks // job.tensor, job.tensor), mesh_dim_names=("data", "tensor"))
    if job.tensor > 1:
        tensor_parallel(model, mesh["tensor"])
    blocks: Any = model.transformer.h if job.reads_text else model.model.layers  # type: ignore[union-attr]
    for block in blocks:
        fully_shard(block, mesh=mesh["data"], **options)
    fully_shard(model, mesh=mesh["data"], **options)
    if job.is_on_meta:
        materialize(model, "cpu" if options.get("offload_policy") else job.device, job.device)
    return model


def context(job: Job) -> Any:
    """The ranks that share this one's sequences, as in recipes; None if each has whole ones."""
    from hytrain.recipe.context import Context

    if job.context == 1:
        return None
    over = (job.ranks // job.context, job.context)
    return Context(init_device_mesh(job.device, over, mesh_dim_names=("data", "context"))["context"])


def materialize(model: Any, shards: str, device: str) -> None:
    """Random weights for a Llama that was sharded on the meta device: each rank makes its shards on device `shards`."""
    model.to_empty(device=shards)
    with torch.device(device):  # its frequencies are no parameters
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    torch.manual_seed(rank())
    with torch.no_grad():
        for parameter in model.parameters():
            shard = parameter.to_local()
            shard.normal_(0.0, 0.02) if parameter.ndim > 1 else shard.fill_(1.0)


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """GPT-2's heads, hidden units and vocabulary divided among the ranks of `mesh`; norms and positions replicated.

    Transformers stores the matrices transposed, and queries, keys and values in one: each rank needs its heads of all.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    body = model.transformer
    for block in body.h:
        attention, mlp = block.attn, block.mlp
        attention.c_attn, attention.c_proj = _linear(attention.c_attn, mesh.size(), 3), _linear(attention.c_proj)
        attention.split_size //= mesh.size()
        mlp.c_fc, mlp.c_proj = _linear(mlp.c_fc), _linear(mlp.c_proj)
        parallelize_module(attention, mesh, {"c_attn": ColwiseParallel(), "c_proj": RowwiseParallel()})
        parallelize_module(mlp, mesh, {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()})
    parallelize_module(body.wte, mesh, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    model.lm_head.weight = body.wte.weight
    for module in (body.wpe, body.ln_f, *(norm for block in body.h for norm in (block.ln_1, block.ln_2))):
        _replicate(module, mesh)
    loss_parallel().__enter__()  # for as long as this process lives: the loss is computed from divided logits


def _linear(conv: Any, ranks: int = 1, groups: int = 1) -> nn.Linear:
    """The same layer as nn.Linear. If it is `groups` matrices side by side, its rows are ordered by rank first."""
    fan_in, fan_out = conv.weight.shape
    with torch.device(conv.weight.device):
        linear = nn.Linear(fan_in, fan_out, dtype=conv.weight.dtype)
    for ours, theirs in ((linear.weight, conv.weight.T), (linear.bias, conv.bias)):
        rows = theirs.detach().reshape(groups, ranks, fan_out // groups // ranks, -1).transpose(0, 1)
        ours.data.copy_(rows.reshape(ours.shape))
    return linear


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank computes all of this module. Its parameters become DTensors, like all others."""

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs)

    distribute_module(module, mesh, input_fn=enter, output_fn=lambda module, output, mesh: output.to_local())


def pass_of(job: Job) -> Pass:
    return partial(forward_and_backward, loss_of=text.loss_of) if job.reads_text else forward_and_backward


def fsdp2(model: nn.Module, setting: Setting, **algorithm: bool) -> Running:
    """fp32 shards, bf16 compute and reduction, torch's fused AdamW. `option`: what is left out or offloaded."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
    if setting.option == "cpu-offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=setting.job.device == "cuda")
    resident = partial(systems.torch_adamw, **algorithm)
    build = systems.forward_backward if setting.option == "forward-backward" else resident
    return build(sharded(model.float(), setting.job, **options), setting, pass_of(setting.job))


def hytrain(model: nn.Module, setting: Setting, **algorithm: bool) -> Running:
    """HyTrain over FSDP2's shards, or over a pipeline's stage."""
    if setting.job.schedule:
        stage, run = pipelined(model, setting)
        group, backwards = dist.group.WORLD, MICRO_BATCHES * setting.job.ranks
        found = systems.hytrain_adamw(stage, setting, run, pipeline_group=group, grad_accumulation=backwards)
        return Running(found.step, found.optimizer, fixed_batch=True)
    return systems.hytrain_adamw(sharded(model, setting.job), setting, pass_of(setting.job), **algorithm)


def ddp(model: nn.Module, setting: Setting) -> Running:
    """Everything on every rank: fp32 weights under bf16 autocast."""
    devices = [torch.cuda.current_device()] if setting.job.device == "cuda" else None
    run = partial(pass_of(setting.job), autocast=True)
    return systems.torch_adamw(nn.parallel.DistributedDataParallel(model.float(), devices), setting, run)


# ---------------------------------------------------------------- pipelines


def resident_pipeline(model: nn.Module, setting: Setting) -> Running:
    """Masters and moments of each stage on its GPU."""
    if not setting.job.schedule:
        raise systems.Unavailable("on several ranks, no-offload is a pipeline's; take fsdp2:no-offload")
    stage, run = pipelined(model, setting)
    return Running(systems.no_offload(stage, setting, run).step, fixed_batch=True)


SYSTEMS: Final[dict[str, System]] = {
    "fsdp2": System(fsdp2),
    "hytrain": System(hytrain),
    "fsdp2-muon": System(partial(fsdp2, use_muon=True)),
    "hytrain-muon": System(partial(hytrain, use_muon=True)),
    "ddp": System(ddp),
    "no-offload": System(resident_pipeline),
    **{name: systems.SYSTEMS[name] for name in ("deepspeed-zero2", "deepspeed-zero3")},
}
