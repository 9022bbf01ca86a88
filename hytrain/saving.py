"""Saves the optimizer's state from the planes to dictionaries and files, and loads it.

    state_dict()   torch's form: by parameter index, tensors as views of the planes
    save(folder)   one safetensors file per layer, so at most one layer is in memory twice, and index.json

Both are complete, and their bytes do not depend on k. A folder has two slots. `save` fills the free one, and the rename
of `SHA256SUMS` makes it the current one. So a process may be killed at any moment: the folder has the whole old state,
or the whole new one. Other files in the folder are left alone.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hytrain import manifest
from hytrain.errors import ConfigError
from hytrain.kernels.split import REMAINDERS, clear_remainder, fit_remainder
from hytrain.memory.planes import STATE_PLANES
from hytrain.model.trained import TrainedLayer, TrainedParameter
from hytrain.step.scaling import LossScale
from hytrain.tensors import flat, laid_out, shaped, version

INDEX: Final = "index.json"
RESTING: Final = "resting.safetensors"
FORMAT: Final = 2
SLOTS: Final = ("state-a", "state-b")
DTYPES: Final = {torch.float32: "F32", torch.int16: "I16"}  # the names that safetensors has for dtypes
AS_TORCH: Final = {  # what else a group of `torch.optim.AdamW` has, so that it continues with the same arithmetic
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}
HYPER: Final = ("lr", "betas", "eps", "weight_decay", "maximize")
NOT_STATE: Final = {"params", "loss_scale", *AS_TORCH}
#: What wrappers of modules add to names, and torch's distributed checkpoints remove.
WRAPPERS: Final = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


def _step(count: int) -> Tensor:
    """The step count as torch stores it, for any default dtype and device."""
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")


def state_dict(
    groups: list[dict[str, Any]],
    parameters: list[TrainedParameter],
    resting: Resting,
    *,
    loss_scale: LossScale | None = None,
) -> dict[str, Any]:
    """The state in torch's form. A parameter that was never updated has no entry, as in torch.

    Before the first step, every trained parameter has one, of zeros, because torch's distributed checkpoints only read
    what has an entry. The first group has the loss scale. All tensors are on one device, which these checkpoints need.
    A remainder is a copy: they read a file into these tensors before they load them, and loading the file's weights
    clears the remainders in the planes.
    """
    index, packed = _numbered(groups)
    if loss_scale is not None:
        packed[0]["loss_scale"] = loss_scale.state()
    state: dict[int, dict[str, Tensor]] = {}
    is_new = not any(known.count for known in parameters)
    for known in parameters:
        if not (known.count or is_new):
            continue
        planes = {plane: tensor for plane in STATE_PLANES if (tensor := gather(known, plane)) is not None}
        if "remainder" in planes:
            planes["remainder"] = planes["remainder"].clone()
        state[index[id(known.parameter)]] = {"step": _step(known.count), **planes}
    state.update((index[id(parameter)], entry) for parameter, entry in resting.entries())
    if len({tensor.device for entry in state.values() for name, tensor in entry.items() if name != "step"}) > 1:
        state = {number: {name: tensor.cpu() for name, tensor in entry.items()} for number, entry in state.items()}
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def load_state_dict(
    loaded: dict[str, Any],
    groups: list[dict[str, Any]],
    parameters: list[TrainedParameter],
    resting: Resting,
    named: list[tuple[str, nn.Parameter]],
    *,
    loss_scale: LossScale | None = None,
    when_checked: Callable[[], None] = lambda: None,
) -> None:
    """Write a state in torch's form into the planes. Raises `ConfigError` before anything is changed.

    Its keys are numbers, or names as in torch's distributed checkpoints. `named` are all names of all the model's
    parameters. `when_checked` is called before the first change.
    """
    theirs = loaded["param_groups"]
    entries = {key: loaded["state"].get(label, {}) for key, label in _labels(theirs, groups, named).items()}
    names = {id(parameter): name for name, parameter in reversed(named)}
    given = [parameter for group in groups for parameter in group["params"]]
    for parameter in given:
        _check_entry(names.get(id(parameter), "a parameter"), parameter, entries[id(parameter)])
    for other in theirs:
        _check_algorithm(other)
    when_checked()
    for group, other in zip(groups, theirs, strict=True):
        group.update(_hyper(other))
    for known in parameters:
        entry = entries[id(known.parameter)]
        known.count = int(entry["step"]) if entry else 0
        for plane in STATE_PLANES:
            scatter(known, plane, _tensor(entry, plane))
    trained = {id(known.parameter) for known in parameters}
    resting.clear()
    for parameter in given:
        if (entry := entries[id(parameter)]) and id(parameter) not in trained:
            resting.load(names[id(parameter)], parameter, entry)
    if loss_scale is not None:
        loss_scale.load(theirs[0].get("loss_scale"))


def save(
    folder: Path,
    groups: list[dict[str, Any]],
    parameters: list[TrainedParameter],
    resting: Resting,
    *,
    steps: int,
    loss_scale: LossScale | None = None,
) -> None:
    """Write the state after `steps` steps into `folder`, which is created. A state that is there is replaced."""
    index = {
        "format": FORMAT,
        "steps": steps,
        "param_groups": [_hyper(group) for group in groups],
        "step_of": {known.name: known.count for known in parameters},
        "resting": resting.counts,
        "loss_scale": None if loss_scale is None else loss_scale.state(),
    }
    text = json.dumps(index, indent=1, default=float)  # numpy's numbers are not JSON's
    folder.mkdir(parents=True, exist_ok=True)
    manifest.sync(folder.parent)
    current, free = folder / SLOTS[0], folder / SLOTS[1]
    if not _is_current(current):
        current, free = free, current
    shutil.rmtree(free, ignore_errors=True)
    free.mkdir()

    def written() -> Iterator[Path]:
        for layer in _layers(parameters):
            save_file(dict(_named_planes(layer)), _file(free, layer))
            yield _file(free, layer)
        yield from resting.save(free / RESTING)
        (free / INDEX).write_text(text)
        yield free / INDEX

    manifest.seal(folder, written())
    shutil.rmtree(current, ignore_errors=True)


def load(
    folder: Path,
    groups: list[dict[str, Any]],
    parameters: list[TrainedParameter],
    resting: Resting,
    named: dict[str, nn.Parameter],
    *,
    loss_scale: LossScale | None = None,
    when_checked: Callable[[], None] = lambda: None,
) -> int:
    """Load what `save` wrote and return the number of steps. `when_checked` is called before the first change.

    Raises `ConfigError`, before anything is changed, if the state is missing, damaged or of another model.
    """
    try:
        files = {path.name: path for path in manifest.verify(folder)}
    except ConfigError as error:
        raise ConfigError(f"no optimizer state in {folder}: {error}") from None
    index = _read_index(files.get(INDEX, folder / INDEX))
    slot = files[INDEX].parent
    if others := set(index["step_of"]) ^ {known.name for known in parameters}:
        raise ConfigError(
            f"the optimizer state in {folder} is of another model, or {min(others)} was frozen in one of the two and "
            "is not in the other: freeze the same parameters, or use state_dict() and load_state_dict()"
        )
    if unknown := index["resting"].keys() - named.keys():
        raise ConfigError(f"the optimizer state in {folder} has {min(unknown)}, which the model does not have")
    if len(index["param_groups"]) != len(groups):
        raise ConfigError(f"the optimizer state in {folder} has {len(index['param_groups'])} parameter groups")
    layers = _layers(parameters)
    for layer in layers:
        _check_file(_file(slot, layer), dict(_named_planes(layer)))
    try:
        rested = load_file(slot / RESTING) if index["resting"] else {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the optimizer state in {folder} is not whole: {error}") from None
    when_checked()
    for layer in layers:
        tensors = load_file(_file(slot, layer))
        for name, tensor in _named_planes(layer):
            tensor.copy_(tensors[name])
    resting.clear()
    for name, count in index["resting"].items():
        planes = {plane: rested.get(f"{plane}.{name}") for plane in STATE_PLANES}
        resting.load(name, named[name], {"step": count, **planes})
    for group, other in zip(groups, index["param_groups"], strict=True):
        group.update(other, betas=tuple(other["betas"]))
    for known in parameters:
        known.count = index["step_of"][known.name]
    if loss_scale is not None:
        loss_scale.load(index.get("loss_scale"))
    return int(index["steps"])


@dataclass(slots=True)
class _Rest:
    """The state of a parameter that is in no layer. `version` is the parameter's version counter at that time.

    It is None for loaded state, because the weights that belong to it may be loaded later.
    """

    name: str
    parameter: nn.Parameter
    count: int
    planes: dict[str, Tensor]
    version: int | None


class Resting:
    """The state of parameters that are frozen, or in no layer while layers are rebuilt. Host planes are not copied."""

    def __init__(self) -> None:
        self._of: dict[int, _Rest] = {}  # by the parameter's identity: its name may become another's

    def take(self, parameters: list[TrainedParameter]) -> None:
        for known in parameters:
            if known.count:
                planes = {plane: tensor.cpu() for plane in STATE_PLANES if (tensor := gather(known, plane)) is not None}
                rest = _Rest(known.name, known.parameter, known.count, planes, version(known.parameter))
                self._of[id(known.parameter)] = rest

    def give(self, parameters: list[TrainedParameter]) -> None:
        """Write the kept state of these parameters into their planes.

        A remainder belongs to the weights it was kept with. If they were written since, it is dropped.
        """
        for known in parameters:
            rest = self._of.pop(id(known.parameter), None)
            if rest is None:
                continue
            known.count = rest.count
            if (remainder := rest.planes.get("remainder")) is not None:
                if rest.version not in (None, known.found):
                    del rest.planes["remainder"]
                else:
                    fit_remainder(remainder, known.parameter.detach().cpu())
            for plane in STATE_PLANES:
                scatter(known, plane, rest.planes.pop(plane, None))

    def entries(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """The parameters and their entries in torch's form."""
        for rest in self._of.values():
            yield rest.parameter, {"step": _step(rest.count), **rest.planes}

    def load(self, name: str, parameter: nn.Parameter, entry: dict[str, Any]) -> None:
        planes = {plane: t.cpu() for plane in STATE_PLANES if (t := _tensor(entry, plane)) is not None}
        self._of[id(parameter)] = _Rest(name, parameter, int(entry["step"]), planes, None)

    def drop(self, parameters: list[TrainedParameter]) -> None:
        for known in parameters:
            self._of.pop(id(known.parameter), None)

    @property
    def counts(self) -> dict[str, int]:
        return {rest.name: rest.count for rest in self._of.values()}

    def save(self, file: Path) -> Iterator[Path]:
        """Write `file`, if there is anything to write, and yield it."""
        planes = {f"{plane}.{rest.name}": t for rest in self._of.values() for plane, t in rest.planes.items()}
        if planes:
            save_file({name: tensor.contiguous() for name, tensor in planes.items()}, file)
            yield file

    def clear(self) -> None:
        self._of.clear()


