"""The optimizer's state in a folder, saved and loaded on one rank or several.

    SHA256SUMS                        names the files of one save
    state-SAVE/index.json             step counts, hyperparameters, the loss scale: written by rank 0
    state-SAVE/shard-RANK-….safetensors    one per rank and layer: `exp_avg.NAME` is a rank's shard, with its offsets

Nothing is gathered on one rank, and at most one layer is in memory twice. On another number of ranks, or another mesh,
each rank reads what overlaps its own shards. The arrays' bytes do not depend on k.

Each `save` has a name of its own, and a folder. When all ranks have finished, the rename of `SHA256SUMS` makes it the
current one. So a process may be killed at any moment: there is the whole old state, or the whole new one. Several
processes may save and load at once. One that writes or reads a save has locked its folder (`locks.locked`), and what
is neither locked nor current is removed. Other files are left alone. All ranks call `save` and `load`, with a folder
that all of them see.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hytrain.algorithms import number
from hytrain.errors import ConfigError, SavingError
from hytrain.kernels.rounding import key_of
from hytrain.memory.capacity import GpuMemory
from hytrain.memory.loan import Loan, copied
from hytrain.model.layers import clean
from hytrain.model.trained import TrainedParameter, plane_dtypes
from hytrain.run.ranks import Ranks
from hytrain.state import manifest, shards
from hytrain.state.dicts import (
    OptimizerState,
    check_groups,
    gather,
    hyper,
    rules_of,
    scatter,
    tell_of_conversion,
)
from hytrain.state.index import FORMAT, INDEX, Index, Scale, stays_in_json
from hytrain.state.locks import locked
from hytrain.state.shards import Array, Arrays, Shards
from hytrain.state.tensor_file import await_devices
from hytrain.tensors import distributed, local, spans
from protocol.handles import Precision
from protocol.rules import MOMENT_PLANES

#: The folder of a save.
FOLDER: Final = re.compile(r"state-[0-9a-f]{16}")
SHARD: Final = ".safetensors"
_log = logging.getLogger(__name__)
#: The dtypes of moments in files, which are read as each other.
MOMENTS: Final = {torch.float32, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Save:
    """A save under way: its files are in `own`, which `finish` makes the current save of `folder`. `lock` guards it.

    With a `loan`, `arrays` are copies in GPU memory, and `finish` writes the files.
    """

    folder: Path
    own: Path
    arrays: Arrays
    index: Index
    lock: ExitStack
    loan: Loan | None

    def write(self, ranks: Ranks) -> None:
        with self._or_removed(ranks), ranks.together(), manifest.writing(self.folder):
            shards.write(self.own, ranks.rank, self.arrays, save=self.own.name, in_parallel=self.loan is None)
            if ranks.rank == 0:
                (self.own / INDEX).write_text(self.index.text())

    def finish(self, ranks: Ranks, in_parallel: bool = False) -> None:
        """All ranks call it, perhaps on another thread: it waits for the disk, and reads no state.

        With `in_parallel`, somebody waits: several threads compute the checksums.
        """
        if self.loan is not None:
            self.loan.end_with(lambda _: self.write(ranks))
        with self._or_removed(ranks):
            written = chain(self.own.glob(f"shard-{ranks.rank + 1:05d}-*"), [self.own / INDEX] * (ranks.rank == 0))
            manifest.seal(self.folder, written, ranks, in_parallel=in_parallel)
        if ranks.rank == 0:
            with suppress(OSError):
                _sweep(self.folder)
        self.lock.close()

    @contextmanager
    def _or_removed(self, ranks: Ranks) -> Iterator[None]:
        try:
            yield
        except SavingError:
            if ranks.rank == 0 and not _is_current(self.own):
                shutil.rmtree(self.own, ignore_errors=True)  # it may be what fills the disk
            self.lock.close()
            raise


def save(folder: Path, state: OptimizerState, *, steps: int, memory: GpuMemory | None = None) -> Save:
    """Write the state after `steps` steps into `folder`, which is created. `Save.finish` makes it the current one.

    With `memory` that has room for a copy of the state on every rank, that also writes the files. Until it has
    returned, a state that was there before is in force. Both raise `SavingError` on all ranks if something cannot be
    written. Then the state that was there is whole.
    """
    ranks, resting = Ranks.of_job(), state.resting
    lock = ExitStack()
    with ranks.together(), manifest.writing(folder):
        made = _made(folder, lock) if ranks.rank == 0 else None
    arrays = _trained(state.parameters, resting.precision)
    for rest in resting:
        arrays |= {f"{plane}.{clean(rest.name)}": _held(each, rest.parameter) for plane, each in rest.planes.items()}
    parts = {name: spans(array.like) for name, array in arrays.items()}
    counts = ({clean(each.name): each.count for each in those} for those in (state.parameters, resting))
    found = ranks.gather((made, parts, *counts))
    own, *_ = found[0]
    step_of, rested = ({name: count for each in found for name, count in each[which].items()} for which in (2, 3))
    for name, part in parts.items():
        replicas = [rank for rank, (_, theirs, *_) in enumerate(found) if theirs.get(name) == part]
        if replicas[key_of(name) % len(replicas)] != ranks.rank:  # they take turns
            del arrays[name]
    await_devices(array.like for array in arrays.values())
    described = {name: (array.dtype, local(array.like).shape) for name, array in arrays.items()}
    loan = None if memory is None else copied(memory, described, lambda name: arrays[name].read(), ranks)
    if loan is not None:
        arrays = {n: replace(array, read=partial(loan.copies.__getitem__, n)) for n, array in arrays.items()}
    index = Index(
        format=FORMAT,
        save=own.name,
        steps=steps,
        algorithm=resting.algorithm.name,
        param_groups=[_plain(hyper(group, resting.algorithm.of(group))) for group in state.groups],
        step_of=step_of,
        resting=rested,
        loss_scale=None if state.loss_scale is None else Scale.model_validate(state.loss_scale.state()),
        **resting.precision._asdict(),
    )
    saved = Save(folder, own, arrays, index, lock, loan)
    if loan is None:
        saved.write(ranks)
    return saved


def load_groups(folder: Path, into: OptimizerState) -> str:
    """Load the hyperparameters of what `save` wrote, and return which save that is. Raises `ConfigError` as `load`."""
    with Ranks.of_job().together():
        try:
            sealed = manifest.sealed(folder)
        except ConfigError as error:
            raise ConfigError(f"no optimizer state in {folder}: {error}") from None
        _, index = _index(folder, sealed, into)
    _take_groups(into, index)
    return index.save


def load(
    folder: Path,
    into: OptimizerState,
    named: dict[str, nn.Parameter],
    when_checked: Callable[[], None] = lambda: None,
    begun: str | None = None,
) -> int:
    """Load what `save` wrote and return the number of steps. `when_checked` is called before the first change.

    `begun`: the save of which `load_groups` has loaded the hyperparameters, which may be others by now.
    Raises `ConfigError` on all ranks, before anything is changed, if the state is missing, damaged or of another model.
    What others save meanwhile is not read.
    """
    ranks, resting, precision = Ranks.of_job(), into.resting, into.resting.precision
    found = {clean(name): parameter for name, parameter in named.items()}
    with ExitStack() as held:
        try:
            sealed = held.enter_context(manifest.verified(folder, ranks))
        except ConfigError as error:
            raise ConfigError(f"no optimizer state in {folder}: {error}") from None
        everyones = ranks.gather(({clean(known.name) for known in into.parameters}, set(found)))
        names, all_names = (set[str]().union(*sets) for sets in zip(*everyones, strict=True))
        with ranks.together():
            index, saved = _opened(folder, sealed, into, names, all_names, found)
            if begun not in (None, index.save):
                raise ConfigError(f"another state was saved in {folder} since opt.load was called: call it again")
            rules, arrays = rules_of(into.groups, resting.algorithm), _trained(into.parameters, precision)
            own = {clean(known.name) for known in into.parameters}
            rested = sorted(index.counts.keys() & found.keys() - own)
            entries = {name: {"step": index.counts[name]} for name in rested}
            for name, entry in entries.items():
                arrays |= _room(name, found[name], rules[id(found[name])], precision, saved, entry)
            has_masters = index.master_dtype == "float32"
            lone = []
            for known in into.parameters:
                has_rested = clean(known.name) not in index.step_of  # perhaps without a master
                its = f"remainder.{clean(known.name)}"
                keeps = has_masters and not (has_rested and saved.dtype(its, known.parameter) is None)
                if known.parameter.dtype is torch.bfloat16 and not keeps:
                    lone.append(known)
            for known in lone:
                arrays.pop(f"remainder.{clean(known.name)}", None)
            for name, array in arrays.items():
                theirs = saved.dtype(name, array.like)
                if theirs is None or (theirs != array.dtype and not {theirs, array.dtype} <= MOMENTS):
                    raise ConfigError(f"{name} in {saved.folder} is missing or of another shape")
            moments = {index.state_dtype for name in arrays if name.partition(".")[0] in MOMENT_PLANES}
        tell_of_conversion(str(folder), moments, has_masters, precision)
        when_checked()
        for known in lone:
            scatter(known, "remainder", None)
        with ranks.together():
            saved.read(arrays)
        resting.clear()
        for name, entry in entries.items():
            resting.load(name, found[name], rules[id(found[name])], entry)
    if begun is None:
        _take_groups(into, index)
    for known in into.parameters:
        known.restore(index.counts[clean(known.name)])
    if into.loss_scale is not None:
        into.loss_scale.load(None if index.loss_scale is None else index.loss_scale.model_dump())
    return index.steps


def _opened(
    folder: Path,
    sealed: Sequence[Path],
    into: OptimizerState,
    names: set[str],
    all_names: set[str],
    found: dict[str, nn.Parameter],
) -> tuple[Index, Shards]:
    """The save in `folder`, whose index fits: it has the parameters `names`, and none that are not in `all_names`.

    Some may be trained now that were frozen then, or the other way round. `found` are this rank's, by name.
    """
    slot, index = _index(folder, sealed, into)
    if lacking := names - index.counts.keys():
        raise ConfigError(
            f"the optimizer state in {folder} is of another model, or {min(lacking)} was never trained there: freeze "
            "it, or use state_dict() and load_state_dict()"
        )
    given = {id(parameter) for group in into.groups for parameter in group["params"]}
    if left_out := [name for name in index.counts if name in found and id(found[name]) not in given]:
        raise ConfigError(
            f"the optimizer state in {folder} has {left_out[0]}, which no parameter group has: give it to the "
            "optimizer, frozen, or use state_dict() and load_state_dict()"
        )
    if unknown := index.counts.keys() - all_names:
        raise ConfigError(f"the optimizer state in {folder} has {min(unknown)}, which the model does not have")
    try:
        return index, Shards(
            slot, [path for path in sealed if path.parent == slot and path.suffix == SHARD], index.save
        )
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the optimizer state in {folder} is not whole: {error}") from None


def _index(folder: Path, sealed: Sequence[Path], into: OptimizerState) -> tuple[Path, Index]:
    """The folder of the save, and its index, which has groups like these."""
    indices = [path for path in sealed if path.name == INDEX and FOLDER.fullmatch(path.parent.name)]
    if len(indices) != 1:
        raise ConfigError(f"no optimizer state in {folder}: {len(indices)} files {INDEX} are in {manifest.SUMS}")
    index = Index.read(indices[0], into.groups, into.resting.algorithm)
    check_groups(into.groups, index.param_groups, into.resting.algorithm)
    return indices[0].parent, index


def _take_groups(into: OptimizerState, index: Index) -> None:
    for place, other in enumerate(index.param_groups):
        group, numbers = into.groups[place], hyper(other, into.resting.algorithm.of(other)).items()
        into.groups[place] = {**group, **{key: _like(group.get(key), value) for key, value in numbers}}


def _room(
    name: str, parameter: nn.Parameter, rule: str, precision: Precision, saved: Shards, entry: dict[str, Any]
) -> Arrays:
    """Memory for the state of a parameter that rests, which `entry` gets in torch's form."""
    arrays = Arrays()
    for plane, dtype in plane_dtypes(parameter, rule, precision).items():
        if plane != "remainder" or saved.dtype(f"{plane}.{name}", parameter) is not None:
            room = torch.empty_like(local(parameter).detach(), dtype=dtype, device="cpu")
            arrays[f"{plane}.{name}"] = _held(room, parameter)
            entry[plane] = distributed(room, parameter)
    return arrays


