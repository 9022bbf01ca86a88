"""HyTrain under Hugging Face Accelerate.

    accelerator = Accelerator()
    model, loader = accelerator.prepare(model, loader)
    opt = adopt(accelerator, model, lr=3e-4, max_grad_norm=1.0)      # was: torch.optim.AdamW(model.parameters(), …)
    opt, scheduler = accelerator.prepare(opt, scheduler_for(opt))

Accelerate asks an optimizer for its `state_dict()`, moves all of it to the device, pickles it. So the one that it gets
is small, and the state travels beside it:

    save_state(folder) ──▶ folder/optimizer.bin     the small one
                      └──▶ folder/hytrain/          all of it, layer by layer, independent of k
    load_state(folder) ──▶ the small one comes back, and the optimizer reads folder/hytrain

`integrations.transformers` does the same for a Trainer, whose loop is Accelerate's too.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, Final

import accelerate
from torch import Tensor, nn

import hytrain
from hytrain.errors import ConfigError, UnsupportedError, UsageError

#: In a checkpoint, the folder with the optimizer's whole state.
FOLDER: Final = "hytrain"


class AdamW(hytrain.AdamW):
    """`hytrain.AdamW` with a `state_dict()` that costs nothing to move and to pickle.

    Attributes: `state_folder`, where the next `load_state_dict` of a small one finds what belongs to it.
    """

    def __init__(self, model: nn.Module, *arguments: Any, max_grad_norm: float | None = None, **options: Any) -> None:
        super().__init__(model, *arguments, max_grad_norm=max_grad_norm, **options)
        self.max_grad_norm = max_grad_norm
        self.state_folder: Path | None = None
        self._key = uuid.uuid4().hex

    def state_dict(self) -> dict[str, Any]:
        """The hyperparameters, and whose they are: `save` and `load` are for the state."""
        groups = [{**group, "params": []} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, "hytrain": self._key}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_folder` for a small state, or a whole one of `torch.optim.AdamW` or `hytrain.AdamW`.

        Raises `ConfigError` if the small one is another optimizer's and there is no folder, or it does not fit.
        """
        folder, self.state_folder = self.state_folder, None
        if "hytrain" not in state_dict:
            super().load_state_dict(state_dict)
        elif folder is not None:
            self.load(folder)
        elif state_dict["hytrain"] != self._key:  # its own comes back when Accelerate prepares it
            raise ConfigError(
                f"this state has no moments, they are in the folder {FOLDER!r} beside it: opt.load(folder)"
            )


def adopt(accelerator: accelerate.Accelerator, model: nn.Module, *arguments: Any, **options: Any) -> AdamW:
    """`hytrain.AdamW(model, …)`, to be given to `accelerator.prepare`; clipping and checkpoints go on to work.

    `model` is prepared already. Raises what `hytrain.AdamW` raises, and `UnsupportedError` for settings of the
    accelerator that HyTrain cannot follow, before anything is started.
    """
    refuse(accelerator)
    device = next(model.parameters()).device
    if device.type != accelerator.device.type:
        raise UnsupportedError(f"the model is on {device}, not {accelerator.device}: accelerator.prepare(model) first")
    opt = AdamW(model, *arguments, **{"grad_accumulation": accelerator.gradient_accumulation_steps, **options})

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """The global norm, which has been clipped already; None where HyTrain does not take it."""
        if norm_type != 2 or max_norm not in (opt.max_grad_norm, float("inf")):
            raise UsageError(
                f"clip_grad_norm_ to {max_norm} comes too late for HyTrain, which clips to "
                f"{opt.max_grad_norm}: pass max_grad_norm={max_norm} where the optimizer is made"
            )
        return opt.grad_norm

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        opt.save(Path(folder) / FOLDER)

    def announce(models: list[nn.Module], folder: str) -> None:
        opt.state_folder = Path(folder) / FOLDER

    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(announce)
    return opt


def refuse(accelerator: accelerate.Accelerator) -> None:
    """Raise `UnsupportedError` for what would train something else than asked for, or not at all."""
    state = accelerator.state
    if state.deepspeed_plugin is not None:
        raise UnsupportedError("DeepSpeed has an optimizer of its own: leave its plugin out, or HyTrain")
    if getattr(state, "fsdp_plugin", None) is not None:
        raise UnsupportedError(
            "FSDP and its CPU offload have a place for the state already: leave its plugin out, or HyTrain"
        )
    if accelerator.num_processes > 1 or accelerator.distributed_type != accelerate.DistributedType.NO:
        raise UnsupportedError("more than one process is not supported yet: train on one GPU, without a launcher")
    if accelerator.mixed_precision == "fp16":
        raise UnsupportedError(
            "mixed precision in fp16 comes with a GradScaler, too late for HyTrain: train in bf16, or without it"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UnsupportedError(f"{accelerator.mixed_precision} is not supported yet: train in bf16, or without it")
    if state.dynamo_plugin.backend != accelerate.utils.DynamoBackend.NO:
        raise UnsupportedError("hooks break the graph of a whole compiled model: compile its blocks, block.compile()")
