"""The recipe's Hugging Face model, on its device and in its dtype, and the FLOPs of a token.

`task` calls `configuration`, `build` and `compile_blocks`; `estimate` calls `configuration` and `build_empty`, which
needs no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from hytrain import gpus
from hytrain.errors import ConfigError
from hytrain.model.blueprint import Blueprint
from hytrain.model.deferred import recording
from hytrain.model.layers import find_blocks
from hytrain.model.split_batch import split_batch
from hytrain.recipe import config, sharding
from hytrain.recipe.config import suggestion
from hytrain.recipe.sharding import inference

_AUTO_MODEL: Any = AutoModelForCausalLM  # its methods have no types
GENERATION = "generation_config.json"
LENGTH_FIELDS = ("max_position_embeddings", "n_positions")


class Cost(NamedTuple):
    """The cost of one token in a training step: forward and backward, without recomputation."""

    parameters: int  # that are trained
    flops_per_token: float

    def mfu(self, tokens_per_s: float, peak_tflops: float | None) -> float | None:
        """This speed as a fraction of the device's peak, or None if the peak is unknown."""
        return None if peak_tflops is None else self.tflops(tokens_per_s) / peak_tflops

    def tflops(self, tokens_per_s: float) -> float:
        return self.flops_per_token * tokens_per_s / 1e12


def configuration(model: config.Model, vocab_size: int | None, sequence_length: int) -> Any:
    """The model's Hugging Face configuration. Raises ConfigError if the tokenizer or `sequence_length` does not fit.

    `vocab_size` is the tokenizer's, or None for random tokens: then the model's own is used.
    """
    hf = _from_folder(model.path) if model.path is not None else _from_fields(model.config or {}, vocab_size)
    text = hf.get_text_config()
    if vocab_size is not None and text.vocab_size < vocab_size:
        raise ConfigError(
            f"The model's vocabulary of {text.vocab_size} is smaller than the tokenizer's of {vocab_size}; "
            "make model.config.vocab_size larger or choose the model's own tokenizer."
        )
    limit = next((getattr(text, name) for name in LENGTH_FIELDS if getattr(text, name, None)), None)
    if limit is not None and sequence_length > limit:
        raise ConfigError(
            f"data.sequence_length is {sequence_length}, but the model takes at most {limit} tokens; "
            "shorten the sequences or enlarge the model's position limit."
        )
    if getattr(text, "is_decoder", None) is False:  # an encoder would see the tokens that it is to predict
        text.is_decoder = True
    return hf


def build(model: config.Model, hf: Any, device: torch.device) -> Any:
    """The model in training mode, with the weights of `model.path` or new ones from torch's seed.

    Raises ConfigError if the folder is unusable or the model has no parameters.
    """
    if model.path is None:
        with _refused(hf), device:
            module = _AUTO_MODEL.from_config(hf, dtype=getattr(torch, model.dtype))
    else:
        module = _loaded(model, hf).to(device)
    return _prepared(module, model)


def build_deferred(model: config.Model, hf: Any, device: torch.device, sequence_length: int) -> Any:
    """The model that `build` makes, without memory: `hytrain.AdamW` makes its values. A new one is tried out."""
    module, blueprint = _recorded(model, hf, device, sequence_length)
    blueprint.wait()
    return module


def build_sharded(model: config.Model, hf: Any, device: torch.device, mesh: DeviceMesh, sequence_length: int) -> Any:
    """The model that `build` makes, split over a mesh of several ranks. A new one is tried out before.

    Raises ConfigError as `build` does.
    """
    module, blueprint = _recorded(model, hf, device, sequence_length)
    sharding.apply(module, mesh)
    sharding.fill_in(module, blueprint, device)
    return module


def build_empty(model: config.Model, hf: Any) -> Any:
    """The model that `build` makes, on the meta device: shapes and dtypes without memory. Raises ConfigError, too."""
    with _refused(hf), torch.device("meta"):
        module = _AUTO_MODEL.from_config(hf, dtype=getattr(torch, model.dtype))
    return _prepared(module, model)


def _recorded(model: config.Model, hf: Any, device: torch.device, sequence_length: int) -> tuple[Any, Blueprint]:
    with _refused(hf), recording() as calls, device:
        module = _AUTO_MODEL.from_config(hf, dtype=getattr(torch, model.dtype))
        made = len(calls)
        if model.path is None:
            with suppress(DynamicOutputShapeException, DataDependentOutputException):  # of a mixture of experts
                try_out(module, hf, sequence_length)
    blueprint = Blueprint(module, calls[:made], model.path, lambda: _loaded(model, hf))
    _prepared(module, model)
    if model.path is not None and (model.path / GENERATION).is_file():
        module.generation_config = GenerationConfig.from_pretrained(model.path, local_files_only=True)
    return module, blueprint


