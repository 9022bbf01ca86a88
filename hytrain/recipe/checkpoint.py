"""Checkpoints: everything that a run needs to continue bit for bit, in a folder that Hugging Face can load.

    run/checkpoints/step-600/
        config.json  model.safetensors  tokenizer.json …    for from_pretrained
        optimizer/                                          the optimizer's full state
        trainer_state.json                                  step, random generators, recipe; of which run, what came
                                                            before it, and the libraries' versions
        SHA256SUMS                                          the checksums of all of these
    run/checkpoints/history                                 the folders that this run went through, the newest last

A folder is written under a temporary name, synced to disk and renamed, so a folder with its final name is complete.
Training goes on while the disk is waited for. What cannot be written is removed.
`latest` is the last of the history. A run that resumes from an earlier checkpoint drops the later ones from it.
The loop calls `begin` and `save`; at the start of a resumed run it calls `find` and `restore`.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hytrain.errors import ConfigError, SavingError
from hytrain.memory.capacity import gpu_memory
from hytrain.memory.loan import copied
from hytrain.optimizer import Optimizer
from hytrain.recipe.config import Recipe, Train
from hytrain.recipe.parallel import Job
from hytrain.recipe.tokenizer import TextTokenizer
from hytrain.run.environment import versions
from hytrain.run.ranks import Ranks
from hytrain.run.saved import HISTORY, STATE_FILE, STEP, folder_of, history
from hytrain.state import manifest, tensor_file
from hytrain.state.locks import locked, read
from hytrain.state.saver import Saver, each

OPTIMIZER_FOLDER = "optimizer"
#: A checkpoint that is being written.
PARTIAL = re.compile(rf"\.{STEP.pattern}\.partial")
WEIGHTS = "model{suffix}.safetensors"
MAX_FILE_BYTES = 2 * 10**9
#: In the model's part of the recipe.
COMPARED = ("config", "dtype")

_log = logging.getLogger(__name__)


def save(
    run_dir: Path,
    step: int,
    model: Any,
    tokenizer: TextTokenizer | None,
    opt: Optimizer,
    recipe: Recipe,
    job: Job,
    saver: Saver,
) -> Future[Path]:
    """Writes the checkpoint after `step` finished steps. When this returns, training may go on.

    Then `saver` waits for the disk, and makes it the latest; the future has its folder. With `train.keep_last`, the
    oldest of this run's history are removed, but for those that `train.keep_every` keeps. All ranks call it and write
    their parts of the optimizer's state; rank 0 does everything else. What cannot be written is a `SavingError` on all
    ranks, raised or in the future; then nothing is left of it.
    """
    saver.wait()
    final = folder_of(run_dir) / f"step-{step}"
    partial = final.with_name(f".{final.name}.partial")
    with _removed_if_unwritable(partial, job):
        job.decided(lambda: _make_room(partial))
        opt.synchronize()
        write_weights = export(model, partial, job)
        optimizer = opt.async_save(partial / OPTIMIZER_FOLDER)
        randoms = [_Random.model_validate_json(one) for one in job.ranks.gather(_Random.now().model_dump_json())]
        before = [folder for folder in history(run_dir) if folder != final]
        state = _State(
            step=step,
            random=randoms,
            recipe=recipe.model_dump(mode="json"),
            run=run_dir.resolve().name,
            parent=_lines(run_dir, before)[-1] if before else None,
            versions=versions(),
        )
        try:
            job.decided(lambda: _write_rest(partial, tokenizer, state))
        except SavingError:
            wait([optimizer])  # it still writes into the folder
            raise

    def finish(ranks: Ranks) -> Path:
        with _removed_if_unwritable(partial, job):
            with ranks.together():
                try:
                    write_weights()
                finally:
                    optimizer.result()
            replace(job, ranks=ranks).decided(lambda: _publish(run_dir, partial, final, recipe.train))
        return final

    return saver.start(finish, f"training goes on, but the checkpoint of step {step}")


@contextmanager
def _removed_if_unwritable(partial: Path, job: Job) -> Iterator[None]:
    try:
        yield
    except SavingError:
        if job.speaks:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def export(model: Any, folder: Path, job: Job) -> Callable[[], None]:
    """Writes the model's Hugging Face folder.

    The weights are written from where they lie. The ranks of a job take turns to write files. A model that is
    whole may change while what this returns, called on any thread, writes a copy of its weights; or there was no
    memory for one, and it has nothing to do.
    """
    parts = _as_saved(model)
    if parts is None:
        _export_converted(model, folder, job)
        return lambda: None
    state, shapes = parts
    plan = split_torch_state_dict_into_shards(shapes, filename_pattern=WEIGHTS, max_shard_size=MAX_FILE_BYTES)
    files, described = plan.filename_to_tensors, {name: (each.dtype, each.shape) for name, each in shapes.items()}
    with job.ranks.together(), _writing(folder):
        if job.speaks:
            model.save_pretrained(folder, state_dict={})  # everything but the weights
            if plan.is_sharded:
                metadata = {"total_parameters": model.num_parameters(), **plan.metadata}
                index = {"metadata": metadata, "weight_map": plan.tensor_to_filename}
                (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))

    def write(file: str, tensors: Iterator[Tensor]) -> None:
        tensor_file.write(folder / file, {name: described[name] for name in files[file]}, tensors, {})

    def write_all(found: Mapping[str, Tensor], in_parallel: bool) -> None:
        def write_own(file: str) -> None:
            write(file, map(found.__getitem__, files[file]))

        with _writing(folder):
            each(write_own, files, tensor_file.WRITERS, in_parallel=in_parallel)

    if job.mesh is None:
        tensor_file.await_devices(state.values())
        loan = copied(gpu_memory(model.device), described, state.__getitem__, job.ranks)
        if loan is not None:
            return partial(loan.end_with, partial(write_all, in_parallel=False))
        write_all(state, in_parallel=True)
        return lambda: None
    for number, (file, names) in enumerate(files.items()):
        whole = map(_whole, map(state.__getitem__, names))
        with job.ranks.together(), _writing(folder):
            try:
                if number % job.ranks.world == job.ranks.rank:
                    write(file, whole)
            finally:
                for _ in whole:  # all ranks take part in making each tensor whole
                    pass
    return lambda: None


def _whole(tensor: Tensor) -> Tensor:
    """On all ranks, with its values."""
    made = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    tensor_file.await_devices([made])
    return made


def _as_saved(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The tensors that a folder of this model has, and their shapes, on meta.

    None if the model is not saved as it is, as with adapters or quantized weights.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return None
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_device_map", None):
        return None
    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    if not all(isinstance(value, Tensor) for value in state.values()):
        return None
    shapes = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    converted = revert_weight_conversion(model, dict(shapes))
    if converted.keys() != shapes.keys() or any(converted[name] is not shape for name, shape in shapes.items()):
        return None  # the folder has other tensors than the model
    if any(shape.dtype not in tensor_file.DTYPES for shape in shapes.values()):
        return None
    return state, remove_tied_weights_from_state_dict(shapes, model)


def _export_converted(model: Any, folder: Path, job: Job) -> None:
    """The same for a model that Transformers itself has to write, from one rank."""
    if job.mesh is None:
        with _writing(folder):
            model.save_pretrained(folder)
        return
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with job.ranks.together(), _writing(folder):
        if job.speaks:
            model.save_pretrained(folder, state_dict=whole)


def _writing(folder: Path) -> AbstractContextManager[None]:
    """safetensors has an error of its own for a full disk."""
    return manifest.writing(folder, SafetensorError)


def _make_room(partial: Path) -> None:
    with _writing(partial):
        for left in [*partial.parent.glob(".step-*")]:  # by a process that was killed
            if PARTIAL.fullmatch(left.name):
                _remove(left)
        partial.mkdir(parents=True)


def _remove(path: Path) -> None:
    """Whatever it is: of a link, what it leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_rest(partial: Path, tokenizer: TextTokenizer | None, state: _State) -> None:
    with manifest.writing(partial, Exception):  # tokenizers have no exception of their own
        if tokenizer is not None:
            tokenizer.hf.save_pretrained(partial)
        (partial / STATE_FILE).write_text(json.dumps(state.model_dump(mode="json")))


