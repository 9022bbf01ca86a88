"""The systems that are timed, by name. Each builds its optimizer and returns the function of one step.

Packages are imported where they are needed: a missing one costs its own row and no other.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import checkpoints
from benchmarks.checkpoints import Saving
from benchmarks.parts import Job

LR: Final = 1e-4
#: With it, Muon's learning rates are AdamW's.
ADJUST: Final = "match_rms_adamw"
#: Parameters that DeepSpeed's ZeRO-3 updates at a time.
SUB_GROUP: Final = 100_000_000
RECORD_PATIENCE_S: Final = 5.0


class Unavailable(Exception):
    """This system cannot do what is asked for, here or at all; the text is the row's error."""


@dataclass(frozen=True)
class Setting:
    """What a system's builder is told besides the model. `option` is what follows the system's colon."""

    option: str
    clip: float
    batch: int
    run_dir: str
    job: Job


class Running:
    """A system that was built: its step, and for HyTrain its own account of what it does.

    `optimizer` is a `hytrain.AdamW`, None for all other systems; of one only its public face is used. `saving` is None
    for a system that is not measured while it saves.
    """

    def __init__(
        self,
        step: Callable[[Tensor], Tensor],
        optimizer: Any = None,
        *,
        fixed_batch: bool = False,
        saving: Saving | None = None,
    ) -> None:
        self.step, self.optimizer, self.saving = step, optimizer, saving
        self.fixed_batch = fixed_batch  # whether other batch sizes need another process

    def records(self, first: int, last: int, loss: float, rank: int = 0) -> list[dict[str, Any]]:
        """HyTrain's records of these steps. Its coordinator holds them until the loop has logged: so log the loss."""
        self.optimizer.log(last, loss=loss)
        path = Path(self.optimizer.run_dir) / (f"metrics-{rank}.jsonl" if rank else "metrics.jsonl")
        deadline = time.monotonic() + RECORD_PATIENCE_S
        found: dict[int, dict[str, Any]] = {}
        while last not in found and time.monotonic() < deadline:
            time.sleep(0.02)
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = (json.loads(line) for line in lines if line.endswith("\n"))
            found = {record["step"]: record for record in whole if "step_s" in record}
        return [found[number] for number in range(first, last + 1) if number in found]

    def command(self, name: str, value: str) -> None:
        """Ask the coordinator as `hytrain-monitor` does. Raises `Unavailable` with its answer if it refuses."""
        from hytrain.errors import ConfigError
        from hytrain.monitoring import Client

        if self.optimizer is None:
            raise Unavailable(f"only HyTrain takes commands such as {name}={value}")
        with Client(str(self.optimizer.run_dir)) as client:
            try:
                client.command(name, value)
            except ConfigError as error:
                raise Unavailable(f"{name}={value}: {error}") from None


@dataclass(frozen=True)
class Training:
    """A system with a loop of its own: `measure(job, segment, model)` trains for a segment's steps; returns its row."""

    measure: Callable[..., dict[str, Any]]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


#: Forward and backward of a model over a batch; returns the loss.
Pass = Callable[[nn.Module, Tensor], Tensor]


def forward_and_backward(model: nn.Module, batch: Tensor, *, loss_of: Pass = loss_of, autocast: bool = False) -> Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16) if autocast else nullcontext():
        loss = loss_of(model, batch)
    loss.backward()
    return loss


def plain_step(
    model: nn.Module, optimizer: Any, max_norm: float = 0.0, *, run: Pass = forward_and_backward
) -> Callable[[Tensor], Tensor]:
    """The usual loop's step; gradients are clipped at `max_norm`, 0 does not."""

    def step(batch: Tensor) -> Tensor:
        loss = run(model, batch)
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---------------------------------------------------------------- without offload, and HyTrain


def forward_backward(model: nn.Module, setting: Setting, run: Pass = forward_and_backward) -> Running:
    """Forward and backward, gradients dropped."""

    def step(batch: Tensor) -> Tensor:
        loss = run(model, batch)
        model.zero_grad()
        return loss

    return Running(step)


def no_offload(
    model: nn.Module, setting: Setting, run: Pass = forward_and_backward, *, use_muon: bool = False
) -> Running:
    """Everything on the device, with fp32 masters: what HyTrain is compared with."""
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizers = _with_muon(model, masters) if use_muon else [torch.optim.AdamW(masters, lr=LR, fused=True)]

    def step(batch: Tensor) -> Tensor:
        loss = run(model, batch)
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        if setting.clip:
            nn.utils.clip_grad_norm_(masters, setting.clip)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](parameters), masters)
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss

    return Running(step, saving=None if use_muon else checkpoints.of_torch(model, masters, optimizers[0]))