def gather(known: TrainedParameter, plane: str) -> Tensor | None:
    """A parameter's state in one plane, in the parameter's shape: a view, or a copy if it is split into pieces."""
    parts = [part for layer, index in known.places if (part := layer.state(plane)[index]) is not None]
    if not parts:
        return None
    return shaped(parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts]), known.own)


def scatter(known: TrainedParameter, plane: str, value: Tensor | None) -> None:
    """Write a parameter's state in one plane. None writes the initial state: zeros, or the weights as masters."""
    if value is not None:
        value = flat(laid_out(value.cpu(), known.own))
    for layer, index in known.places:
        part, segment = layer.state(plane)[index], layer.segments[index]
        if part is None:
            continue
        if value is None and plane == "remainder":
            clear_remainder(part, segment.weights)
        elif value is None:
            part.zero_()
        else:
            part.copy_(value[segment.start : segment.start + segment.spec.numel])


def _tensor(entry: dict[str, Any], plane: str) -> Tensor | None:
    """None for what is not there. In a flattened state of torch's distributed checkpoints, that is `{}`."""
    value = entry.get(plane)
    return value if isinstance(value, Tensor) else None


def _check_entry(name: str, parameter: nn.Parameter, entry: dict[str, Any]) -> None:
    """Raise `ConfigError` for state that is not AdamW's, of another shape, or of weights with another 16-bit dtype."""
    if entry and ("step" not in entry or _tensor(entry, "exp_avg") is None or _tensor(entry, "exp_avg_sq") is None):
        raise ConfigError(f"the loaded state of {name} is not AdamW's: it has {', '.join(map(str, entry))}")
    for plane in STATE_PLANES:
        if (tensor := _tensor(entry, plane)) is None:
            continue
        if tensor.shape != parameter.shape:
            raise ConfigError(f"{plane} of {name} has shape {tuple(tensor.shape)}")
        if plane == "remainder" and REMAINDERS.get(parameter.dtype, tensor.dtype) != tensor.dtype:
            raise ConfigError(f"{plane} of {name} has dtype {tensor.dtype}: it is that of weights of another dtype")


