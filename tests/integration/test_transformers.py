"""Under the Hugging Face Trainer: the bits of `torch.optim.AdamW`, through evaluation, saving, resuming; refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers import differing, late_weights, weights
from small_models import gpt2, llama, tokens
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import IterableDataset

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

import hytrain
from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.integrations.accelerate import Adopted
from hytrain.integrations.transformers import adopt
from hytrain.model.layers import split_layers

STEPS, SAVED = 12, 6
TRAINING = [{"input_ids": row, "labels": row} for step in range(12) for row in tokens(step)]
VALIDATION = [{"input_ids": row, "labels": row} for step in range(100, 102) for row in tokens(step)]
#: What the two trainers have in common; times and k differ.
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)  # it outlives the Accelerator that made it
    GradientState._reset_state()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def make_trainer(model: nn.Module, folder: Path, kind: type[Trainer] = Trainer, **changed: Any) -> Trainer:
    """A Trainer that warms up, clips, spares some parameters from weight decay, evaluates and saves in the middle."""
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": SAVED,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": "none",
    }
    others = ("optimizers", "optimizer_cls_and_kwargs", "model_init", "callbacks", "train_dataset")
    options = {name: changed.pop(name) for name in others if name in changed}
    args = TrainingArguments(str(folder), **{**arguments, **changed})
    given = None if "model_init" in options else model
    return kind(given, args, eval_dataset=VALIDATION, **{"train_dataset": TRAINING, **options})


@contextmanager
def adopted(trainer: Trainer, **options: Any) -> Iterator[Adopted]:
    opt = adopt(trainer, **options)
    try:
        yield opt
    finally:
        opt.close()


def history(trainer: Trainer) -> list[dict[str, float]]:
    return [{name: entry[name] for name in COMPARED if name in entry} for entry in trainer.state.log_history]


def state(opt: Adopted) -> dict[str, torch.Tensor]:
    """Copies of the whole state, which `opt.state_dict()` leaves out."""
    entries = hytrain.AdamW.state_dict(opt)["state"].items()
    return {f"{plane}.{index}": tensor.clone() for index, entry in entries for plane, tensor in entry.items()}


# ---------------------------------------------------------------- the same training


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trainer_with_torchs_adamw_has_the_same_bits(tmp_path: Path, overlap: bool) -> None:
    """Twice in a row: what the second `train()` begins with is the state that the first one left."""
    expected, model = gpt2(), gpt2()
    plain = make_trainer(expected, tmp_path / "plain")
    ours = make_trainer(model, tmp_path / "ours")
    with adopted(ours, k=0.5, overlap=overlap):
        for seed in range(2):
            for trainer in (plain, ours):
                set_seed(seed)
                trainer.train()
            assert history(ours) == history(plain)
            assert differing(weights(model), weights(expected)) == []
    assert [entry["step"] for entry in history(ours) if "eval_loss" in entry] == [4, 8, 12]
    norms = [entry["grad_norm"] for entry in history(ours) if "grad_norm" in entry]
    assert min(norms) < 1.0 < max(norms), "some steps are clipped, some are not"


def test_a_trainer_with_sgd_has_torchs_bits(tmp_path: Path) -> None:
    """And goes on from its own checkpoint."""
    numbers: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.01, "save_steps": 2}
    plain = make_trainer(gpt2(), tmp_path / "plain", optim_args="momentum=0.9", **numbers)
    plain.train()
    ours = make_trainer(gpt2(), tmp_path / "ours", **numbers)  # seeds all random numbers again
    with adopted(ours, k=0.5, momentum=0.9) as opt:
        assert isinstance(opt, hytrain.SGD)
        ours.train()
    assert history(ours) == history(plain)
    assert differing(weights(ours.model), weights(plain.model)) == []
    resumed = make_trainer(gpt2(), tmp_path / "ours", **numbers)
    with adopted(resumed, k=0.0, momentum=0.9):
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert differing(weights(resumed.model), weights(plain.model)) == []


def test_lion_follows_the_training_arguments(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.95, "weight_decay": 0.1}
    trainer = make_trainer(gpt2(), tmp_path, optim="lion_32bit", **numbers)
    with adopted(trainer, k=0.5) as opt:
        assert isinstance(opt, hytrain.Lion)
        first, second = opt.param_groups
        assert (first["lr"], first["betas"], first["weight_decay"]) == (1e-3, (0.8, 0.95), 0.1)
        assert second["weight_decay"] == 0.0 and "eps" not in first


def as_torch(
    run: Callable[[Trainer], object],
    folder: Path,
    kind: type[Trainer] = Trainer,
    *,
    model: Callable[[], nn.Module] = gpt2,
    **changed: Any,
) -> None:
    """`run(trainer)` has the same history and the same weights as with torch's AdamW."""
    plain = make_trainer(model(), folder / "plain", kind, **changed)
    run(plain)
    ours = make_trainer(model(), folder / "ours", kind, **changed)  # seeds all random numbers again
    with adopted(ours, k=0.5):
        run(ours)
    assert history(ours) == history(plain)
    assert differing(weights(ours.model), weights(plain.model)) == []