def _with_muon(model: nn.Module, masters: list[Tensor]) -> list[torch.optim.Optimizer]:
    """torch's Muon for the masters that HyTrain's Muon has, and AdamW for the rest."""
    from hytrain.checks import muon_groups

    hidden = {id(parameter) for _, parameter in muon_groups(model)[0]["params"]}
    pairs = list(zip(model.parameters(), masters, strict=True))
    matrices, rest = ([one for p, one in pairs if (id(p) in hidden) is of_muon] for of_muon in (True, False))
    return [torch.optim.Muon(matrices, lr=LR, adjust_lr_fn=ADJUST), torch.optim.AdamW(rest, lr=LR, fused=True)]


class Several:
    """Several optimizers over one model, as a loop has them that uses torch's Muon."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def torch_adamw(
    model: nn.Module, setting: Setting, run: Pass = forward_and_backward, *, use_muon: bool = False
) -> Running:
    """The loop that HyTrain replaces."""
    found = list[Tensor](model.parameters())
    optimizers = _with_muon(model, found) if use_muon else [torch.optim.AdamW(found, lr=LR, fused=True)]
    return Running(plain_step(model, Several(optimizers), setting.clip, run=run))


def hytrain_adamw(
    model: nn.Module,
    setting: Setting,
    run: Pass = forward_and_backward,
    *,
    use_muon: bool = False,
    loop_clips: bool = False,
    **more: Any,
) -> Running:
    """The same loop with HyTrain's optimizer, which clips unless `loop_clips`; option "serial": nothing overlaps."""
    import hytrain

    options = {**parse_options(setting.option), **more}
    if setting.job.cap_gib and not setting.job.ranks:
        options["device"] = setting.job.device
    if setting.clip and not loop_clips:
        options["max_grad_norm"] = setting.clip
    if use_muon:
        options |= {"adjust_lr_fn": ADJUST, "adamw": {"lr": LR}}
    kind = hytrain.Muon if use_muon else hytrain.AdamW
    optimizer = kind(model, lr=LR, run_dir=setting.run_dir, **options)
    saving = checkpoints.of_a_recipe(model, optimizer)
    step = plain_step(model, optimizer, setting.clip if loop_clips else 0.0, run=run)
    return Running(step, optimizer, saving=saving)


def accumulating(model: nn.Module, setting: Setting) -> Running:
    """The same with a backward for each sequence of the batch, whose gradients are summed."""

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        losses = []
        for sequence in batch.split(1):
            loss = loss_of(model, sequence) / len(batch)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return hytrain_adamw(model, setting, run, grad_accumulation=setting.batch)


def parse_options(text: str) -> dict[str, Any]:
    """Arguments of an optimizer of HyTrain: "0.2" and "auto" are k, "serial" is overlap=False, others are named.

    "offload_activations" is true.
    """
    options: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, equals, value = word.partition("=") if "=" in word else ("k", "", word)
        if word == "serial":
            options["overlap"] = False
        elif word == "offload_activations":
            options[word] = True
        elif name in ("threads", "host_memory_limit", "gpu_memory_limit"):
            options[name] = int(value)
        else:
            options[name] = float(value) if name in ("k", "visit", "offload_weights") and value != "auto" else value
    return options


# ---------------------------------------------------------------- less memory, and not exact


def bitsandbytes(model: nn.Module, setting: Setting, *, paged: bool) -> Running:
    """8-bit moments, the update on the bf16 weights; paged, the driver moves moments to the host if the GPU is full."""
    import bitsandbytes

    kind = bitsandbytes.optim.PagedAdamW8bit if paged else bitsandbytes.optim.AdamW8bit
    model = model.to(setting.job.device)  # below a cap it comes in host memory
    return Running(plain_step(model, kind(model.parameters(), lr=LR), setting.clip))


def flashoptim(model: nn.Module, setting: Setting, *, releases: bool) -> Running:
    """8-bit moments, and masters of 24 bits; if it releases gradients, updates are made in backward, one by one."""
    from flashoptim import FlashAdamW, enable_gradient_release

    model = model.to(setting.job.device)
    optimizer = FlashAdamW(model.parameters(), lr=LR, master_weight_bits=24)
    assert not (releases and setting.clip), "gradients are gone when they would be clipped"
    if releases:
        enable_gradient_release(model, optimizer)
    return Running(plain_step(model, optimizer, setting.clip))


# ---------------------------------------------------------------- fine-tuning under the Trainer


def sft(model: nn.Module, setting: Setting, *, ours: bool = False) -> Training:
    from benchmarks import sft

    options = {"run_dir": setting.run_dir, **parse_options(setting.option)} if ours else None
    return Training(partial(sft.measure, options=options))