def _loaded(model: config.Model, hf: Any) -> Any:
    try:
        dtype = getattr(torch, model.dtype)
        # Other files of weights are pickles.
        return _AUTO_MODEL.from_pretrained(
            model.path, config=hf, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        if any(model.path.glob("pytorch_model*.bin")):  # type: ignore[union-attr]
            reason += " HyTrain reads no weights from a pickle: convert them, for example with save_pretrained."
        raise ConfigError(f"No model can be loaded from {model.path}: {reason}") from None


def _prepared(module: Any, model: config.Model) -> Any:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("The model has no parameters to train; check model.config.")
    if model.gradient_checkpointing:
        # Transformers 5 has renamed the method and warns about the old name.
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if model.split_batch > 1:
        split_batch(module, model.split_batch)
    module.train()
    return module


def try_out(model: Any, hf: Any, sequence_length: int) -> None:
    """Runs a new model once. Raises ConfigError if its fields do not fit together, which only its forward may show."""
    with _refused(hf), inference(model):
        model(input_ids=torch.zeros(1, sequence_length, dtype=torch.int64, device=model.device), use_cache=False)


@contextmanager
def _refused(hf: Any) -> Iterator[None]:
    """Turns what Transformers raises for an impossible configuration into a ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model.config makes no working {hf.model_type}: {reason}") from None


def compile_blocks(model: nn.Module, where: torch.device) -> None:
    """Has torch.compile compile each block of the model at its first call.

    Raises ConfigError for a model without blocks, and if nothing can be compiled for this device.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError("train.compile: blocks needs a model with repeated blocks; leave train.compile out.")
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=where))
    except RuntimeError as error:
        needed = "Triton" if where.type == "cuda" else "a C++ compiler"
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"train.compile: torch.compile does not work here; install {needed}, or leave train.compile out: {reason}"
        ) from None
    for block in blocks:
        block.compile()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, vectors (norms and biases) do not, nor do the fused biases of experts."""
    trained = [
        (p, p.ndim >= 2 and not name.endswith("bias")) for name, p in model.named_parameters() if p.requires_grad
    ]
    groups = [
        {"params": [p for p, decays in trained if decays], "weight_decay": weight_decay},
        {"params": [p for p, decays in trained if not decays], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cost(model: nn.Module, hf: Any, sequence_length: int) -> Cost:
    """6 FLOPs per parameter, and 6·layers·width·sequence for causal attention (PaLM, appendix B, halved).

    A frozen parameter takes 4, because it has no gradient. Of experts, those that a token is routed to count.
    """
    text, routed = hf.get_text_config(), _routed_shares(model, hf)
    flops = sum((6 if p.requires_grad else 4) * p.numel() * routed.get(id(p), 1.0) for p in model.parameters())
    attention = 6 * text.num_hidden_layers * text.hidden_size * sequence_length
    return Cost(sum(p.numel() for p in model.parameters() if p.requires_grad), float(flops + attention))


def _routed_shares(model: nn.Module, hf: Any) -> dict[int, float]:
    """By id, the share of each parameter of experts that one token is routed to.

    Transformers calls their modules `experts`, of every kind of model. The first dimension of a tensor in them is that
    of the experts; or they are a ModuleList of modules. `num_experts_per_tok` of them see a token.
    """
    chosen = getattr(hf.get_text_config(), "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        return {}
    return {
        id(parameter): min(chosen / (len(module) if isinstance(module, nn.ModuleList) else parameter.shape[0]), 1.0)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
        for parameter in module.parameters()
    }


def device(wanted: str) -> torch.device:
    """The device to train on. Raises ConfigError for "cuda" if there is no GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda, but torch sees no GPU here; set train.device to cpu or auto.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def peak_tflops(where: torch.device) -> float | None:
    """The device's dense bf16 peak in TFLOP/s, or None for a CPU and for a GPU that is not in the table."""
    return peak_of(torch.cuda.get_device_name(where)) if where.type == "cuda" else None


def peak_of(gpu: str) -> float | None:
    """The dense bf16 peak in TFLOP/s of a GPU by its name, or None if it is not in the table."""
    name = gpus.named(gpu)
    return None if name is None else gpus.GPUS[name].tflops


def require_folder(folder: Path | None) -> None:
    """Raises ConfigError if `model.path` names no folder: it may be meant as a name on the Hub."""
    if folder is not None and not folder.is_dir():
        name = "/".join(folder.parts[-2:])
        raise ConfigError(
            f"There is no folder {folder}, which model.path names. HyTrain downloads nothing: if it is a model of the "
            f"Hugging Face Hub, run `hf download {name} --local-dir {name}` first."
        )


def _from_folder(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"The model folder {folder} holds no config.json; correct model.path.")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The model folder {folder} is unusable: {str(error).splitlines()[0]}") from None


def _from_fields(fields: dict[str, Any], vocab_size: int | None) -> Any:
    """A new configuration. The names are checked here, because Transformers accepts any keyword."""
    kind = fields["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f'model.config has the unknown model_type "{kind}"{suggestion(kind, CONFIG_MAPPING.keys())}')
    known = AutoConfig.for_model(kind)
    names = {*known.to_dict(), *known.attribute_map}
    if unknown := next((name for name in fields if name not in names), None):
        raise ConfigError(f'unknown key "model.config.{unknown}" for a {kind}{suggestion(unknown, names)}')
    # The default special tokens are another tokenizer's. They would end a generated text at random.
    given: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if vocab_size is not None:
        given["vocab_size"] = vocab_size
    given.update({name: value for name, value in fields.items() if name != "model_type"})
    try:
        return AutoConfig.for_model(kind, **given)
    except (StrictDataclassError, ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"model.config is not a valid {kind}: {' '.join(str(error).split())}") from None
