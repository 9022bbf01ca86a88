"""The options of every optimizer, each once: its name, default, check and meaning.

    hytrain.AdamW(model, k=0.3, …) ─▶ Options.of ─▶ session, engine        or a `ConfigError`, which says what to do

A test compares docs/options.md, the recipe's keys and `SharedOptions` with this table. `checks` has what depends on the
model and on other ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Literal, Self, TypedDict

import torch
from torch.distributed import ProcessGroup

from hytrain.algorithms import ADAMW, Algorithm, is_number
from hytrain.config import ClusterConfig
from hytrain.errors import ConfigError
from hytrain.kernels.choice import BACKENDS
from protocol.handles import Precision
from protocol.messages import MASTER_DTYPES, OBJECTIVES, POLICIES, STATE_DTYPES

_LINK: Final = re.compile(r"\[([^]]*)\]\([^)]*\)")
_OF_PROCESSES: Final = "in docs/options.md, below Processes"


class SharedOptions(TypedDict, total=False):
    """The options of every optimizer, with the types that users give."""

    updates: Literal["auto", "backward", "step"]
    grad_accumulation: int
    accumulate_on: Literal["auto", "device", "host"]
    max_grad_norm: float | None
    clip: Literal["global", "per_layer"]
    on_nonfinite: Literal["skip", "raise"] | None
    speculate: bool | None
    loss_scale: float | Literal["dynamic"] | None
    k: float | Literal["auto"]
    visit: float | Literal["auto"]
    offload_weights: float | Literal["auto"]
    offload_activations: bool
    device: torch.device | str | None
    policy: Literal["deadline", "fixed", "balance", "random"]
    objective: Literal["speed", "gpu-memory", "host-memory"]
    backend: Literal["auto", "native", "deepspeed", "torch"]
    gradient_dtype: torch.dtype | None
    state_dtype: torch.dtype | Literal["float32", "bfloat16", "float8"]
    master_dtype: torch.dtype | Literal["float32", "bfloat16"]
    overlap: bool
    cores: str | None
    threads: int | None
    run_dir: str | os.PathLike[str] | None
    host_memory_limit: int | str | None
    gpu_memory_limit: int | str | None
    trace: bool | None
    check: int | None
    pipeline_group: ProcessGroup | None
    log_to: Sequence[str]


class TorchsOptions(SharedOptions, total=False):
    """Those that torch's classes have besides, and HyTrain only with their defaults, or without an effect."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


@dataclass(frozen=True, slots=True)
class OneOf:
    """A check for one of several values."""

    choices: tuple[Any, ...]
    wrong: str = ""

    def __call__(self, name: str, given: Any) -> Any:
        if given not in self.choices:
            choices = ", ".join(map(str, self.choices))
            raise ConfigError((self.wrong or "{} {!r} is unknown: choose one of {}").format(name, given, choices))
        return given


class DtypeName(OneOf):
    """The same for dtypes, which may be torch's. It returns their names."""

    def __call__(self, name: str, given: Any) -> Any:
        return super().__call__(name, str(given).removeprefix("torch."))


def _checked(fits: Callable[[Any], bool], wrong: str) -> Callable[[str, Any], Any]:
    def check(name: str, given: Any) -> Any:
        if not fits(given):
            raise ConfigError(wrong.format(name, given))
        return given

    return check


def _fraction(name: str, given: Any) -> float | None:
    """The number; None for "auto"."""
    if given == "auto":
        return None
    if isinstance(given, str) or not (is_number(given) and 0.0 <= given <= 1.0):
        raise ConfigError(f'{name} is {given!r}: a fraction in [0, 1], or "auto"')
    return float(given)


