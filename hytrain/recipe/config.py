"""The recipe: the keys of a YAML file, their defaults, and one error sentence for each possible mistake.

The launcher calls `load` once and passes the frozen result on. Nothing here imports torch, so a wrong key is
reported at once.

    file ─ yaml ─▶ tree ─┐
                         ├─ merge ─▶ validate ─▶ Recipe ─ dump ─▶ resolved file in the run's folder
    --set a.b=v ─▶ tree ─┘

Relative input paths in the file start at the file's folder, those in an override at the current folder. The
resolved recipe has absolute paths, so it can be moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from yaml.error import MarkedYAMLError

from hytrain.errors import ConfigError
from hytrain.readable import nearest, size

Tree = dict[str, Any]

PATH_WORDS = ("latest", "auto", "chatml")  # in the place of a path
INPUT_PATHS = (
    ("model", "path"),
    ("tokenizer", "path"),
    ("tokenizer", "chat_template"),
    ("data", "paths"),
    ("train", "resume"),
)


def _count_or_rest(value: object) -> object:
    """torchtitan's -1 is "auto"; pydantic's union would report two errors."""
    if value in ("auto", -1):
        return "auto"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError('the number of ranks must be "auto" or at least 1')
    return value


def _number_or(word: str, what: str, low: float, high: float) -> BeforeValidator:
    """A validator for the word or a number within bounds; pydantic's union would report two errors."""

    def validated(value: object) -> object:
        if value == word:
            return value
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            raise ValueError(f'{what} must be "{word}" or a number from {low:g} to {high:g}')
        return number

    return BeforeValidator(validated)


def _of_parameters(option: str, which: str) -> BeforeValidator:
    return _number_or("auto", f"{option}, the share of the parameters {which},", 0, 1)


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Scale = Annotated[float | Literal["dynamic"], _number_or("dynamic", "the loss's scale", 1e-20, 1e20)]
NumberOrAuto = float | Literal["auto"]
Share = Annotated[NumberOrAuto, _of_parameters("k", "that the GPU owns")]
VisitingShare = Annotated[NumberOrAuto, _of_parameters("visit", "whose state visits the GPU")]
OffloadedShare = Annotated[NumberOrAuto, _of_parameters("offload_weights", "whose weights rest in host memory")]
Ranks = Annotated[int | Literal["auto"], BeforeValidator(_count_or_rest)]

#: Names of `transformers.SchedulerType` for schedules that depend on the step alone.
Schedule = Literal["cosine", "cosine_with_restarts", "linear", "constant", "inverse_sqrt", "warmup_stable_decay"]


def _is_number(kind: Any) -> bool:
    """Whether a field of this kind may be a number. A validator before pydantic's has words of its own."""
    inside = get_args(kind)
    return kind in (int, float) or (
        not any(isinstance(each, BeforeValidator) for each in inside) and any(map(_is_number, inside))
    )


class Section(BaseModel):
    """A frozen part of the recipe. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """True and false are no numbers, as which Python has them."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and _is_number(Annotated[field.annotation, *field.metadata, None]):
            raise PydanticCustomError("bool", "it should be a number, not true or false")
        return value


class Run(Section):
    """The run's folder, and what makes the run repeatable."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    dir: Annotated[Path, AfterValidator(lambda path: _expanded(path))] = Path("runs")
    seed: Annotated[Count, Field(lt=1 << 63)] = 0
    threads: Positive = 2  # of a trainer on a CPU; gradients depend on the number, so it is never guessed
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()  # [tensorboard, wandb]; W&B offline, or as WANDB_MODE says


class Model(Section):
    """A local Hugging Face folder (`path`), or the fields of a new model's configuration (`config`)."""

    path: Path | None = None
    config: Tree | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    autocast: bool = False  # forward and backward in bfloat16, parameters in float32
    gradient_checkpointing: bool = False
    split_batch: Positive = 1  # parts of the batch that each block computes one after another

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.config is None):
            raise ValueError("model needs either a path or a config, and not both")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('model.config needs a model_type such as "llama" or "gpt2"')
        if self.autocast and self.dtype != "float32":
            raise ValueError("model.autocast is for float32 parameters, so leave one of autocast and dtype out")
        return self


