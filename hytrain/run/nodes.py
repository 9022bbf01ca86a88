"""Connects the coordinators of a job's machines, so that a monitor on the first machine sees all ranks.

    each machine's first rank ── KeyRequest ──▶ its coordinator ── Key ──┐
    all ranks ◀── public keys, then the first machine's endpoint ── Ranks.gather ◀┘
    rank 0 ── Collect ──▶ its coordinator          the others ── ReportTo ──▶ theirs

Only public keys travel. Training does not need the connection: whatever fails here is a line in the log.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from typing import Final, TypeVar

from hytrain.config import Cluster, master_address
from hytrain.errors import ClusterTimeout
from hytrain.run.ranks import Ranks
from protocol import messages as m
from protocol.address import COORDINATOR, Address
from protocol.channel import Network

ANSWER_S: Final = 60.0

_log = logging.getLogger(__name__)
T = TypeVar("T", m.Key, m.Collecting)
Found = TypeVar("Found")


def connect_nodes(cluster: Cluster, rank: int, ranks: Ranks) -> None:
    """Connect the machines of a job. All ranks call this; `rank` is the caller's in its cluster.

    It does nothing in a job on one machine.
    """
    if len(ranks.node) == ranks.world:
        return
    first, name = ranks.rank == 0, ranks.gather(master_address() or socket.gethostname())[0]
    key = _tried(lambda: _ask(cluster, rank, m.KeyRequest(), m.Key).key) if ranks.leads_node else None
    keys, addresses = zip(*ranks.gather((key, _tried(lambda: own_address(name)) if key else None)), strict=True)

    def collect() -> str:
        others = {key: address for key, address in zip(keys[1:], addresses[1:], strict=True) if key and address}
        host = own_address(next(iter(others.values()), name))
        return _ask(cluster, rank, m.Collect(keys=tuple(others), host=host), m.Collecting).endpoint

    endpoint = ranks.gather(_tried(collect) if first and key else None)[0]
    if ranks.leads_node and not first and key and endpoint:
        report = m.ReportTo(endpoint=endpoint, key=keys[0], node=ranks.rank)
        _tried(lambda: _tell(cluster, rank, report))


def own_address(host: str) -> str:
    """The address that this machine has in the network in which it reaches `host`. Sends nothing. Raises `OSError`."""
    family, kind, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _tried(act: Callable[[], Found]) -> Found | None:
    try:
        return act()
    except (ClusterTimeout, OSError, ValueError) as error:
        _log.warning("monitors will not see the ranks of other machines: %s", error)
        return None


def _ask(cluster: Cluster, rank: int, question: m.Message, kind: type[T]) -> T:
    with _network(cluster, rank) as network:
        outbox = network.outbox(COORDINATOR)
        outbox.send(question)
        answer = outbox.receive(ANSWER_S)
    if not isinstance(answer, kind):
        raise ClusterTimeout(f"the coordinator did not answer {type(question).__name__}")
    return answer


def _tell(cluster: Cluster, rank: int, message: m.Message) -> None:
    with _network(cluster, rank) as network:
        network.outbox(COORDINATOR, linger_s=ANSWER_S).send(message)


def _network(cluster: Cluster, rank: int) -> Network:
    address = Address("trainer", rank)
    return Network(cluster.socket_dir, token=cluster.token, address=address, name=f"{address}-{secrets.token_hex(4)}")