def _labels(
    theirs: list[dict[str, Any]], groups: list[dict[str, Any]], named: list[tuple[str, nn.Parameter]]
) -> dict[int, int | str]:
    """What a loaded state calls each parameter, by `id`: a number or a name."""
    index, packed = _numbered(groups)
    labels = [group["params"] for group in theirs]
    if labels == [group["params"] for group in packed]:
        return dict(index)
    ids = {WRAPPERS.sub("", name): id(parameter) for name, parameter in named}
    if [{ids.get(label) for label in group} for group in labels] != [{*map(id, group["params"])} for group in groups]:
        raise ConfigError("the loaded state's parameter groups are not those of this optimizer")
    return {ids[label]: label for group in labels for label in group}


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, and what a scheduler has added to them."""
    return {key: value for key, value in group.items() if key not in NOT_STATE}


def _numbered(groups: list[dict[str, Any]]) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """Each parameter's index by `id`, and the groups with indices instead of parameters."""
    index: dict[int, int] = {}
    packed = []
    for group in groups:
        for parameter in group["params"]:
            index[id(parameter)] = len(index)
        packed.append({**AS_TORCH, **group, "params": [index[id(parameter)] for parameter in group["params"]]})
    return index, packed


def _layers(parameters: list[TrainedParameter]) -> list[TrainedLayer]:
    by_lid = {layer.lid: layer for known in parameters for layer, _ in known.places}
    return [by_lid[lid] for lid in sorted(by_lid)]