# ---------------------------------------------------------------- batches that grow


def growing(model: nn.Module, setting: Setting, *, serves: bool = True) -> Training:
    """HyTrain, whose batches grow. Without `serves`, no state leaves while torch allocates."""
    from benchmarks import growing

    os.environ["HYTRAIN_RECLAIM"] = str(int(serves))
    running = hytrain_adamw(model, setting)
    return Training(partial(growing.measure, optimizer=running.optimizer))


# ---------------------------------------------------------------- peers


def torchao(model: nn.Module, setting: Setting) -> Running:
    """Its gradients leave for the host while backward runs, as HyTrain's do; its update waits for step()."""
    from torchao.optim import CPUOffloadOptimizer

    if setting.clip:
        raise Unavailable("torchao's CPUOffloadOptimizer has sent the gradients off before they could be clipped")
    model = model.to(setting.job.device)  # below a cap it comes in host memory
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    autocast = next(model.parameters()).dtype == torch.float32
    return Running(plain_step(model, optimizer, run=partial(forward_and_backward, autocast=autocast)))


_PINNED: Final = {"device": "cpu", "pin_memory": True}
#: DeepSpeed's "zero_optimization" for each of its systems. Twin-Flow has half of the state on the GPU, by hand.
_ZERO: Final[dict[str, dict[str, Any]]] = {
    "zero2": {"stage": 2, "offload_optimizer": _PINNED, "contiguous_gradients": True, "overlap_comm": True},
    "zero3": {"stage": 3, "offload_optimizer": _PINNED, "contiguous_gradients": True, "overlap_comm": True},
    "zero3-params": {"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED, "overlap_comm": True},
    "twinflow": {"stage": 3, "offload_optimizer": _PINNED | {"ratio": 0.5}, "sub_group_size": SUB_GROUP},
}


def deepspeed(model: nn.Module, setting: Setting, *, zero: str) -> Running:
    if not setting.job.ranks:
        _be_rank_zero_of_one()
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": setting.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": _ZERO[zero],
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }
    if "offload_param" in _ZERO[zero]:  # or else it would bring the whole model to the GPU first
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss

    return Running(step, fixed_batch=True, saving=checkpoints.of_deepspeed(engine))


def fsdp2(model: nn.Module, setting: Setting) -> Running:
    """Parameters, gradients and state in host memory; the layers come to the GPU as they are needed."""
    _be_rank_zero_of_one()
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=True), "mp_policy": precision}
    model = model.float()
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return torch_adamw(model, setting)


def _be_rank_zero_of_one() -> None:
    """What torch.distributed reads. This process measures one system and ends, so nobody else sees it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **rank)


@dataclass(frozen=True)
class System:
    """How to build it; the dtype of its parameters if not the job's; whether it needs CUDA."""

    build: Callable[[nn.Module, Setting], Running | Training]
    dtype: str | None = None
    cuda_only: bool = False


SYSTEMS: Final[dict[str, System]] = {
    "forward-backward": System(forward_backward),
    "no-offload": System(no_offload),
    "torch": System(torch_adamw),
    "hytrain": System(hytrain_adamw),
    "no-offload-muon": System(partial(no_offload, use_muon=True)),
    "hytrain-muon": System(partial(hytrain_adamw, use_muon=True)),
    "hytrain-unaware": System(partial(hytrain_adamw, loop_clips=True)),
    "hytrain-accumulating": System(accumulating),
    "torchao-fp32": System(torchao, dtype="float32", cuda_only=True),
    "torchao-bf16": System(torchao, cuda_only=True),
    **{f"deepspeed-{zero}": System(partial(deepspeed, zero=zero), cuda_only=True) for zero in _ZERO},
    "fsdp2": System(fsdp2, cuda_only=True),
    "torch-bf16": System(torch_adamw, dtype="bfloat16"),
    "bnb-8bit": System(partial(bitsandbytes, paged=False), dtype="bfloat16", cuda_only=True),
    "bnb-paged-8bit": System(partial(bitsandbytes, paged=True), dtype="bfloat16", cuda_only=True),
    "flashoptim": System(partial(flashoptim, releases=False), dtype="bfloat16", cuda_only=True),
    "flashoptim-released": System(partial(flashoptim, releases=True), dtype="bfloat16", cuda_only=True),
    "sft-torch-fp32": System(sft, dtype="float32"),
    "sft-torch-bf16": System(sft, dtype="bfloat16"),
    "sft-hytrain": System(partial(sft, ours=True)),
    "hytrain-growing": System(growing),
    "hytrain-unserved": System(partial(growing, serves=False)),
}
