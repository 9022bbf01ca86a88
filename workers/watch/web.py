"""`hytrain-monitor --web`: runs as a page on this machine, which follows them, and their numbers for Prometheus.

    coordinator ─ statuses ─▶ Feed, on a thread ─┬─▶ /events    server-sent events: new records, processes
                 (one for each run)              └─▶ /metrics   the newest records, in Prometheus's text format
    the runs' folders ─ report.read ────────────────▶ /         the report so far; live.js adds what comes

Whoever has the address with its token may look. Nothing here can change a run, or slow it down: the coordinator does
not wait for monitors. Who asks for nothing, or does not read the answer, is disconnected.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import threading
import time
import webbrowser
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from hytrain.errors import ClusterTimeout, ConfigError
from hytrain.extras import needed
from hytrain.readable import gib
from hytrain.run import trace
from protocol import messages as m
from protocol.metrics import METRICS
from workers import run_folder
from workers.watch import report, story, timeline
from workers.watch import status_text as text
from workers.watch.observer import followed
from workers.watch.troubles import Snapshot

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST: Final = "127.0.0.1"
PORT: Final = 6180
#: How often a page gets what is new.
EVERY_S: Final = 0.5
#: A run is summed up so often, or less often where that takes more than a part of the time.
SUM_S, SUM_SHARE = 2.0, 0.05
#: A coordinator that does not answer is waited for so long at the end.
STOP_S: Final = 15.0
#: So many records wait for a page that reads slowly; it loses older ones.
KEPT: Final = 512
#: The records of one event take at most so much, but for a single one.
NEWS_BYTES: Final = 1 << 18
#: A connection that has not asked, or has read nothing of what waits for it, ends after so long.
PATIENCE_S: Final = 10.0
#: So many connections are served at a time.
CONNECTIONS: Final = 64
#: No other site hears the address, which has the token, and no cache keeps what it shows. A connection has one request.
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the page's own, which can't say that
    "Referrer-Policy": "no-referrer",
    "Connection": "close",
}
EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"


class Feed:
    """What comes from a run's coordinator: the newest status, the last records as they came, and the story so far.

    It looks at the processes itself, so that neither their CPU shares nor what that costs depend on how many pages ask.
    `name` tells the run from others.
    """

    def __init__(self, name: str, folder: Path, look: Callable[[m.Status], Snapshot]) -> None:
        self.name, self.folder, self._look = name, folder, look
        self.status: m.Status | None = None
        self._seen: Snapshot | None = None
        self._shown: dict[str, Any] = {}  # what pages show of it
        self._seen_s = -math.inf
        self.ended = self.stops = False
        self._end = "the run has ended"
        self._story: story.Story | None = None
        self.facts: list[str | None] = report.facts(None)
        self.plans, self._sum_s = "", -math.inf
        self.count = 0  # of all records that have come
        self._records: deque[tuple[int, str]] = deque(maxlen=KEPT)

    def follow(self, statuses: Iterable[m.Status]) -> None:
        """Take statuses until there are no more, since the run has ended, or until told to stop."""
        try:
            for status, record in followed(statuses):
                if self.stops:
                    return
                if record is not None:
                    self._records.append((self.count + 1, record))
                    self.count += 1
                    self._tell(json.loads(record))
                self.status = status
                if time.monotonic() - self._seen_s >= EVERY_S:
                    self._see(status)
        except (ConfigError, ClusterTimeout) as error:
            self._end = str(error)
        except Exception as error:  # or the page would stand still, and not say why
            self._end = f"this monitor has failed: {error!r}"
            raise
        finally:
            if self.status is not None:
                self._see(self.status)
            self._sum_up(is_over=True)
            self.ended = True

    def _tell(self, record: dict[str, Any]) -> None:
        """The story goes on, from what the run's folder has of the time before."""
        if self._story is None:
            try:
                self._story = read(self.folder) or story.Story(run_folder.look(self.folder))
            except OSError:  # the folder is gone
                return
        self._story.add(record)
        if time.monotonic() >= self._sum_s:
            self._sum_up()

    def _sum_up(self, *, is_over: bool = False) -> None:
        began_s = time.monotonic()
        self._story = known = self._story or read(self.folder)
        if known is not None and known.steps:
            known.run = replace(known.run, live=not is_over)
            self.facts, self.plans = report.facts(known), report.plans(self.name, known)
        now = time.monotonic()
        self._sum_s = now + max(SUM_S, (now - began_s) / SUM_SHARE)

    def _see(self, status: m.Status) -> None:
        seen = self._look(status)
        self._shown = {
            "processes": json.loads(text.as_json(seen))["processes"],
            "cores": [group.cells for group in text.cores(seen)],
            "memory": _memory_rows(status),
        }
        self._seen, self._seen_s = seen, time.monotonic()

    def news(self, after: int) -> tuple[int, dict[str, Any]]:
        """What has come after so many records: how many there are by now, and what a page shows."""
        seen, status, known = self._seen, self.status, list(self._records)
        is_ = "ended" if self.ended else "live"
        if status is None or seen is None:
            told = {"records": [], "is": is_, "state": self._end if self.ended else "waiting for the coordinator"}
            if self.ended and self._story is not None:  # all there is to know is in its folder
                told["line"] = "   ".join(text.asked_first({**self._story.last, "remaining_s": None}))
            return after, told
        troubles = () if self.ended else seen.troubles
        line = "no step has ended yet"
        if status.record != "{}":
            line = "   ".join([*text.asked_first(json.loads(status.record)), *text.waiting(status)])
        return known[-1][0] if known else after, {
            "records": [json.loads(record) for record in _newest(known, after)],
            "is": is_,
            "state": self._end if self.ended else "; ".join(trouble.text for trouble in troubles),
            "about": "; ".join(trouble.about for trouble in troubles),  # the same as long as the same is wrong
            "line": line,
            "more": text.line(status) if status.record != "{}" else "",
            "reason": status.reason,
            **self._shown,
        }