def one_block() -> nn.Module:
    """Its embedding is in pieces, as no block repeats."""
    model: Any = gpt2()
    del model.transformer.h[1:]
    return cast(nn.Module, model)


def test_a_clipped_parameter_in_pieces(tmp_path: Path) -> None:
    def run(trainer: Trainer) -> None:
        trainer.train()
        assert max(each.get("grad_norm", 0.0) for each in history(trainer)) > trainer.args.max_grad_norm

    as_torch(run, tmp_path, model=one_block)
    model = one_block()
    layers = split_layers(model, {id(parameter) for parameter in model.parameters()})
    assert not all(piece.is_whole for layer in layers for piece in layer.pieces)


def test_accumulated_gradients_have_the_same_bits(tmp_path: Path) -> None:
    """Twelve batches, five a step: each epoch's last step has two."""

    def run(trainer: Trainer) -> None:
        trainer.train()
        assert trainer.state.global_step == 6

    as_torch(run, tmp_path, gradient_accumulation_steps=5, num_train_epochs=2, max_steps=-1)


@pytest.mark.parametrize("given", ["its class", "its class, and model_init", "itself", "that of a model"])
def test_a_trainer_that_is_given_hytrains_optimizer(given: str, tmp_path: Path) -> None:
    """With nothing else: it clips, accumulates, saves and goes on as with torch's."""

    def made(name: str, kind: type[torch.optim.Optimizer]) -> Trainer:
        model, numbers = gpt2(), {"lr": 1e-2, "betas": (0.8, 0.9), "fused": True}
        options: dict[str, Any] = {"gradient_accumulation_steps": 2}
        if "class" in given:
            options["optimizer_cls_and_kwargs"] = (kind, numbers)
        elif given == "itself" or kind is torch.optim.AdamW:
            options["optimizers"] = (kind(model.parameters(), **numbers), None)
        else:
            options["optimizers"] = (hytrain.AdamW(model, **numbers), None)
        if "model_init" in given:
            options["model_init"] = gpt2
        return make_trainer(model, tmp_path / name, **options)

    plain = made("plain", torch.optim.AdamW)
    plain.train()
    for resumed in (None, str(tmp_path / "ours" / f"checkpoint-{SAVED}")):
        ours = made("ours", hytrain.AdamW)  # seeds all random numbers again
        ours.train(resume_from_checkpoint=resumed)
        ours.optimizer.optimizer.close()  # type: ignore[union-attr]
        assert differing(weights(ours.model), weights(plain.model)) == []
        assert history(ours) == history(plain) and len(history(ours)) == 10