def _trained(parameters: list[TrainedParameter], precision: Precision) -> Arrays:
    arrays = Arrays()
    for known in (known for known in parameters if known.places):
        like = distributed(known.own, known.parameter)
        for plane, dtype in known.plane_dtypes.items():
            array = Array(like, dtype, known.places[0][0].lid + 1, partial(gather, known, plane))
            is_coded = precision.state_dtype == "float8" and plane in MOMENT_PLANES
            if len(known.places) > 1 or is_coded:  # `gather` copies
                array = replace(array, write=partial(scatter, known, plane))
            arrays[f"{plane}.{clean(known.name)}"] = array
    return arrays


def _held(values: Tensor, parameter: nn.Parameter) -> Array:
    return Array(distributed(values, parameter), values.dtype, 1, lambda: values)


def _made(folder: Path, lock: ExitStack) -> Path:
    """The folder of a new save, locked. Those of saves that were killed are removed before, to have their room."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest.sync(folder.parent)
    _sweep(folder)
    while True:
        own = folder / f"state-{secrets.token_hex(8)}"
        own.mkdir()
        with ExitStack() as tried, suppress(FileNotFoundError):  # it has been swept before it was locked
            tried.enter_context(locked(own))
            own.stat()
            lock.push(tried.pop_all())
            return own


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters without tensors, for JSON; and without what somebody has put there that has none."""
    found = dict[str, Any]()
    for key, value in group.items():
        plain = [number(each) for each in value] if isinstance(value, tuple | list) else number(value)
        if stays_in_json(plain):
            found[key] = plain
        else:
            _log.warning("%r of a parameter group is not saved: %s has no place in JSON", key, type(value).__name__)
    return found


def _like(before: Any, value: Any) -> Any:
    """A hyperparameter out of JSON: a tensor where a tensor was `before`."""
    if isinstance(value, list):
        return value if isinstance(before, list) else tuple(value)
    return torch.full_like(before, value) if isinstance(before, Tensor) else value


def _sweep(folder: Path) -> None:
    """Remove the saves that are not the current one, and that nobody writes or reads."""
    for path in folder.iterdir():
        if FOLDER.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            with suppress(OSError), locked(path, wait=False) as is_locked:  # it is another user's, or gone already
                if is_locked and not _is_current(path):
                    shutil.rmtree(path, ignore_errors=True)


def _is_current(save: Path) -> bool:
    """Whether this is what the folder's checksums name, or may be: they are damaged, and somebody may mend them."""
    if not (save.parent / manifest.SUMS).exists():
        return False
    try:
        return any(save in path.parents for path in manifest.sealed(save.parent))
    except ConfigError:
        return True