class Lora(Section):
    """Low-rank adapters, by PEFT's names: they are trained, and the weights of `model.path` are frozen."""

    r: Positive = 8  # rank
    alpha: Positive = 16  # the adapters' output is multiplied by alpha / r
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"  # or names: [q_proj, v_proj]


class Tokenizer(Section):
    """`bytes` has one token per byte, `bpe` is trained on the training text, `path` is a local folder.

    `auto` is the tokenizer in the folder `model.path`, and `bytes` for a new model.
    """

    kind: Literal["auto", "bytes", "bpe", "path"] = "auto"
    vocab_size: Annotated[int, Field(ge=256)] = 4096  # of `bpe`
    path: Path | None = None
    chat_template: Literal["chatml"] | Path | None = None  # a file in Jinja; None: the tokenizer's own

    @model_validator(mode="after")
    def _path_if_asked(self) -> Tokenizer:
        if (self.kind == "path") != (self.path is not None):
            raise ValueError("tokenizer.path goes together with tokenizer.kind: path")
        return self


class Data(Section):
    """Text, conversations or random tokens, in sequences of `sequence_length` tokens.

    `chat` reads rows with `messages`, or with `prompt` and `completion`, and learns the answers only.
    """

    kind: Literal["text", "chat", "random"] = "text"
    paths: tuple[Path, ...] = ()
    text_column: str | None = None  # of `text`, in files with rows
    packing: bool = False  # of `chat`: several examples in a sequence
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.05  # fraction, taken from the end
    sequence_length: Annotated[int, Field(ge=2)] = 256
    batch_size: Positive = 8

    @model_validator(mode="after")
    def _paths_if_text(self) -> Data:
        if (self.kind != "random") != bool(self.paths):
            raise ValueError("data needs paths for kind: text or chat and none for kind: random")
        if self.text_column is not None and self.kind != "text":
            raise ValueError("data.text_column is for kind: text")
        if self.packing and self.kind != "chat":
            raise ValueError("data.packing is for kind: chat, because the sequences of other kinds are full")
        return self


#: What each optimizer takes, besides the weight decay, which has groups of its own.
HYPERPARAMETERS: Final = {
    "adamw": ("lr", "betas", "eps"),
    "sgd": ("lr", "momentum", "nesterov"),
    "lion": ("lr", "betas"),
    "muon": ("lr", "betas", "eps"),
}


