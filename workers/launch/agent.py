"""torchrun's agent for the ranks of this machine: `python -P -m workers.launch.agent FLAG… -- COMMAND…`.

    launcher ─▶ agent ─▶ workers.launch.rank ─▶ COMMAND, as rank 0 │ 1 │ …
    a rank fails ─▶ torchrun ends the others ─▶ which ranks failed and how, and the exit status of the first
    a signal ─▶ torchrun passes it on ─▶ the ranks end in their own time, unless the launcher loses patience

The launcher starts it in the trainer's place.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Final

from hytrain.config import Cluster, joined_cluster
from hytrain.extras import importing
from workers.exits import ENDINGS, EXIT_USAGE, FOR_PROGRAMS, exit_status, how_it_ended, on_endings

with importing():
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousError

#: How long ranks have to end after a signal: they may be saving. The launcher kills all when a second one comes.
SHUTDOWN_S: Final = 10**9
_AGENT_LOG: Final = "torch.distributed.elastic.agent.server.api"
PROCESSES_LOG: Final = "torch.distributed.elastic.multiprocessing.api"


class Ended(logging.Filter):
    """The processes that torchrun has ended, from its warnings, which are not shown: the report says more."""

    def __init__(self) -> None:
        super().__init__()
        self.pids = set[object]()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING and isinstance(record.args, tuple):
            self.pids.update(record.args[:1])
        return record.levelno > logging.ERROR


def main() -> int:
    """Run the ranks to their end, and return the exit status."""
    separator = sys.argv.index("--")
    flags, command = sys.argv[1:separator], sys.argv[separator + 1 :]
    for number in FOR_PROGRAMS:
        signal.signal(number, lambda *_: None)  # the launcher sends them to the ranks, which do not inherit this
    on_endings(_end)
    folder = joined_cluster()
    assert folder is not None, "the launcher names it"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, with a warning; the optimizers set their own
    logging.getLogger(_AGENT_LOG).setLevel(logging.ERROR)
    logging.getLogger(PROCESSES_LOG).addFilter(ended := Ended())
    parser = run.get_args_parser()
    parser.set_defaults(signals_to_handle="SIGQUIT")  # torchrun would take a copy of the first signal for a second one
    parser.set_defaults(shutdown_timeout=SHUTDOWN_S, log_dir=os.path.join(folder, "torchrun"), no_python=True)
    rank = [sys.executable, "-P", "-m", "workers.launch.rank", str(os.getpid()), folder, *command]
    options = parser.parse_args([*flags, *rank])
    if options.max_restarts:
        # Ranks that start again would find the addresses of dead ones in the store that torchrun keeps (torch 2.13).
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    gc.freeze()  # at the process's end, too, nothing of torch is looked through for garbage
    try:
        run.run(options)
    except ChildFailedError as error:
        by_themselves = {rank: one for rank, one in error.failures.items() if one.pid not in ended.pids}
        return report(Cluster.read(folder).run_dir, by_themselves or error.failures)
    except SignalException as received:
        return 128 + received.sigval
    except (RendezvousError, ConnectionError) as error:
        print(f"hytrain-cluster: the machines did not meet: {error.__cause__ or error}", file=sys.stderr)
        return 1
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """Have torchrun pass the signal on, once: a batch system sends one to every process, and so does the launcher."""
    for each in ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    raise SignalException(f"signal {number}", sigval=signal.Signals(number))


def report(run_dir: str, failures: Mapping[int, ProcessFailure]) -> int:
    """Say which ranks failed, killed ones first: others fail because of them. Returns the first one's exit status."""
    failed = sorted(failures.items(), key=lambda failure: (failure[1].exitcode >= 0, failure[0]))
    first = exit_status(failed[0][1].exitcode)
    if first != EXIT_USAGE:
        for rank, failure in failed:
            log = os.path.join(run_dir, "logs", f"trainer-{failure.local_rank}.log")
            how = how_it_ended(failure.exitcode)
            print(f"hytrain-cluster: rank {rank} (process {failure.pid}) {how}; its log is {log}", file=sys.stderr)
    return first


if __name__ == "__main__":
    sys.exit(main())