def _file(folder: Path, layer: TrainedLayer) -> Path:
    return folder / f"layer-{layer.lid:05d}.safetensors"


def _named_planes(layer: TrainedLayer) -> Iterator[tuple[str, Tensor]]:
    """A layer's state tensors, by their names in the file."""
    for plane in STATE_PLANES:
        for segment, tensor in zip(layer.segments, layer.state(plane), strict=True):
            if tensor is not None:
                yield f"{plane}.{segment.spec.name}", tensor


def _is_current(slot: Path) -> bool:
    sums = slot.with_name(manifest.SUMS)
    return sums.is_file() and f" {slot.name}/" in sums.read_text(errors="replace")


def _read_index(path: Path) -> dict[str, Any]:
    """What `save` wrote into `INDEX`. Raises `ConfigError` if it is of another version or lacks a key."""
    kinds = {"format": int, "steps": int, "param_groups": list, "step_of": dict, "resting": dict}
    try:
        index = json.loads(path.read_text())
        wrong = [key for key, kind in kinds.items() if not isinstance(index[key], kind)]
        wrong += [key for group in index["param_groups"] for key in HYPER if key not in group]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not what opt.save writes: {error!r}; load another checkpoint") from None
    if wrong:
        raise ConfigError(f"{path} is not what opt.save writes: see {wrong[0]!r}; load another checkpoint")
    if index["format"] != FORMAT:
        raise ConfigError(f"the optimizer state in {path.parent} is of another version of HyTrain")
    return dict(index)


def _check_file(path: Path, expected: dict[str, Tensor]) -> None:
    """Raise `ConfigError` unless a layer's file is complete and has these tensors. Reads only its header."""
    try:
        with safe_open(path, framework="pt") as file:
            for name, tensor in expected.items():
                found = file.get_slice(name) if name in file.keys() else None  # noqa: SIM118  (no mapping)
                kind = None if found is None else (tuple(found.get_shape()), found.get_dtype())
                if kind != (tensor.shape, DTYPES[tensor.dtype]):
                    raise ConfigError(f"{name} in {path} is missing or of another shape")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the optimizer state in {path.parent} is not whole: {path.name}: {error}") from None


def _check_algorithm(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise ConfigError("the loaded state is one of amsgrad=True, which hytrain.AdamW does not have")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ConfigError("the loaded state is one of Adam with its weight decay, not of AdamW: go on with Adam")
