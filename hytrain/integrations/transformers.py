"""HyTrain with the Hugging Face Trainer, or any subclass of it.

    trainer = Trainer(model, args, …)
    opt = adopt(trainer, k="auto")          # the only new line
    trainer.train()

A Trainer takes `hytrain.AdamW` like any other optimizer, too. One that was adopted follows the training arguments:
`optim`, learning rate, betas, epsilon, weight decay and the parameters without it, `max_grad_norm`. A subclass that
makes an optimizer in its own way makes one, of which HyTrain takes the parameters and numbers: all of them, or `adopt`
refuses. What the Trainer calls:

    Trainer ── clip_grad_norm_ ──▶ accelerator   returns opt.grad_norm: HyTrain has clipped already
            ── on_log ───────────▶ HyTrainCallback   k, stall, norm, skipped steps
            ── save, load ───────▶ optimizer.pt, small, and checkpoint-N/hytrain/ beside it

Under FSDP2, the optimizer's own file or folder in a checkpoint has the state.
"""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

import hytrain
from hytrain.checks import groups_for_torch
from hytrain.errors import UnsupportedError, UsageError
from hytrain.extras import needed
from hytrain.integrations import accelerate
from hytrain.integrations.accelerate import Adopted
from hytrain.optim import Optimizer

with needed("hytrain.integrations.transformers", "hf"):
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.training_args import OptimizerNames

#: The algorithms of `TrainingArguments.optim`, each with the options that it takes from the training arguments.
ALGORITHMS: Final[dict[str, tuple[type[Optimizer], tuple[str, ...]]]] = {
    OptimizerNames.ADAMW_TORCH: (hytrain.AdamW, ("lr", "betas", "eps", "weight_decay")),
    OptimizerNames.ADAMW_TORCH_FUSED: (hytrain.AdamW, ("lr", "betas", "eps", "weight_decay")),
    OptimizerNames.SGD: (hytrain.SGD, ("lr", "weight_decay")),
    OptimizerNames.LION: (hytrain.Lion, ("lr", "betas", "weight_decay")),
}
#: torch's optimizers that a subclass may make, by ours, and how they may compute the same.
OF_TORCH: Final[dict[type[Optimizer], type[torch.optim.Optimizer]]] = {
    hytrain.AdamW: torch.optim.AdamW,
    hytrain.SGD: torch.optim.SGD,
}
WAYS: Final = ("fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")
#: The training arguments' names of these options.
NUMBERS: Final = {
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
}