def _is_whole(least: int, given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def _is_scale(given: Any) -> bool:
    return given in (None, "dynamic") or not (isinstance(given, bool | str) or not 1e-20 <= given <= 1e20)


def _device(name: str, given: Any) -> torch.device | None:
    """The device, with its number; None for the model's own."""
    if given is None:
        return None
    try:
        device = torch.device(given)
        is_there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    except (RuntimeError, TypeError):
        is_there = False
    if not is_there:
        raise ConfigError(f'{name} is {given!r}: "cpu", or "cuda" with a GPU that is there')
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


_flag = _checked(lambda given: isinstance(given, bool), "{} is {!r}: True or False")


def _option(default: Any, meaning: str, check: Callable[[str, Any], Any] = lambda name, given: given) -> Any:
    """A row of the table. `check` returns what is kept of a value that is given."""
    return field(metadata={"default": default, "meaning": meaning, "check": check})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of an optimizer, checked, in the order of docs/options.md. Fractions are None for "auto"."""

    algorithm: Algorithm
    updates: str = _option(
        "auto",
        'when a step\'s updates begin: in its last `"backward"`, or in `"step"`, as torch\'s do, so that gradients can '
        'be read and changed until then. `"auto"`: in `step()` if the loop does something between backward and it in '
        "its first two steps, else in backward",
        OneOf(("auto", "backward", "step"), '{} is {!r}: "auto", "backward" or "step"'),
    )
    grad_accumulation: int = _option(
        1,
        "how many backwards make a step; divide the loss by it yourself",
        _checked(partial(_is_whole, 1), "{} is {!r}: a whole number of backwards, from 1 on"),
    )
    accumulate_on: str = _option(
        "auto",
        'where the sums of gradients are kept, 4 bytes per parameter: `"device"`, `"host"`, or `"auto"` for the '
        "device if it has room",
        OneOf(("auto", "device", "host"), '{} is {!r}: "device", "host", or "auto" for either'),
    )
    max_grad_norm: float | None = _option(
        None,
        "clip the gradients' norm to this; `None` does not clip",
        _checked(
            lambda given: given is None or (is_number(given) and given > 0), "{} is {!r}: a number above 0, or None"
        ),
    )
    clip: str = _option(
        "global",
        'which norm is clipped: `"global"`, the norm of all gradients, or `"per_layer"`, which is a different '
        "algorithm",
        OneOf(("global", "per_layer"), '{} is {!r}: "global" or "per_layer"'),
    )
    on_nonfinite: str | None = _option(
        None,
        'what to do with gradients that contain inf or NaN: `"skip"` the step, `"raise"`, or `None` to train on '
        "as torch does",
        OneOf((None, "skip", "raise"), '{} is {!r}: "skip", "raise" or None'),
    )
    speculate: bool | None = _option(
        None,
        "whether the CPU updates before the norm is known, and undoes the update if it was wrong; `None` lets the "
        "coordinator decide by measurement; with Muon, it waits",
        _checked(lambda given: given is None or isinstance(given, bool), "{} is {!r}: True, False or None"),
    )
    loss_scale: float | str | None = _option(
        None,
        'for float16: a number or `"dynamic"`, together with `opt.scale(loss).backward()`',
        _checked(_is_scale, '{} is {!r}: "dynamic", a number from 1e-20 to 1e20, or None'),
    )
    k: float | None = _option(
        "auto",
        'the fraction of the parameters that the GPU owns, in [0, 1]; `"auto"` lets the planner choose',
        _fraction,
    )
    visit: float | None = _option(
        0.0,
        "the fraction of the parameters whose state rests in host memory and visits the GPU, which updates them: a "
        'number if `k` is one, or `"auto"` with `k="auto"`: then the planner chooses both',
        _fraction,
    )
    offload_weights: float | None = _option(
        0.0,
        "the fraction of the parameters whose [weights rest in host memory](memory.md#offloaded-weights), in "
        'whole blocks; they are on the GPU only while forward and backward need them. `"auto"`: all at first, '
        "then as many as the planner finds best in the memory that steps leave free. On several "
        "GPUs, [under FSDP2](several-gpus.md#weights-in-host-memory)",
        _fraction,
    )
    offload_activations: bool = _option(
        False,
        "whether what forward saves for backward [rests in host memory](memory.md#offloaded-activations) until "
        "backward needs it: with activation checkpointing the blocks' inputs, otherwise all that blocks save. The "
        "same bits",
        _flag,
    )
    device: torch.device | None = _option(
        None,
        "where to train a model that is still on the CPU: it is moved there, except offloaded weights; `None` trains "
        "it where it is. On one GPU",
        _device,
    )
    policy: str = _option(
        "deadline",
        'how `"auto"` chooses; `"balance"` and `"random"` exist for comparisons and tests',
        OneOf(POLICIES),
    )
    objective: str = _option(
        "speed",
        'what the policy `"deadline"` optimizes. `"speed"`: the least GPU memory within 1 % of the best step '
        'time. Also `"gpu-memory"`, `"host-memory"`',
        OneOf(OBJECTIVES),
    )
    backend: str = _option(
        "auto",
        'the implementation of the CPU\'s update: `"native"`, `"torch"`, or `"deepspeed"` for AdamW and Adam; '
        '`"auto"` takes native if it builds',
        OneOf(("auto", *BACKENDS), "{} {!r} is unknown: choose {}"),
    )
    gradient_dtype: torch.dtype | None = _option(
        None,
        "the dtype in which gradients of float32 parameters are copied: `torch.bfloat16` halves the copies, and rounds",
        OneOf((None, torch.float32, torch.bfloat16), "{} {}: gradients travel in torch.float32 or torch.bfloat16"),
    )
    state_dtype: str = _option(
        "float32",
        'the dtype of the moments: `"bfloat16"` takes 2 bytes less for each of them, `"float8"` 3; both are **not '
        "exact** ([Smaller moments](memory.md#smaller-moments))",
        DtypeName(STATE_DTYPES, "{} is {}: choose one of {}"),
    )
    master_dtype: str = _option(
        "float32",
        '`"bfloat16"`: bf16 weights have no masters, which takes 2 bytes less per parameter, and is **not exact** '
        "([Weights without masters](memory.md#weights-without-masters))",
        DtypeName(MASTER_DTYPES, "{} is {}: choose one of {}"),
    )
    overlap: bool = _option(True, "`False` does all updates in `step()`, layer by layer: the same bits, slower", _flag)
    cores: str | None = _option(None, "see below; for the processes that this call starts if none are running")
    threads: int | None = _option(None, "see below")
    run_dir: str | None = _option(None, "see below", lambda name, given: given if given is None else os.fspath(given))
    host_memory_limit: int | str | None = _option(None, "see below")
    gpu_memory_limit: int | str | None = _option(None, "see below")
    trace: bool | None = _option(None, "see below")
    check: int | None = _option(
        None,
        "see below",
        _checked(lambda given: given is None or _is_whole(0, given), "{} is {!r}: a whole number of steps, from 0 on"),
    )
    pipeline_group: ProcessGroup | None = _option(
        None, "the process group of a [pipeline's](several-gpus.md#pipelines) stages"
    )
    log_to: Sequence[str] = _option(
        (),
        '`["tensorboard", "wandb"]`, or one of them: what `opt.log` is given goes there, too '
        "([Records](records.md#tensorboard-and-weights-biases))",
    )

    @classmethod
    def of(cls, algorithm: Algorithm, given: Mapping[str, Any]) -> Self:
        """Those that are given, and the others' defaults. Raises `ConfigError`."""
        checked = {name: row["check"](name, given.get(name, row["default"])) for name, row in TABLE.items()}
        options = cls(algorithm=algorithm, **checked)
        for sentence in _contradictions(options):
            raise ConfigError(sentence)
        return options if options.k is None else replace(options, policy="fixed")

    def cluster_config(self) -> ClusterConfig:
        """The settings of the processes that are started. Raises `ConfigError`."""
        names = TABLE.keys() & ClusterConfig.model_fields.keys()
        return ClusterConfig.resolve(flags={name: getattr(self, name) for name in names})

    @property
    def precision(self) -> Precision:
        return Precision(self.state_dtype, self.master_dtype)

    def updates_on(self, ranks: int) -> str:
        """`updates`; without overlap, updates begin in `step()` in any case.

        Ranks that all wait for the norm must ask for it at the same place of the loop: none learns.
        """
        if not self.overlap:
            return "step"
        return "backward" if self.updates == "auto" and self.awaits_verdict and ranks > 1 else self.updates

    @property
    def awaits_verdict(self) -> bool:
        """Whether updates wait for the norm of all gradients."""
        return (self.max_grad_norm is not None and self.clip == "global") or self.skips_nonfinite

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with gradients that are not finite is skipped."""
        return self.on_nonfinite is not None or self.loss_scale is not None

    @property
    def may_speculate(self) -> bool:
        """Whether the CPU may update before the norm is known. That takes a second bank of planes in host memory.

        With a scaled loss it may not: an early update assumes a scale of 1.
        """
        wanted = self.speculate if self.speculate is not None else self.objective != "host-memory"
        return wanted and self.awaits_verdict and self.overlap and self.loss_scale is None


#: By name: default, meaning and check.
TABLE: Final = {option.name: option.metadata for option in fields(Options) if option.metadata}


def described() -> str:
    """All options for `help()`, in the form of a docstring's arguments."""
    lines = []
    for name, row in TABLE.items():
        meaning = _LINK.sub(r"\1", row["meaning"]).replace("see below", _OF_PROCESSES)
        lines.append(f"    {name}: {meaning}. Default: {row['default']!r}.")
    return "\n".join(lines)


def _contradictions(o: Options) -> Iterator[str]:
    """What to say of options that contradict each other."""
    if o.backend == "deepspeed" and o.algorithm.rules != ADAMW.rules:
        yield 'backend "deepspeed" has only AdamW and Adam: leave backend out'
    if o.visit and (o.k is None or o.k + o.visit > 1.0):
        k = "auto" if o.k is None else o.k
        yield f"visit is {o.visit!r} with k={k}: give a number for k too, both 1 at most"
    if o.visit is None and (o.k is not None or o.policy != "deadline"):
        yield 'visit="auto" needs k="auto" and policy="deadline", which decides both'
    if o.policy == "fixed" and o.k is None:
        yield 'policy="fixed" needs a k: a fraction in [0, 1] in place of "auto"'
    if o.clip == "per_layer" and o.max_grad_norm is None:
        yield 'clip="per_layer" clips nothing without max_grad_norm: pass it too'
    if o.speculate is not None and not o.awaits_verdict:
        yield (
            f"speculate is {o.speculate!r}, but no step waits for the norm of its gradients: pass max_grad_norm "
            'with clip="global", or on_nonfinite; or leave speculate out'
        )
    if o.speculate and not o.overlap:
        yield "speculate=True with overlap=False: leave one out, as nothing is updated before step() then"
    if o.loss_scale == "dynamic" and o.on_nonfinite == "raise":
        yield (
            'on_nonfinite="raise" with loss_scale="dynamic", which finds its scale by steps that are not finite: leave '
            "on_nonfinite out, they are skipped and counted"
        )
    if o.speculate and o.loss_scale is not None:
        yield "speculate=True with loss_scale: leave one out, as every update needs the verdict's scale then"