class Train(Section):
    """The length of the run, the optimizer, its hyperparameters and the learning rate's schedule."""

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None  # in place of steps
    optimizer: Literal["adamw", "sgd", "lion", "muon"] = "adamw"  # muon: for the matrices of blocks, beside adamw
    lr: Annotated[float, Field(gt=0)] = 3e-4
    min_lr: Annotated[float, Field(ge=0)] = 0.0  # the schedule ends here
    warmup_steps: Count = 0  # linear
    schedule: Schedule = "cosine"  # after the warm-up: one of Transformers' schedules, by its name
    schedule_options: Tree = {}  # of that schedule, by Transformers' names: {num_decay_steps: 100}
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of adamw, also beside muon, and of lion
    eps: Annotated[float, Field(gt=0)] = 1e-8  # of adamw, also beside muon
    momentum: Annotated[float, Field(ge=0)] = 0.0  # of sgd
    nesterov: bool = False  # of sgd, with a momentum
    grad_accumulation: Positive = 1  # parts of each batch, whose gradients are summed
    loss_chunks: Positive = 1  # parts of each sequence, whose logits are there one after the other
    compile: Literal["blocks"] | None = None  # "blocks": each transformer block, by torch.compile
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None  # clips the global norm
    loss_scale: Scale | None = None  # for float16; "dynamic", or a number
    on_nonfinite: Literal["skip", "raise"] | None = None  # what to do with a step whose gradients have inf or NaN
    on_divergence: Literal["stop", "continue"] = "stop"  # what to do once the loss or the weights are not finite
    eval_every: Positive | None = None  # the end of the run is always evaluated
    eval_batches: Positive = 16
    checkpoint_every: Positive | None = None  # the end of the run is always saved
    keep_last: Positive | None = None  # keep only this many of the run's checkpoints
    keep_every: Positive | None = None  # with keep_last: keep those of each multiple of this many steps, too
    stop_at: Positive | None = None  # end early, with the learning rates of the whole run
    resume: Path | None = None  # "latest" for the run's newest checkpoint, "auto" if there is one, or a folder
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Train:
        own = HYPERPARAMETERS[self.optimizer]
        for name in (name for names in HYPERPARAMETERS.values() for name in names if name not in own):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"train.{name} is no hyperparameter of train.optimizer: {self.optimizer}")
        if self.nesterov and not self.momentum:
            raise ValueError("train.nesterov needs a train.momentum above 0")
        return self

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What `optimizer` takes, besides the weight decay."""
        return {name: getattr(self, name) for name in HYPERPARAMETERS[self.optimizer]}

    @property
    def rule(self) -> str:
        """The rule with which `optimizer` updates, of `protocol.rules.MOMENTS`; of several, that with most state."""
        if self.optimizer == "muon":
            return "adamw"
        return "sgd_momentum" if self.momentum else self.optimizer

    @model_validator(mode="after")
    def _schedule_fits(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("train needs either steps or epochs, and not both")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError("train.warmup_steps must be smaller than train.steps")
        if self.min_lr > self.lr:
            raise ValueError("train.min_lr must not be above train.lr")
        if self.stop_at is not None and self.steps is not None and self.stop_at > self.steps:
            raise ValueError("train.stop_at must not be above train.steps")
        return self

    @property
    def length(self) -> int:
        """The steps of the whole schedule. `in_steps` has to have been called for a recipe with epochs."""
        assert self.steps is not None, "epochs become steps where the data is read"
        return self.steps


class Optimizer(Section):
    """How GPU and CPU share the update."""

    k: Share = "auto"
    visit: VisitingShare = 0.0  # the share whose state visits the GPU: a number with one for k, or auto with k: auto
    offload_weights: OffloadedShare = 0.0  # the share whose weights rest in host memory, in whole blocks
    offload_activations: bool = False  # what forward saves for backward goes to host memory: long sequences need less
    policy: Literal["deadline", "balance", "random", "fixed"] = "deadline"  # for k: auto
    objective: Literal["speed", "gpu-memory", "host-memory"] = "speed"  # of policy deadline
    speculate: bool | None = None  # with train.max_grad_norm: update before the norm is known; None: decided by speed
    backend: Literal["auto", "native", "deepspeed", "torch"] = "auto"
    gradient_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # as sent to the CPU; auto: the parameter's
    state_dtype: Literal["float32", "bfloat16", "float8"] = "float32"  # of the moments; only float32 is exact
    master_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: bfloat16 weights without masters; not exact

    @model_validator(mode="after")
    def _fixed_k_is_given(self) -> Optimizer:
        if self.policy == "fixed" and self.k == "auto":
            raise ValueError("optimizer.policy: fixed needs optimizer.k as a number from 0 to 1")
        return self


#: "24GiB", or bytes.
Size = Annotated[int, BeforeValidator(lambda given: None if given is None else size(str(given)))]


class Cluster(Section):
    """What the launcher assigns to the processes of the run."""

    cores: str = "auto"  # of the optimizer process: "auto", "node:0", or a list such as "2-7,10"
    optimizer_threads: Positive | Literal["auto"] = "auto"
    host_memory_limit: Size | None = None  # such as 58GiB
    gpu_memory_limit: Size | None = None  # such as 24GiB


class Parallel(Section):
    """Several ranks: the sizes of the mesh's dimensions, as in torchtitan. Their product is the number of ranks."""

    data_shard: Ranks = "auto"  # ranks that share parameters and state (FSDP2); "auto" or -1: all that are left
    data_replicate: Positive = 1  # groups of such ranks; each group has all parameters (HSDP)
    context: Positive = 1  # ranks that share each sequence: a part of it each, in attention some heads of all of it
    tensor: Positive = 1  # ranks that share the matrices of each layer, by the model's own plan

    def sizes(self, ranks: int) -> dict[str, int]:
        """The mesh for so many ranks, outermost dimension first. Raises ConfigError if the sizes ask for others."""
        others = self.data_replicate * self.context * self.tensor
        shard = max(1, ranks // others) if self.data_shard == "auto" else self.data_shard
        data = {"data_replicate": self.data_replicate, "data_shard": shard}
        mesh = {**data, "context": self.context, "tensor": self.tensor}
        if others * shard != ranks:
            product = " x ".join(f"{name} {size}" for name, size in mesh.items() if size > 1)
            raise ConfigError(
                f"parallel asks for {others * shard} ranks ({product}), but this job has {ranks}: "
                f"start it with --nproc-per-node {others * shard}, or choose sizes whose product is {ranks}."
            )
        return mesh

    def data_ranks(self, ranks: int) -> int:
        """How many ranks of such a job have samples of their own."""
        mesh = self.sizes(ranks)
        return mesh["data_replicate"] * mesh["data_shard"]


class Sample(Section):
    """A prompt that the model continues at the end of the run."""

    prompt: Annotated[str, Field(min_length=1)]
    tokens: Positive = 200
    temperature: Annotated[float, Field(ge=0)] = 0.8  # 0 takes the likeliest token


class Recipe(Section):
    """The whole recipe. `model`, `data` and `train` are required."""

    run: Run = Run()
    model: Model
    lora: Lora | None = None
    tokenizer: Tokenizer = Tokenizer()
    data: Data
    train: Train
    optimizer: Optimizer = Optimizer()
    cluster: Cluster = Cluster()
    parallel: Parallel = Parallel()
    sample: Sample | None = None

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if self.data.batch_size % self.train.grad_accumulation:
            raise ValueError("data.batch_size must be a multiple of train.grad_accumulation")
        if self.lora is not None and self.model.path is None:
            raise ValueError("lora needs model.path, because only the adapters are trained and saved")
        if self.optimizer.master_dtype == "bfloat16" and self.model.dtype != "bfloat16":
            raise ValueError("optimizer.master_dtype: bfloat16 is for model.dtype: bfloat16, so leave it out")
        if self.data.packing and self.parallel.context > 1:
            raise ValueError("data.packing is not for parallel.context, because packed examples would see each other")
        if self.train.compile is not None and self.parallel.tensor > 1:
            raise ValueError("train.compile is not for parallel.tensor, because torch fails to compile such blocks")
        if self.sample is not None and self.data.kind == "random":
            raise ValueError("sample needs data.kind: text or chat, because random tokens have no text")
        if self.train.eval_every is not None and self.data.kind == "random":
            raise ValueError("train.eval_every needs data that can be held out, which random tokens can't")
        if self.train.epochs is not None and self.data.kind == "random":
            raise ValueError("train.epochs needs data that ends; give train.steps for random tokens")
        return self


def load(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies the overrides (`"train.steps=100"`, values in YAML).

    Raises ConfigError, with one sentence, for any error in the file or in an override.
    """
    path = Path(path)
    try:
        tree = _of_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The recipe {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The recipe {path} is not UTF-8: {error}.") from None
    except _NotYaml as error:
        raise ConfigError(f"The recipe {path} is not valid YAML{error}.") from None
    if not isinstance(tree, dict):
        *most, last = Recipe.model_fields
        raise ConfigError(f"The recipe {path} must be a mapping with the keys {', '.join(most)} and {last}.")
    tree = _absolute(tree, path.resolve().parent)
    for override in overrides:
        tree = _merge(tree, _absolute(_parse_override(override), Path.cwd()))
    return validate(tree, str(path))


def validate(tree: Tree, source: str) -> Recipe:
    """A recipe from a plain tree. Raises ConfigError with a sentence that begins with `source`."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        # Report an unknown key first: it may be a misspelled key that is reported as missing.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError(f"{source}: {_sentence(first)}") from None


def in_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with its epochs as a number of steps. Raises ConfigError if the schedule does not fit into them."""
    tree = recipe.model_dump(mode="json")
    source = f"{recipe.train.epochs:g} epochs of this data are {steps} steps"
    return validate(_merge(tree, {"train": {"steps": steps, "epochs": None}}), source)


def check_ranks(recipe: Recipe, ranks: int) -> None:
    """Raises ConfigError if a job with so many ranks cannot train the recipe."""
    data, parts = recipe.parallel.data_ranks(ranks), recipe.train.grad_accumulation
    if ranks > 1 and recipe.lora is not None:
        raise ConfigError(f"lora is for one rank, but this job has {ranks}: start it without --nproc-per-node.")
    if ranks > 1 and recipe.model.split_batch > 1:
        raise ConfigError(f"model.split_batch is for one rank, but this job has {ranks}: use train.grad_accumulation.")
    if recipe.data.batch_size % (data * parts):
        raise ConfigError(
            f"data.batch_size is {recipe.data.batch_size}, which {data} ranks cannot share"
            + (f" in {parts} parts" if parts > 1 else "")
            + f": make it a multiple of {data * parts}."
        )


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML. `load` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: `; did you mean "steps"?` or a full stop."""
    close = nearest(word, known)
    return f'; did you mean "{close}"?' if close else "."


_MERGE: Final = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with one key twice, of which YAML has the last one alone."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]:
            if key.value in seen:
                raise MarkedYAMLError(problem=f'the key "{key.value}" is there twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return node


class _NotYaml(Exception):
    """Its text goes on in a sentence."""


def _of_yaml(text: str) -> Any:
    """Raises `_NotYaml`, with the place."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise _NotYaml(_place(error)) from None
    except (RecursionError, ValueError) as error:  # too deep; a date that the calendar lacks
        raise _NotYaml(f": {error}") from None


def _parse_override(override: str) -> Tree:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f'The override "{override}" is not of the form section.key=value.')
    try:
        value = _of_yaml(text)
    except _NotYaml as error:
        raise ConfigError(f'The override "{override}" has an invalid value{error}.') from None
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merge(below: Tree, above: Tree) -> Tree:
    merged = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def _absolute(tree: Tree, base: Path) -> Tree:
    """The tree with absolute input paths, relative ones starting at `base`; other values are left to the validation."""
    for section, key in INPUT_PATHS:
        part = tree.get(section)
        if isinstance(part, dict) and key in part:
            tree = _merge(tree, {section: {key: _based(part[key], base)}})
    return tree


def _expanded(path: str | Path) -> Path:
    """With the home of `~` or `~user`, if there is one: a file may be called so."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _based(value: object, base: Path) -> object:
    if isinstance(value, str) and value not in PATH_WORDS:
        return str(base / _expanded(value))
    if isinstance(value, list):
        return [_based(item, base) for item in value]
    return value


def _sentence(error: ErrorDetails) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f'unknown key "{key}"{_suggest_key(location)}'
    if error["type"] == "missing":
        return f'the key "{key}" is missing.'
    if error["type"] == "value_error":
        is_leaf = location and not isinstance(error["input"], (dict, BaseModel))
        return f"{error['ctx']['error']}, not {error['input']!r}." if is_leaf else f"{error['ctx']['error']}."
    message = re.sub(r"^\w+ should", "it should", error["msg"]).replace("a valid tuple", "a list, as in [a, b]")
    return f'"{key}" is {error["input"]!r}, but {message}.'


def _suggest_key(location: Sequence[str]) -> str:
    """Suggests a sibling with a similar name, else such a key anywhere in the recipe, else names the siblings."""
    *parents, word = location
    keys = list(_keys(Recipe))
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == ".".join(parents)}
    elsewhere = {key.rpartition(".")[2]: key for key in keys}
    for names in (siblings, elsewhere):
        if close := nearest(word, names):
            return f'; did you mean "{names[close]}"?'
    return f"; the keys {'of ' + '.'.join(parents) if parents else 'of a recipe'} are {', '.join(siblings)}."


def sections(field: FieldInfo) -> list[type[Section]]:
    """The sections that a key may have."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in sections(field):
            yield from _keys(kind, f"{prefix}{name}.")


def _place(error: yaml.YAMLError) -> str:
    """Where YAML goes wrong, the line that is there, and why."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return f": {' '.join(str(error).split())}"
    lines = (mark.buffer or "").rstrip("\0").splitlines()
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    shown = f', "{line}"' if line else ""
    return f" in line {mark.line + 1}, column {mark.column + 1}{shown}: {error.problem}"