def _publish(
    run_dir: Path,
    partial: Path,
    final: Path,
    plan: Train,
) -> None:
    with _writing(final):
        manifest.seal(partial, manifest.files_in(partial))
        before = [folder for folder in history(run_dir) if folder != final]
        _remove(final)  # abandoned, so nobody's latest
        _note(run_dir, [*before, final])  # first: a history may name what is not there, but must not lack what is
        partial.rename(final)
        manifest.sync(final.parent)
    own = [folder for folder in [*before, final] if folder.parent == final.parent and STEP.fullmatch(folder.name)]
    for folder in own[: -(plan.keep_last or len(own))]:
        step = int(folder.name.partition("-")[2])
        if plan.keep_every is None or step % plan.keep_every:
            with suppress(OSError), locked(folder, wait=False) as is_locked:
                if is_locked:  # or else a run resumes from it; then it goes with the next one
                    shutil.rmtree(folder, ignore_errors=True)


def begin(run_dir: Path, resumed: Path | None) -> None:
    """Lets the history end with the checkpoint that the run starts from, and logs which others that abandons."""
    before = history(run_dir)
    if resumed is None:
        after = []
    else:
        resumed = resumed.resolve()
        after = before[: before.index(resumed) + 1] if resumed in before else [resumed]
    if abandoned := [folder.name for folder in before if folder not in after]:
        _log.warning(
            "this run starts from %s and abandons %s: train.resume=latest does not find them any more, and the steps "
            "that are saved again replace them",
            "nothing" if resumed is None else resumed.name,
            ", ".join(abandoned),
        )
    if after != before:
        _note(run_dir, after)