def _newest(known: Sequence[tuple[int, str]], after: int) -> list[str]:
    """The records after so many, the newest one last; of many large ones only the newest."""
    found, nbytes = deque[str](), 0
    for number, record in reversed(known):
        nbytes += len(record)
        if number <= after or (found and nbytes > NEWS_BYTES):
            break
        found.appendleft(record)
    return list(found)


def _news(
    feeds: Sequence[Feed], names: Sequence[str], counts: list[int], shown: dict[Any, object]
) -> tuple[list[dict[str, Any]], str | None]:
    """What has come after so many records of each run, and the summary; what is `shown` already is left out."""

    def is_new(what: Any, which: object) -> bool:
        is_other = what not in shown or shown[what] != which
        shown[what] = which
        return is_other

    found = []
    for run, (feed, name) in enumerate(zip(feeds, names, strict=True)):
        counts[run], told = feed.news(counts[run])
        if is_new(("timeline", run), trace.identity(feed.folder)):
            told["timeline"] = report.timelines(name, timeline.of_run(feed.folder))
        if is_new(("plans", run), feed.plans):
            told["plans"] = feed.plans
        found.append(told)
    told_of = [feed.facts for feed in feeds]
    return found, report.summary(told_of, names) if is_new("summary", told_of) else None


def _memory_rows(status: m.Status) -> list[tuple[str, ...]]:
    """A row for each plane, with what it takes on the host and on the trainer's device, and their sums."""
    places = [sizes for _, sizes in text.planes(status)]
    rows = [
        (plane, *(gib(sizes[plane]) if plane in sizes else "–" for sizes in places))
        for plane in dict.fromkeys(plane for sizes in places for plane in sizes)
    ]
    return [*rows, ("all", *(gib(sum(sizes.values())) for sizes in places))] if rows else []


def application(feeds: Sequence[Feed], token: str) -> Starlette:
    """The addresses. Each wants `token` as a parameter: a cookie would go to all ports of this machine."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    names = report.names_of([feed.folder for feed in feeds])

    def page(request: Request) -> Response:
        # Before files are read: a record that comes twice is shown once.
        live = names, [feed.count for feed in feeds]
        return HTMLResponse(report.page([read(feed.folder) for feed in feeds], datetime.now(UTC), live=live))

    def metrics(request: Request) -> Response:
        return PlainTextResponse(exposition(feeds), media_type=EXPOSITION)

    async def events(counts: list[int]) -> AsyncIterator[str]:
        has_ended, shown = False, dict[Any, object]()
        while not has_ended:
            has_ended = all(feed.ended for feed in feeds)  # first: then what follows has everything
            found, summary = await asyncio.to_thread(_news, feeds, names, counts, shown)
            data = json.dumps({"runs": found, "summary": summary, "ended": has_ended})
            yield f"id: {','.join(map(str, counts))}\ndata: {data}\n\n"
            await asyncio.sleep(0.0 if has_ended else EVERY_S)

    def stream(request: Request) -> Response:
        known = request.headers.get("last-event-id") or request.query_params.get("after") or ""
        given = [int(count) for count in known.split(",") if count.isdecimal() and len(count) < 16]
        counts = given if len(given) == len(feeds) else [feed.count for feed in feeds]
        return StreamingResponse(events(counts), media_type="text/event-stream")

    def guarded(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def checked(request: Request) -> Response:
            given = request.query_params.get("token") or ""
            if secrets.compare_digest(given.encode(), token.encode()):
                response = answer(request)
            else:
                said = "open the address that hytrain-monitor has printed, with its token\n"
                response = PlainTextResponse(said, 403)
            response.headers.update(HEADERS)
            return response

        return checked

    routes = {"/": page, "/events": stream, "/metrics": metrics}
    return Starlette(routes=[Route(path, guarded(answer)) for path, answer in routes.items()])


def read(folder: Path) -> story.Story | None:
    """What the run's folder tells; None before a step has ended."""
    try:
        return story.read(folder)
    except (ConfigError, OSError):
        return None