class HyTrainCallback(TrainerCallback):
    """Adds HyTrain's numbers to the Trainer's logs. The end of training waits for all updates.

    `hytrain_k` is the fraction of the parameters that the GPU owns, `hytrain_stall_s` the seconds for which the last
    step's forward waited for weights, `grad_norm` the last step's norm before clipping.
    """

    def __init__(self, opt: Adopted, read: dict[str, Any]) -> None:
        """`read` are the training arguments that `opt` was made from."""
        self._opt, self._read = opt, read

    def on_train_begin(self, args: TrainingArguments, *event: Any, **others: Any) -> None:
        """Raises `UsageError` at the first call if training arguments have changed since `adopt`."""
        for name, value in self._read.items():
            if (now := getattr(args, name)) != value:
                raise UsageError(
                    f"{name}={now!r} comes too late for HyTrain, which has {value!r} since adopt(trainer): change the "
                    "training arguments before"
                )
        self._read = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *event: Any,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Adds HyTrain's numbers to `logs`, which later callbacks report, and to the Trainer's history."""
        if logs is None or "loss" not in logs:
            return  # the log of an evaluation, or of the whole training
        statistics = self._opt.statistics()
        numbers = {
            "hytrain_k": statistics.k,
            "hytrain_stall_s": statistics.stall_s,
            "hytrain_skipped_steps": float(self._opt.skipped_steps),
        }
        if (norm := self._opt.grad_norm) is not None:
            numbers["grad_norm"] = float(norm)
        logs.update(numbers)
        state.log_history[-1].update(numbers)

    def on_train_end(self, *event: Any, **others: Any) -> None:
        self._opt.synchronize()


def adopt(trainer: Trainer, param_groups: ParamsT | None = None, **options: Any) -> Adopted:
    """Create `hytrain.AdamW` from the Trainer's arguments and make it the Trainer's optimizer.

    With `optim="sgd"` it is `hytrain.SGD`, with `optim="lion_32bit"` it is `hytrain.Lion`. It also raises what these
    raise.

    Args:
        trainer: A Trainer without an optimizer. It creates its scheduler as usual.
        param_groups: Replace the Trainer's groups, with and without weight decay, or those of a subclass that makes
            an optimizer in its own way. As for the optimizer; all that the Trainer would train is in them.
        options: HyTrain's own options (`k`, `objective`, `on_nonfinite`, …), or any other of the optimizer's, which
            override the training arguments.

    Returns:
        The optimizer.

    Raises:
        UnsupportedError: HyTrain cannot follow an argument. Nothing has been started.
    """
    _refuse(trainer)
    if options.get("loss_scale") is not None:
        raise UnsupportedError("the Trainer calls backward by itself, without opt.scale: leave loss_scale out")
    args, model = trainer.args, trainer.model
    if (options.get("max_grad_norm", args.max_grad_norm) or None) != (args.max_grad_norm or None):
        raise UnsupportedError("the Trainer clips to its own max_grad_norm: set TrainingArguments(max_grad_norm=…)")
    assert model is not None, "without model_init there is one from the beginning"
    optimizer, taken = ALGORITHMS[OptimizerNames(args.optim)]
    names = {option: NUMBERS[option] for option in taken}
    given = {option: tuple(getattr(args, name) for name in names[option]) for option in taken}
    wanted = {
        **{option: values if len(values) > 1 else values[0] for option, values in given.items()},
        "max_grad_norm": args.max_grad_norm or None,
        "grad_accumulation": args.gradient_accumulation_steps,
    }
    own = _own_groups(trainer, model, optimizer, {option: wanted[option] for option in taken}, param_groups is not None)
    if param_groups is not None:
        groups = groups_for_torch(model, param_groups)
        _require_all(trainer, model, own, groups)
    else:
        groups = _groups(model, set(trainer.get_decay_parameter_names(model))) if own is None else own
    opt = accelerate.adopt(trainer.accelerator, model, groups, optimizer=optimizer, **{**wanted, **options})
    trainer.optimizer = opt
    trainer.create_optimizer = lambda *of, **named: opt  # type: ignore[method-assign]  # a subclass might make another one
    read = {name: getattr(args, name) for option, each in names.items() if option not in options for name in each}
    trainer.callback_handler.callbacks.insert(0, HyTrainCallback(opt, read))
    if not trainer.accelerator.is_fsdp2:  # whose checkpoints have the state
        _save_beside(trainer, opt)
    return opt


def _save_beside(trainer: Trainer, opt: Adopted) -> None:
    """Add `opt.folder` to the trainer's checkpoints, without a reference cycle through the trainer."""
    kind, of = type(trainer), weakref.ref(trainer)

    def save(output_dir: str) -> None:
        opt.save(Path(output_dir) / opt.folder)
        kind._save_optimizer_and_scheduler(called(), output_dir)

    def load(checkpoint: str | None) -> None:
        opt.checkpoint = Path(checkpoint) if checkpoint is not None else None
        kind._load_optimizer_and_scheduler(called(), checkpoint)
        opt.checkpoint = None  # it is still set if there was nothing to load

    def called() -> Trainer:
        trainer = of()
        assert trainer is not None, "its method was called"
        return trainer

    trainer._save_optimizer_and_scheduler = save  # type: ignore[method-assign]
    trainer._load_optimizer_and_scheduler = load  # type: ignore[method-assign]


