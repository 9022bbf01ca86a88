"""torchrun's options that `hytrain-cluster` takes and passes on, and what follows from them for this node.

--nproc-per-node 4 … ─▶ job ─▶ an optimizer for each rank; the trainer is `workers.launch.agent`, torchrun's agent
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final

from hytrain.errors import ConfigError

OPTIONS: Final = {
    "nnodes": ("N", "how many machines take part, or MIN:MAX"),
    "nproc-per-node": ("N", 'how many ranks this machine has, or "gpu": one per GPU'),
    "rdzv-backend": ("NAME", "how the machines meet, such as c10d"),
    "rdzv-endpoint": ("HOST:PORT", "where they meet"),
    "rdzv-id": ("ID", "the job's name there"),
    "rdzv-conf": ("KEY=VALUE,…", "more settings of the backend"),
    "node-rank": ("N", "this machine's number, without a backend"),
    "master-addr": ("HOST", "the first machine, without a backend"),
    "master-port": ("PORT", "a free port on the first machine, without a backend"),
    "local-addr": ("HOST", "this machine's own address"),
    "max-restarts": ("N", "how often a run that has failed is started again"),
    "monitor-interval": ("SECONDS", "how often the ranks are looked at"),
}
#: Without one of these, the ranks are on this machine alone and meet at a port that is free.
_MEETING: Final = ("rdzv-backend", "rdzv-endpoint", "node-rank", "master-addr", "master-port")
_DEFAULT_ADDRESS: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Job:
    """Of a job under torchrun: how many ranks this machine and all have, and what its agent is told.

    `meeting` names the job on all of its machines; it is empty if there is only one.
    """

    ranks: int
    world: int | None  # None if the number of machines is open
    flags: tuple[str, ...]
    meeting: str


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several GPUs or machines", "torchrun's own options")
    for name, (value, meaning) in OPTIONS.items():
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))  # torchrun takes both
        group.add_argument(*spellings, metavar=value, help=meaning)


def job(arguments: argparse.Namespace) -> Job | None:
    """The job that was asked for; None without any of torchrun's options.

    Raises `ConfigError` for numbers that are none, and for several machines that would meet on each machine itself.
    """
    given = {name: getattr(arguments, name.replace("-", "_")) for name in OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    nodes, meeting = given.get("nnodes", "1"), ""
    if _most_nodes(nodes) == 1:
        given.pop("max-restarts", None)  # the launcher does it
    if not given:
        return None
    ranks = _ranks(given.get("nproc-per-node", "1"))
    flags = {**given, "nproc-per-node": ranks}
    if _most_nodes(nodes) > 1:
        meeting = _meeting(nodes, given)
    elif not any(name in given for name in _MEETING):
        flags["standalone"] = None
    words = tuple(f"--{name}" if value is None else f"--{name}={value}" for name, value in flags.items())
    world = None if ":" in nodes else ranks * int(nodes)
    return Job(ranks, world, words, meeting)


def restarts(arguments: argparse.Namespace) -> int:
    """How often the launcher starts a failed run again: on several machines never, as torchrun does.

    Raises `ConfigError` for a number that is none.
    """
    text = arguments.max_restarts or "0"
    if not text.isdecimal():
        raise ConfigError(f"--max-restarts {text}: a number of times")
    return int(text) if _most_nodes(arguments.nnodes or "1") == 1 else 0


def _most_nodes(text: str) -> int:
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 1 <= numbers[0] <= numbers[-1]:
        raise ConfigError(f"--nnodes {text}: a number of machines, or MIN:MAX")
    return numbers[-1]


def _ranks(text: str) -> int:
    """The number of ranks; torch knows how many GPUs there are."""
    try:
        ranks = int(text)
    except ValueError:
        from torch.distributed.run import determine_local_world_size

        try:
            ranks = determine_local_world_size(text)
        except ValueError as error:
            raise ConfigError(f"--nproc-per-node {text}: {error}") from None
    if ranks < 1:
        raise ConfigError(f"--nproc-per-node {text}: at least one rank")
    return ranks


def _meeting(nodes: str, given: dict[str, str]) -> str:
    """Where the machines meet, and as what. Raises `ConfigError` if that is not one place for all."""
    master = f"{given.get('master-addr', _DEFAULT_ADDRESS)}:{given.get('master-port', '')}"
    endpoint = given.get("rdzv-endpoint", master)
    host = endpoint.rpartition(":")[0] or endpoint
    if host.strip("[]") in ("localhost", "::1", "0.0.0.0", "::") or host.startswith("127."):
        raise ConfigError(
            f"--nnodes {nodes} with a rendezvous at {host}: that is another machine on each of them; name one that all "
            "can reach, as --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT or as --master-addr=HOST"
        )
    return f"{given.get('rdzv-id', '')}@{endpoint}"