class WithoutRoom(Trainer):
    """Its third forward finds none."""

    calls = 0

    def compute_loss(self, *inputs: Any, **others: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().compute_loss(*inputs, **others)


def test_a_smaller_batch_is_found(tmp_path: Path) -> None:
    def run(trainer: Trainer) -> None:
        trainer.train()
        assert trainer._train_batch_size < 4

    as_torch(run, tmp_path, WithoutRoom, auto_find_batch_size=True)


def test_an_evaluation_in_half_precision_converts_the_weights(tmp_path: Path) -> None:
    """After training, and for good."""

    def run(trainer: Trainer) -> None:
        trainer.train()
        seen.append(trainer.evaluate()["eval_loss"])
        assert next(trainer.model.parameters()).dtype is torch.bfloat16  # type: ignore[union-attr]

    seen: list[float] = []
    as_torch(run, tmp_path, bf16_full_eval=True)
    assert seen[0] == seen[1]


class Interrupted(Trainer):
    """Its second micro-batch fails once."""

    forwards = 0

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        self.forwards += 1
        if self.forwards == 2:
            raise KeyboardInterrupt
        return super().compute_loss(*arguments, **options)


@pytest.mark.parametrize("accumulated", [4, 24])
def test_train_again_after_an_interrupted_step(accumulated: int, tmp_path: Path) -> None:
    """What it had summed up is dropped, also where an epoch has fewer batches than a step."""

    def run(trainer: Trainer) -> None:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()

    as_torch(run, tmp_path, Interrupted, gradient_accumulation_steps=accumulated)


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Ten batches, and nobody knows how many beforehand."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(TRAINING[:40])


def test_what_an_epoch_of_unknown_length_leaves_is_the_next_ones(tmp_path: Path) -> None:
    """Four batches make a step, then four, then two and the next epoch's four."""
    changed = {"gradient_accumulation_steps": 4, "max_steps": 8, "train_dataset": Stream()}
    as_torch(lambda trainer: trainer.train(), tmp_path, **changed)


@pytest.mark.spawns
@pytest.mark.parametrize("kept", [True, False])
def test_a_notebooks_cell_is_run_again(kept: bool, tmp_path: Path) -> None:
    """The old Trainer is perhaps unreachable then, and its optimizer perhaps still has a name."""
    model = gpt2()
    opts = []
    for run in range(2):
        trainer = make_trainer(model, tmp_path / str(run), max_steps=2)
        opt = adopt(trainer, k=0.5)
        if kept:
            opts.append(opt)
        trainer.train()
    opt.close()
    if kept:
        with pytest.raises(UsageError, match="closed, because a newer one was made"):
            opts[0].step()


@pytest.mark.parametrize(("make", "dtype"), [(gpt2, torch.float32), (llama, torch.bfloat16)])
def test_resumed_at_another_k_it_is_the_run_that_went_through(
    tmp_path: Path, make: Callable[..., nn.Module], dtype: torch.dtype
) -> None:
    whole, resumed = make(dtype), make(dtype)
    trainer = make_trainer(whole, tmp_path / "run")
    with adopted(trainer, k=0.3) as opt:
        trainer.train()
        expected = state(opt)
        went_on = history(trainer)
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    assert (checkpoint / "optimizer.pt").stat().st_size < 10_000, "no moments in it"

    trainer = make_trainer(resumed, tmp_path / "run")
    with adopted(trainer, k=1.0) as opt:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert opt.statistics().step == STEPS, "steps are counted from the beginning of training"
        assert differing(state(opt), expected) == []
    assert history(trainer) == went_on
    assert differing(weights(resumed), weights(whole)) == []


def frozen_block(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if ".h.0." in name or "wpe" in name}


def frozen_norms(model: nn.Module) -> set[str]:
    """All that weight decay spares: a plain Trainer's second group is empty then."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() == 1}


@pytest.mark.parametrize("frozen", [lambda model: set(), frozen_block, frozen_norms])
def test_goes_on_from_torchs_adamw_with_frozen_parameters(
    frozen: Callable[[nn.Module], set[str]], tmp_path: Path
) -> None:
    """A plain Trainer leaves them out of its groups, and numbers the others without them."""
    whole, resumed = gpt2(), gpt2()
    for model in (whole, resumed):
        for name in frozen(model):
            model.get_parameter(name).requires_grad_(False)
    make_trainer(whole, tmp_path).train()
    trainer = make_trainer(resumed, tmp_path)
    with adopted(trainer, k=0.5):
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert differing(weights(resumed), weights(whole)) == []


def test_a_plain_trainer_goes_on_from_an_exported_state(tmp_path: Path) -> None:
    whole, resumed = gpt2(), gpt2()
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    trainer = make_trainer(whole, tmp_path)
    with adopted(trainer, k=0.5) as opt:
        trainer.train()
        with pytest.raises(ValueError, match="doesn't match the size"):
            make_trainer(gpt2(), tmp_path).train(resume_from_checkpoint=str(checkpoint))
        opt.synchronize()
        expected = weights(whole)
        opt.load(checkpoint / "hytrain")
        torch.save(hytrain.AdamW.state_dict(opt), checkpoint / "optimizer.pt")
    make_trainer(resumed, tmp_path).train(resume_from_checkpoint=str(checkpoint))
    assert differing(weights(resumed), expected) == []


def test_a_checkpoint_without_its_state_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    trainer = make_trainer(model, tmp_path)
    with adopted(trainer) as opt:
        trainer.train()
        checkpoint = tmp_path / f"checkpoint-{SAVED}"
        (checkpoint / "hytrain").rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="no optimizer state in .*hytrain"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        small = torch.load(checkpoint / "optimizer.pt")
    with adopted(make_trainer(model, tmp_path)) as opt, pytest.raises(ConfigError, match="no moments"):
        opt.load_state_dict(small)


class Reporter(TrainerCallback):
    """In place of TensorBoard and the like: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        self.told.append(dict(logs))


def test_reporters_and_history_have_hytrains_numbers(tmp_path: Path) -> None:
    reporter = Reporter()
    trainer = make_trainer(gpt2(), tmp_path, callbacks=[reporter], max_grad_norm=0.0)
    with adopted(trainer, k=1.0, on_nonfinite="skip") as opt:
        trainer.train()
        last = float(opt.grad_norm or 0.0)
    training = [logs for logs in reporter.told if "loss" in logs]
    assert len(training) == STEPS // 2
    for logs in training:
        assert logs["hytrain_k"] == 1.0 and logs["hytrain_stall_s"] >= 0.0 and logs["hytrain_skipped_steps"] == 0.0
    assert training[-1]["grad_norm"] == last > 0.0
    assert [entry["hytrain_k"] for entry in trainer.state.log_history if "loss" in entry] == [1.0] * len(training)
    assert all("hytrain_k" not in logs for logs in reporter.told if "eval_loss" in logs)


class Average(TrainerCallback):
    """Keeps the weights that it finds after each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any) -> None:
        self.found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})


def test_callbacks_find_the_steps_weights(tmp_path: Path) -> None:
    expected, average = Average(), Average()
    make_trainer(gpt2(), tmp_path / "plain", callbacks=[expected]).train()
    trainer = make_trainer(gpt2(), tmp_path / "ours", callbacks=[average])
    with adopted(trainer, k=0.0), late_weights():
        trainer.train()
    assert [differing(found, e) for found, e in zip(average.found, expected.found, strict=True)] == [[]] * STEPS


def test_callbacks_that_read_no_weights_wait_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(gpt2(), tmp_path, save_strategy="no", eval_strategy="no", callbacks=[Reporter()])
    with adopted(trainer) as opt:
        calls = []
        monkeypatch.setattr(opt, "synchronize", lambda: calls.append(trainer.state.global_step))
        trainer.train()
    assert calls == [STEPS], "at the end of training"


# ---------------------------------------------------------------- TRL


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, of any text; its chat template marks what the assistant says."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    template = (
        "{% for message in messages %}{{ message.role[0] + ':' }}"
        "{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% endfor %}"
    )
    ends = {"eos_token": alphabet[0], "pad_token": alphabet[1]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)


def sums(line: Callable[[int, int], dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list([line(a, b) for a in range(4) for b in range(6)])


def chat(trl: Any, model: nn.Module, options: dict[str, Any]) -> Trainer:
    def line(a: int, b: int) -> dict[str, Any]:
        said = {"user": f"{a}+{b}", "assistant": str(a + b)}
        return {"messages": [{"role": role, "content": content} for role, content in said.items()]}

    args = trl.SFTConfig(assistant_only_loss=True, **options)
    trainer: Trainer = trl.SFTTrainer(model, args, train_dataset=sums(line), processing_class=byte_tokenizer())
    return trainer


def preferences(trl: Any, model: nn.Module, options: dict[str, Any]) -> Trainer:
    def line(a: int, b: int) -> dict[str, Any]:
        return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 1)}

    given = {"ref_model": llama(), "args": trl.DPOConfig(**options), "processing_class": byte_tokenizer()}
    trainer: Trainer = trl.DPOTrainer(model, train_dataset=sums(line), **given)
    return trainer


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # TRL uses it
@pytest.mark.parametrize("make", [chat, preferences])
def test_trls_trainers_have_the_bits_of_torchs_adamw(make: Callable[..., Trainer], trl: Any, tmp_path: Path) -> None:
    """With TRL's own defaults: bf16 autocast and activation checkpointing."""
    options = {
        **{"output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2},
        **{"max_length": 32, "logging_steps": 1, "optim": "adamw_torch_fused", "use_cpu": True, "disable_tqdm": True},
        **{"dataloader_pin_memory": False, "save_strategy": "no", "report_to": "none"},
    }
    plain, ours = make(trl, llama(), options), make(trl, llama(), options)
    assert plain.args.bf16
    plain.train()
    with adopted(ours, k=0.5):
        ours.train()
    assert history(ours) == history(plain) and len(history(ours)) == 5
    assert differing(weights(ours.model), weights(plain.model)) == []


# ---------------------------------------------------------------- trainers with groups of their own


class OwnOptimizer(Trainer):
    """Makes one whenever it is asked: a rate of its own for the embeddings."""

    def create_optimizer(self, model: Any = None) -> Any:
        first, *others = (model or self.model).parameters()
        groups = [{"params": [first], "lr": 3e-3}, {"params": others, "weight_decay": 0.2}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate, fused=True)
        return self.optimizer


class OwnNumbers(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> Any:
        kind, numbers = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {**numbers, "betas": (0.5, 0.6)}


class Loss(nn.Module):
    """Has the model, and parameters of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.classifier, self.scale = model, nn.Linear(256, 16), nn.Parameter(torch.ones(16))

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        output = self.model(**inputs)
        return output.loss + (self.classifier(output.logits) * self.scale).square().mean()


class WithLoss(Trainer):
    """As that of Sentence Transformers: it trains what its loss has, too."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.loss = Loss(model)

    def get_optimizer_cls_and_kwargs(self, args: TrainingArguments, model: Any = None) -> Any:  # type: ignore[override]
        kind, numbers = Trainer.get_optimizer_cls_and_kwargs(args, self.loss)
        decays = self.get_decay_parameter_names(self.loss)
        named = [(name, p) for name, p in self.loss.named_parameters() if p.requires_grad]
        numbers["optimizer_dict"] = [
            {"params": [p for name, p in named if name in decays], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
        ]
        return kind, numbers

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        loss = self.loss(inputs)
        return (loss, {}) if return_outputs else loss


@pytest.mark.parametrize("kind", [OwnOptimizer, OwnNumbers, WithLoss])
def test_a_trainer_that_makes_its_optimizer_in_its_own_way(kind: type[Trainer], tmp_path: Path) -> None:
    """HyTrain trains what that one would train, with its numbers: the same bits. A loss has what is frozen."""

    def made(name: str) -> Trainer:
        trainer = make_trainer(gpt2(), tmp_path / name, kind=kind, eval_strategy="no")
        if isinstance(trainer, WithLoss):
            trainer.loss.classifier.requires_grad_(False)
            trainer.loss.scale.requires_grad_(False)
        set_seed(0)
        return trainer

    plain = made("plain")
    plain.train()
    ours = made("ours")
    with adopted(ours, k=0.5) as opt, late_weights():
        ours.train()
        opt.synchronize()
        assert history(ours) == history(plain)
        assert differing(weights(ours.model), weights(plain.model)) == []
        assert ours.create_optimizer() is opt


def test_a_loss_whose_own_parameters_are_trained(tmp_path: Path) -> None:
    """Their gradients add up from step to step, since the Trainer drops those of its model alone."""

    def trained(kind: type[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        trainer = make_trainer(gpt2(), tmp_path, kind=WithLoss, eval_strategy="no")
        trainer.optimizer = kind(trainer.loss.parameters(), lr=1e-2, fused=True)
        trainer.train()
        if kind is hytrain.AdamW:
            trainer.optimizer.optimizer.close()
        return weights(trainer.loss)

    assert differing(trained(hytrain.AdamW), trained(torch.optim.AdamW)) == []


def test_options_replace_what_the_arguments_have_said(tmp_path: Path) -> None:
    trainer = make_trainer(gpt2(), tmp_path, kind=OwnOptimizer)
    with adopted(trainer, lr=5e-3, maximize=True) as opt:
        first, second = opt.param_groups
        assert (first["lr"], second["lr"], second["weight_decay"]) == (3e-3, 5e-3, 0.2)
        assert first["maximize"] and "fused" not in first


# ---------------------------------------------------------------- refusals


class OwnSchedule(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        raise NotImplementedError


class Adagrad(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.Adagrad(self.model.parameters())
        return self.optimizer


def some(model: nn.Module) -> dict[str, Any]:
    return {"param_groups": list(model.parameters())[:-1]}


#: (what the Trainer is made with, what `adopt` is given, the words that help)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"optim": "adafactor"}, {}, 'optim="adafactor" is not supported'),
    ({"optim": "sgd", "optim_args": "momentum=0.9"}, {}, "optim_args='momentum=0.9': pass them to adopt"),
    ({"model_init": gpt2}, {}, "model_init makes the model anew"),
    ({"kind": Adagrad}, {}, "Adagrad makes an optimizer of its own"),
    ({"kind": OwnSchedule}, {}, "OwnSchedule has its own create_optimizer_and_scheduler: split it into"),
    ({"kind": WithLoss}, {}, "WithLoss trains parameters that its model does not have .its loss may have some"),
    ({"kind": WithLoss}, {"param_groups": some}, "WithLoss trains parameters that its model does not have .its loss"),
    ({}, {"param_groups": some}, "param_groups lack .*, which Trainer would train: add it, or freeze it"),
    ({}, {"max_grad_norm": 0.5}, "the Trainer clips to its own max_grad_norm: set TrainingArguments"),
    ({}, {"loss_scale": "dynamic"}, "the Trainer calls backward by itself"),
]


@pytest.mark.parametrize(("made", "given", "sentence"), REFUSED, ids=[sentence for *_, sentence in REFUSED])
def test_what_hytrain_cannot_follow(made: dict[str, Any], given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = gpt2()
    trainer = make_trainer(model, tmp_path, **made)
    given = some(model) if given.get("param_groups") is some else given
    with pytest.raises(UnsupportedError, match=sentence):
        adopt(trainer, **given)
    assert trainer.optimizer is None, "nothing was started"


def test_an_optimizer_that_is_there_already_and_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    trainer = make_trainer(model, tmp_path, optimizers=(torch.optim.AdamW(model.parameters()), None))
    with pytest.raises(UnsupportedError, match="the Trainer has an optimizer already"):
        adopt(trainer)
    trainer = make_trainer(model, tmp_path)
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    with pytest.raises(UnsupportedError, match="DataParallel over 2 GPUs is not supported"):
        adopt(trainer)


def test_parameter_groups_of_ones_own(tmp_path: Path) -> None:
    model = gpt2()
    trainer = make_trainer(model, tmp_path, kind=OwnOptimizer)
    groups = [{"params": list(model.parameters()), "lr": 3e-4}]
    with adopted(trainer, param_groups=groups, betas=(0.8, 0.9)) as opt:
        [group] = opt.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.8, 0.9), 0.1)


@pytest.mark.parametrize(
    "name", ["max_grad_norm", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"]
)
def test_numbers_that_change_on_the_way(name: str, tmp_path: Path) -> None:
    """They are refused, unless `adopt` was given another one."""
    trainer = make_trainer(gpt2(), tmp_path)
    given = {} if name == "learning_rate" else {"lr": 1e-3}
    with adopted(trainer, **given):
        trainer.args.learning_rate = 0.25
        setattr(trainer.args, name, 0.25)
        late = r"clip_grad_norm_ to 0.25 comes" if name == "max_grad_norm" else f"{name}=0.25 comes"
        with pytest.raises(UsageError, match=rf"{late} too late for HyTrain, which (has .* since adopt|clips to 1.0)"):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_trainer_compiles_the_model(tmp_path: Path) -> None:
    """HyTrain's hooks add no graph to torch's, and break none."""
    made = list[object]()

    def run(trainer: Trainer) -> None:
        torch._dynamo.reset()
        counters.clear()
        trainer.train()
        made.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))

    as_torch(run, tmp_path, model=one_block, torch_compile=True, torch_compile_backend="aot_eager")
    assert made[0] == made[1] != (0, 0)