def _groups(model: nn.Module, decays: set[str]) -> list[dict[str, Any]]:
    """The Trainer's two groups: biases and norms have no weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name in decays]},
        {"params": [parameter for name, parameter in named if name not in decays], "weight_decay": 0.0},
    ]


def _own_groups(
    trainer: Trainer, model: nn.Module, optimizer: type[Optimizer], given: dict[str, Any], only_parameters: bool
) -> list[dict[str, Any]] | None:
    """The groups that a subclass makes in its own way; None for one that leaves that to Trainer.

    Numbers of torch's defaults and of the training arguments, `given`, are left out: options of `adopt` replace them.
    """
    makers = ("create_optimizer", "get_optimizer_cls_and_kwargs")
    if all(getattr(type(trainer), maker) is getattr(Trainer, maker) for maker in makers):
        return None
    trainer.create_optimizer()
    made, trainer.optimizer = trainer.optimizer, None
    assert made is not None, "train() needs it"
    if type(made) is not OF_TORCH.get(optimizer) and not only_parameters:
        name, kind = type(trainer).__name__, type(made).__name__
        raise UnsupportedError(f"{name} makes an optimizer of its own, {kind}: adopt(trainer, param_groups=…)")
    known = {id(parameter) for parameter in model.parameters()}
    if any(p.requires_grad and id(p) not in known for group in made.param_groups for p in group["params"]):
        raise UnsupportedError(
            f"{type(trainer).__name__} trains parameters that its model does not have (its loss may have some). The "
            "Trainer clips and drops only the gradients of its model, so theirs add up, as with torch. Leave adopt "
            "out and pass optimizers=(hytrain.AdamW(parameters, …), None) to the Trainer; or freeze them"
        )
    defaults = {name: option.default for name, option in inspect.signature(type(made)).parameters.items()} | given
    return [
        {name: value for name, value in group.items() if name not in (*WAYS, "params") and value != defaults.get(name)}
        | {"params": [parameter for parameter in group["params"] if id(parameter) in known]}
        for group in made.param_groups
    ]


def _require_all(
    trainer: Trainer, model: nn.Module, own: list[dict[str, Any]] | None, groups: list[dict[str, Any]]
) -> None:
    """Raise `UnsupportedError` if `groups` lack a parameter that the Trainer would train."""
    present = {id(each[1] if isinstance(each, tuple) else each) for group in groups for each in group["params"]}
    theirs = model.parameters() if own is None else [p for group in own for p in group["params"]]
    lacking = {id(p) for p in theirs if p.requires_grad} - present
    for name, parameter in model.named_parameters():
        if id(parameter) in lacking:
            raise UnsupportedError(
                f"param_groups lack {name}, which {type(trainer).__name__} would train: add it, or freeze it"
            )


def _refuse(trainer: Trainer) -> None:
    args = trainer.args
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UnsupportedError("the Trainer has an optimizer already: adopt(trainer) makes it, from its arguments")
    if (update := OptimizerNames(args.optim)) not in ALGORITHMS:
        raise UnsupportedError(
            f'optim="{update.value}" is not supported: HyTrain has optim="adamw_torch", "sgd" and "lion_32bit"'
        )
    if args.optim_args and ALGORITHMS[update][0] is not hytrain.AdamW:  # for which the Trainer ignores them, too
        raise UnsupportedError(f"optim_args={args.optim_args!r}: pass them to adopt(trainer, …) as keywords")
    if type(trainer).create_optimizer_and_scheduler is not Trainer.create_optimizer_and_scheduler:
        raise UnsupportedError(
            f"{type(trainer).__name__} has its own create_optimizer_and_scheduler: split it into create_optimizer and "
            "create_scheduler, as adopt(trainer) calls the first"
        )
    if trainer.model_init is not None:
        raise UnsupportedError(
            "model_init makes the model anew when training begins: pass model=model_init(); or leave adopt out, and "
            "pass optimizer_cls_and_kwargs=(hytrain.AdamW, {…}) to the Trainer"
        )
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise UnsupportedError(
            "from_pretrained(distributed_config=…) has sharded the model without Accelerate: leave it out, and pass "
            "TrainingArguments(fsdp=True)"
        )
    if args.n_gpu > 1:
        raise UnsupportedError(f"DataParallel over {args.n_gpu} GPUs is not supported: set CUDA_VISIBLE_DEVICES=0")
    accelerate.check_settings(trainer.accelerator)