def find(run_dir: Path, recipe: Recipe) -> Path | None:
    """The folder that `train.resume` names, or None to start anew. Raises ConfigError if it is unusable.

    "latest" and "auto" mean the newest one that is whole; a line in the log says which are skipped, and why.
    """
    resume = recipe.train.resume
    if resume is None:
        return None
    if resume in (Path("latest"), Path("auto")):
        folder = _newest_whole(run_dir)
        if folder is None and resume == Path("auto"):
            return None
        if folder is None:
            raise ConfigError(f"There is no checkpoint in {run_dir} to resume; leave train.resume out to start anew.")
    else:
        folder = resume
        _verify(folder)
    saved, wanted = _read(folder).recipe, recipe.model_dump(mode="json")
    for key in COMPARED:
        if saved["model"][key] != wanted["model"][key]:
            raise ConfigError(f"The checkpoint {folder} was made with another model.{key}; resume with the same.")
    if saved.get("lora") != wanted["lora"]:
        raise ConfigError(f"The checkpoint {folder} was made with another lora; resume with the same.")
    return folder


def _newest_whole(run_dir: Path) -> Path | None:
    """The newest checkpoint of the history that is whole; None without any. Raises ConfigError if none is whole."""
    refusal: ConfigError | None = None
    for folder in reversed(history(run_dir)):
        try:
            _verify(folder)
        except ConfigError as error:
            _log.warning("skipped %s: %s", folder.name, error)
            refusal = refusal or error
        else:
            return folder
    if refusal is not None:
        raise refusal
    return None


def _verify(folder: Path) -> None:
    """Raise ConfigError unless this is a checkpoint as it was saved."""
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(f"{folder} is not a checkpoint, because it has no {STATE_FILE}; correct train.resume.")
    manifest.verify(folder)
    if (folder / OPTIMIZER_FOLDER / manifest.SUMS).is_file():
        manifest.verify(folder / OPTIMIZER_FOLDER)
    _read(folder)


def restore(folder: Path, opt: Optimizer, job: Job) -> int:
    """Loads the optimizer and the random generators; returns the number of finished steps.

    If the checkpoint is of another number of ranks, the generators begin anew.
    """
    state = _read(folder)
    then, now = state.versions, versions()
    if others := [f"{name} {then[name]}" for name in then.keys() & now.keys() if then[name] != now[name]]:
        _log.warning("%s was saved with %s: the bits may differ from here on", folder.name, ", ".join(sorted(others)))
    with locked(folder, shared=True):  # the run that has saved it may go on, and removes its oldest
        opt.load(folder / OPTIMIZER_FOLDER)
    if len(state.random) == job.ranks.world:
        state.random[job.ranks.rank].set()
    else:
        torch.manual_seed(job.seed(state.recipe["run"]["seed"], state.step))
    return state.step


def _note(run_dir: Path, folders: list[Path]) -> None:
    own = folder_of(run_dir)
    own.mkdir(parents=True, exist_ok=True)
    manifest.replace(own / HISTORY, "".join(f"{line}\n" for line in _lines(run_dir, folders)))


def _lines(run_dir: Path, folders: list[Path]) -> list[str]:
    """As they are called in the history."""
    own = folder_of(run_dir)
    return [folder.name if folder.parent == own else str(folder) for folder in folders]


_STRICT = ConfigDict(frozen=True, strict=True, ser_json_bytes="base64", val_json_bytes="base64")


class _Random(BaseModel):
    """The random generators of a rank. They are tried out as they are read, so that `set` does not fail."""

    model_config = ConfigDict(extra="forbid", **_STRICT)

    python: tuple[int, list[int], float | None]
    torch: bytes
    cuda: bytes | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        try:
            random.Random().setstate(self._of_python)
            torch.Generator().set_state(_tensor(self.torch))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"no generator has this state: {error}") from None
        return self

    @classmethod
    def now(cls) -> Self:
        version, words, gauss = random.getstate()
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
        return cls(python=(version, list(words), gauss), torch=torch.get_rng_state().numpy().tobytes(), cuda=cuda)

    def set(self) -> None:
        random.setstate(self._of_python)
        torch.set_rng_state(_tensor(self.torch))
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(self.cuda))

    @property
    def _of_python(self) -> tuple[Any, ...]:
        version, words, gauss = self.python
        return version, tuple(words), gauss


class _State(BaseModel):
    """The content of `STATE_FILE`. `random` is of each rank."""

    model_config = _STRICT

    step: int = Field(ge=0)
    random: list[_Random]
    recipe: dict[str, Any]
    run: str | None = None
    parent: str | None = None
    versions: dict[str, str] = {}

    @field_validator("recipe")
    @classmethod
    def _has_what_is_compared(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        model, run = recipe.get("model"), recipe.get("run")
        if not isinstance(model, dict) or not {*COMPARED} <= model.keys():
            raise ValueError(f"it has no model with {' and '.join(COMPARED)}")
        if not isinstance(run, dict) or not isinstance(run.get("seed"), int):
            raise ValueError("it has no run with a seed")
        return recipe


def _read(folder: Path) -> _State:
    why: object
    try:
        return _State.model_validate_json(read(folder / STATE_FILE))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except OSError as error:
        why = error.strerror
    raise ConfigError(f"The checkpoint {folder} is damaged: {STATE_FILE}: {why}; resume from another.")


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
