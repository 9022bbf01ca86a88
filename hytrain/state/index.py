"""`index.json` of a saved state: what all ranks' shards have in common. `folders` writes and reads it.

    Index ─ text ─▶ index.json ─ read ─▶ Index, or a `ConfigError` that names what in it cannot be

What a file says is checked like what a user gives, because somebody may have edited it: types and ranges here, the
hyperparameters of a group by the algorithm itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hytrain.algorithms import Algorithm, is_number
from hytrain.errors import ConfigError, UnsupportedError
from hytrain.model.layers import clean
from hytrain.state.dicts import hyper
from hytrain.state.locks import read
from protocol.messages import MASTER_DTYPES, STATE_DTYPES

INDEX: Final = "index.json"
FORMAT: Final = 3

#: A number of steps, which a float64 can have.
Count = Annotated[int, Field(ge=0, lt=2**53)]


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, default=float)  # a scheduler's numbers may be numpy's


def stays_in_json(value: Any) -> bool:
    """Whether a value is the same when it is read again."""
    try:
        again = json.loads(_text(value))
        return bool(again == value or again != again)  # NaN is not equal to itself
    except (TypeError, ValueError):
        return False


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Scale(_Part):
    """The state of a loss scale, which is float32 and int32 on its device."""

    scale: float = Field(ge=0.0, le=torch.finfo(torch.float32).max)
    good_steps: int = Field(ge=0, lt=2**31)


class Index(_Part):
    """The content of the file. `save`: the name of the save, which the shards have, too."""

    format: Literal[3]
    save: str
    steps: Count
    algorithm: str
    param_groups: list[dict[str, Any]]
    step_of: dict[str, Count]
    resting: dict[str, Count]
    loss_scale: Scale | None = None
    state_dtype: str = Field(pattern=f"^({'|'.join(STATE_DTYPES)})$")
    master_dtype: str = Field(pattern=f"^({'|'.join(MASTER_DTYPES)})$")

    @property
    def counts(self) -> dict[str, int]:
        """The updates of each parameter that has state."""
        return {**self.step_of, **self.resting}

    def text(self) -> str:
        return _text(self.model_dump())

    @classmethod
    def read(cls, path: Path, groups: Sequence[dict[str, Any]], algorithm: Algorithm) -> Index:
        """The index of a state for these groups, with names as `clean` makes them.

        Raises `ConfigError` if it is not what `opt.save` writes, or is of another version, algorithm or model.
        """
        try:
            index = cls.model_validate_json(read(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; load another checkpoint") from None
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"] == ("format",) and first["type"] == "literal_error":
                raise ConfigError(f"the optimizer state in {path.parent} is of another version of HyTrain") from None
            where = ".".join(map(str, first["loc"])) or "all of it"
            raise _edited(path, f"{where}: {first['msg']}") from None
        if index.algorithm != algorithm.name:
            raise ConfigError(
                f"the optimizer state in {path.parent} is hytrain.{index.algorithm}'s, not hytrain.{algorithm.name}'s"
            )
        if len(index.param_groups) != len(groups):
            raise ConfigError(f"the optimizer state in {path.parent} has {len(index.param_groups)} parameter groups")
        for number, (group, given) in enumerate(zip(groups, index.param_groups, strict=True)):
            try:
                _check_group(given, group, algorithm)
            except (ConfigError, UnsupportedError) as error:
                raise _edited(path, f"parameter group {number}: {error}") from None
        names = {key: {clean(name): count for name, count in getattr(index, key).items()} for key in _BY_NAME}
        return index.model_copy(update=names)


_BY_NAME: Final = ("step_of", "resting")


def _check_group(given: dict[str, Any], group: dict[str, Any], algorithm: Algorithm) -> None:
    own = algorithm.of(given)
    if lacking := next((key for key in own.hyperparameters if key not in given), None):
        raise ConfigError(f"it has no {lacking!r}")
    if not is_number(given.get("initial_lr", 0.0)):  # a scheduler's
        raise ConfigError(f"initial_lr is {given['initial_lr']!r}: a number")
    algorithm.check({**hyper(given, own), "params": group["params"]})


def _edited(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is not what opt.save writes: {why}; load another checkpoint")
