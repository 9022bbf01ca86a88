"""Settings of a run's processes. A flag overrides the environment, the environment a file, a file the default.

No other module of HyTrain reads environment variables. HyTrain's own begin with HYTRAIN_, because other libraries claim
general names: accelerate starts NCCL if it sees LOCAL_RANK. torchrun's are read for recipes and for the machines' link,
Slurm's for the end of the job.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hytrain.errors import ConfigError
from hytrain.readable import size

CLUSTER_VARIABLE: Final = "HYTRAIN_CLUSTER"
CLUSTER_FILE: Final = "cluster.json"


#: Bytes, or "24GiB".
Size = Annotated[int, BeforeValidator(size)]


class ClusterConfig(BaseModel):
    """The launcher's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cores: str = "auto"  # "auto" (the NUMA node of the GPU), "node:0,1", or a core list such as "2-15"
    #: OpenMP threads of the optimizer process; None is one per core, or half as many with fewer than 4 cores
    threads: int | None = Field(default=None, ge=1)
    host_memory_limit: Size | None = Field(default=None, ge=0)  # for planes; None is all that is free
    gpu_memory_limit: Size | None = Field(default=None, ge=0)  # to plan with on each GPU; None is all that is free
    run_dir: str | None = None  # folder of the run; None makes one in ~/.local/state/hytrain/runs
    run_name: str | None = None
    keep_runs: int = Field(default=50, ge=1)  # how many runs keep their folders in ~/.local/state/hytrain/runs
    replan_every: int = Field(default=4, ge=1)  # steps between two decisions of the planner
    trace: bool = False  # whether the processes write the timeline, `trace.json`
    check: int = Field(default=0, ge=0)  # an optimizer's first steps that are compared with torch
    start_timeout_s: float = Field(default=120.0, gt=0)  # time limit for the start of each process
    hang_timeout_s: float = Field(default=600.0, gt=0)  # how long a process may not answer before the run ends

    @classmethod
    def resolve(
        cls,
        *,
        flags: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        file: Mapping[str, Any] | None = None,
    ) -> Self:
        """The configuration from all sources. Raises `ConfigError` for an unknown key or an impossible value."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = dict(file or {})
        for field in cls.model_fields:
            text = environment.get(f"HYTRAIN_{field.upper()}")
            if text is not None:
                values[field] = text
        values.update({key: value for key, value in (flags or {}).items() if value is not None})
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                raise ConfigError(f"there is no setting {name}: known are {', '.join(cls.model_fields)}") from None
            why = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            raise ConfigError(f"{name} is {first['input']!r}: {why}") from None


class Cluster(BaseModel):
    """A running cluster, which serves the ranks of one job on one machine, each with an optimizer process of its own.

    Ranks in a cluster are numbered from 0 on, in the order of the job's ranks. Processes that join it read this from a
    file in its socket folder. It has the token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_name: str
    run_dir: str
    socket_dir: str
    token: str
    launcher_pid: int
    coordinator_pid: int
    optimizer_pids: tuple[int, ...]  # by the rank in the cluster
    config: ClusterConfig = ClusterConfig()  # of its launcher

    def write(self) -> None:
        """Write the file atomically, readable for this user only."""
        path = Path(self.socket_dir) / CLUSTER_FILE
        temporary = path.with_suffix(".tmp")
        temporary.touch(mode=0o600)
        temporary.write_text(self.model_dump_json())
        temporary.replace(path)

    @classmethod
    def read(cls, socket_dir: str) -> Self:
        """The cluster whose sockets are in `socket_dir`. Raises `ConfigError` if there is none."""
        try:
            return cls(**json.loads((Path(socket_dir) / CLUSTER_FILE).read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no HyTrain run has its sockets in {socket_dir}: {error}") from None


def home() -> Path:
    """The user's home folder: HOME, or what the system says where that is empty. Raises `ConfigError` without one."""
    if named := os.environ.get("HOME"):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise ConfigError(
            "HOME is empty, and the system knows no home folder of this user: set HOME, or HYTRAIN_RUN_DIR for records "
            "and HYTRAIN_CACHE for compiled kernels"
        ) from None


def plan_cache() -> str | None:
    """The folder of the last runs' plans: none are kept if it is empty. None if it is not named."""
    return os.environ.get("HYTRAIN_PLAN_CACHE")


def serves_allocator() -> bool:
    """Whether state may leave the GPU while torch allocates."""
    return os.environ.get("HYTRAIN_RECLAIM") != "0"


def workers_environment() -> dict[str, str]:
    """This process's environment, with HyTrain's packages importable from where this process imported them."""
    others = {key: value for key, value in os.environ.items() if key != CLUSTER_VARIABLE}
    paths = [
        str(Path(__file__).resolve().parents[1]),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {**others, "PYTHONPATH": os.pathsep.join(paths)}


def joined_cluster() -> str | None:
    """The socket folder of the cluster that started this process, or None."""
    return os.environ.get(CLUSTER_VARIABLE)


def job_end() -> float | None:
    """When the batch job of this process ends, in seconds since 1970, as Slurm has set it, or None."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() else None


class Launch(NamedTuple):
    """This process's place in a job, as torchrun has set it: its rank of `world`, and its number on this machine."""

    rank: int
    world: int
    local_rank: int


def torchrun() -> Launch | None:
    """This process's place, or None if torchrun has not started it."""
    values = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    return None if None in values else Launch(*map(int, filter(None, values)))