def exposition(feeds: Sequence[Feed]) -> str:
    """The newest record of each rank in Prometheus's text format. Without a status, only that there is none."""
    lines = ["# HELP hytrain_up Whether the run's coordinator answers.", "# TYPE hytrain_up gauge"]
    of_ranks: list[tuple[str, dict[str, Any]]] = []
    for feed in feeds:
        status, name = feed.status, feed.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        is_up = status is not None and not feed.ended and not status.processes[0].silent_s
        lines.append(f'hytrain_up{{run="{name}"}} {int(is_up)}')
        records = [] if status is None else [(rank.rank, rank.record) for rank in status.ranks] or [(0, status.record)]
        of_ranks += [(f'run="{name}",rank="{rank}"', json.loads(record)) for rank, record in records]
    for metric in METRICS:
        samples = [
            f"{metric.prometheus}{{{labels}}} {value!r}"
            for labels, record in of_ranks
            if isinstance(value := record.get(metric.name), int | float) and math.isfinite(value)
        ]
        if metric.prometheus and samples:
            kind = "counter" if metric.prometheus.endswith("_total") else "gauge"
            meaning = metric.meaning[0].upper() + metric.meaning[1:]
            lines += [f"# HELP {metric.prometheus} {meaning}.", f"# TYPE {metric.prometheus} {kind}", *samples]
    return "\n".join(lines) + "\n"


def server(app: Starlette) -> uvicorn.Server:
    """Serves the addresses, to those who ask and read."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(PATIENCE_S, self._look, 0)

        def _look(self, before: int) -> None:
            """`before`: so many bytes waited for the reader at the last look."""
            waiting = self.transport.get_write_buffer_size()
            if self.cycle is None or 0 < waiting == before:
                self.transport.abort()
            elif waiting or not self.transport.is_closing():
                self.loop.call_later(PATIENCE_S, self._look, waiting)

    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        limit_concurrency=CONNECTIONS,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


@contextmanager
def opened(address: str) -> Iterator[None]:
    """The address in a browser, by way of a file that only this user can read: others see a browser's command line."""
    with NamedTemporaryFile("w", prefix="hytrain-", suffix=".html") as file:
        file.write(
            f'<!DOCTYPE html><title>HyTrain</title><meta http-equiv="refresh" content="0; url={escape(address)}">'
        )
        file.flush()
        if not webbrowser.open(Path(file.name).as_uri()):
            print("there is no browser here: open the address in yours", flush=True)
        yield


def serve(
    runs: Sequence[tuple[Feed, Iterable[m.Status]]], port: int, token: str, *, show: Callable[[str], Any] = nullcontext
) -> None:
    """Serve runs until interrupted, each with the statuses that its feed follows; print the address, and `show` it.

    Raises `ConfigError` without the packages, or for a taken port.
    """
    with needed("--web", "monitor"):
        import starlette  # noqa: F401, only checks that they exist
        import uvicorn  # noqa: F401
    try:
        listening = socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port}: {error}; choose another with --web PORT, or 0 for a free one") from None
    serving = server(application([feed for feed, _ in runs], token))
    threads = [
        threading.Thread(target=feed.follow, args=(statuses,), name="feed", daemon=True) for feed, statuses in runs
    ]
    for thread in threads:
        thread.start()
    address = f"http://{HOST}:{listening.getsockname()[1]}/?{urlencode({'token': token})}"
    print(address, flush=True)
    try:
        with show(address):
            serving.run([listening])
    finally:
        for feed, _ in runs:
            feed.stops = True
        for thread in threads:
            thread.join(STOP_S)  # it uses the connection, which is closed next
