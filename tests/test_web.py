"""`hytrain-monitor --web`: the page, its events, and what Prometheus reads."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient
from test_gantt_text import made, usual
from test_monitor import look, rank, status
from test_report import drawn, in_a_browser, record, rows, run

from hytrain.errors import ClusterTimeout, ConfigError
from hytrain.run import trace
from protocol import messages as m
from protocol.metrics import METRICS
from protocol.placement import Places
from workers.watch import monitor, report, web
from workers.watch.troubles import Snapshot, Usage
from workers.watch.web import Feed, application, exposition

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "a token"


def at(step: int, **more: Any) -> m.Status:
    usual = {"policy": "deadline", "stall_s": 0.05, "predicted_step_s": None}
    return status(record=json.dumps({**usual, **record(step, **more)}))


def new(name: str = "demo", folder: Path = Path("/runs/demo")) -> Feed:
    return Feed(name, folder, look)


def followed(*statuses: m.Status, name: str = "demo", folder: Path = Path("/runs/demo")) -> Feed:
    feed = new(name, folder)
    feed.follow(statuses)
    return feed


class Client:
    """Asks with a token."""

    def __init__(self, feeds: list[Feed], token: str) -> None:
        self._client, self._token = TestClient(application(feeds, TOKEN)), token

    def get(self, path: str, *, params: dict[str, str] | None = None, headers: dict[str, str] | None = None) -> Any:
        return self._client.get(path, params={"token": self._token, **(params or {})}, headers=headers)


def client(feed: Feed, folder: Path, token: str = TOKEN) -> Client:
    feed.folder = folder
    return Client([feed], token)


def news(feed: Feed, folder: Path, after: str = "", **headers: str) -> list[dict[str, Any]]:
    """All events, up to the end of the run."""
    text = client(feed, folder).get("/events", params={"after": after}, headers=headers).text
    return [json.loads(data) for data in re.findall(r"^data: (.*)$", text, re.M)]


def told_of(feed: Feed, folder: Path, after: str = "", **headers: str) -> dict[str, Any]:
    """What is told of the only run in the only event."""
    [event] = news(feed, folder, after, **headers)
    assert event["ended"]
    [told] = event["runs"]
    return dict(told)


def test_the_page_has_what_came_before_and_says_where_to_go_on(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [record(step) for step in range(1, 9)])
    page = client(followed(at(7), at(8)), folder).get("/").text
    assert '<span class="line">' in page and "<h1>one</h1>" in page and "HyTrain, live: one run" in page
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert json.loads(data)["after"] == [2]
    assert [line["steps"] for line in drawn(page)["Loss"]["lines"]] == [list(range(1, 9)), []], "no validation yet"


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [])
    page = client(followed(status(record="{}")), folder).get("/").text
    assert '<div id="summary"></div>' in page and '<div class="plans"></div>' in page
    told = told_of(followed(status(record="{}")), folder)
    assert told["line"] == "no step has ended yet" and told["records"] == []


def test_events_bring_what_has_come_since(tmp_path: Path) -> None:
    """Each record once: after the page's, or after those that a broken connection has brought."""
    folder = run(tmp_path / "one", [record(1)])
    feed = followed(*(at(step) for step in (1, 2, 2, 3, 4)), status(record="{}", layer_names=()))
    assert [one["step"] for one in told_of(feed, folder, "1")["records"]] == [2, 3, 4]
    assert [one["step"] for one in told_of(feed, folder, "1", **{"last-event-id": "3"})["records"]] == [4]
    told = told_of(feed, folder)
    assert told["records"] == [] and told["state"] == "the run has ended"
    assert told["line"].startswith("step 4") and told["processes"][0]["alive"] is False


def test_a_silent_process_is_named() -> None:
    """In words that stay as they are, since they are read aloud. For how long is told beside the process."""
    first, *others = at(1).processes
    assert new().news(0)[1]["state"] == "waiting for the coordinator"
    gone = status(record="{}", layer_names=(), layer_numels=(), layer_positions=(), places=Places(()))
    quiet = replace(gone, processes=(replace(first, silent_s=9.0), *others))
    for last, state in ((quiet, f"{first.address} (process {first.pid}) has not answered for 9 s"), (gone, "")):
        feed = followed(at(1), quiet, last)
        feed.ended = False
        told = feed.news(0)[1]
        assert told["processes"][0]["silent_s"] == (9.0 if state else 0.0)
        assert (told["state"], told["line"][:6]) == (state, "step 1"), "also once the trainer has left"


def test_runs_are_side_by_side(tmp_path: Path) -> None:
    """Those of one name are told apart by their folders. Each has its own count of records, and ends by itself."""
    folders = [run(tmp_path / name / "run", [record(step) for step in range(1, 4)]) for name in ("a", "b")]
    one, two = (followed(at(2), at(3), name=name, folder=its) for name, its in zip("ab", folders, strict=True))
    both = Client([one, two], TOKEN)
    page = both.get("/").text
    assert "<h1>a/run, b/run</h1>" in page and page.count('class="live"') == page.count('class="plans"') == 2
    assert [line["run"] for line in drawn(page)["Step time"]["lines"]] == [0, 0, 1, 1]
    text = both.get("/events", params={"after": "1,2"}).text
    [event] = [json.loads(data) for data in re.findall(r"^data: (.*)$", text, re.M)]
    assert text.startswith("id: 2,2\n") and [len(its["records"]) for its in event["runs"]] == [1, 0]
    told = both.get("/metrics").text
    assert re.findall(r'^hytrain_step\{run="(\w)"', told, re.M) == ["a", "b"]
    assert told.count("# TYPE hytrain_step gauge") == told.count("# TYPE hytrain_up gauge") == 1
    two.ended = False
    assert 'hytrain_up{run="a"} 0\nhytrain_up{run="b"} 1\n' in exposition([one, two])


def test_cores_and_memory_are_told(tmp_path: Path) -> None:
    usage = Usage(cores=(0, 1), rss_bytes=0, cpu_s=0.0, cpu_share=0.0)
    feed = Feed("demo", tmp_path, lambda shown: Snapshot(shown, ((shown.processes[0], usage),), loads=(1.0, 0.5, 0.0)))
    feed.follow([at(1, gpu_peak_bytes=5 << 30)])
    told = feed.news(0)[1]
    assert told["cores"] == [("others", "2", "0%", "▁"), ("trainer-0", "0-1", "75%", "█▅")]
    rest = ("activations and others, at the peak", "–", "3.00 GiB")
    planes = [("grads", "3.00 GiB", "–"), ("weights", "1.00 GiB", "2.00 GiB")]
    assert told["memory"] == [*planes, rest, ("all", "4.00 GiB", "5.00 GiB")]


def test_pages_that_ask_do_not_make_it_look_again() -> None:
    """A process's CPU share is since the last look: if each page looked, each would see another."""
    looks = []

    def looking(shown: m.Status) -> Snapshot:
        looks.append(shown)
        return look(shown)

    feed = Feed("demo", Path("/runs/demo"), looking)
    feed.follow([at(1)])
    for _ in range(3):
        assert feed.news(0)[1]["processes"]
    assert len(looks) == 2, "at the first status, and at the end"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ClusterTimeout("the coordinator does not reply"), "the coordinator does not reply"),
        (KeyError("x"), "this monitor has failed: KeyError('x')"),
    ],
)
def test_why_nothing_comes_any_more_is_told(error: Exception, words: str) -> None:
    """Whether a status has come before or not."""

    def statuses(*before: m.Status) -> Iterator[m.Status]:
        yield from before
        raise error

    for before in ((), (at(1),)):
        feed = new()
        with nullcontext() if isinstance(error, ClusterTimeout) else pytest.raises(type(error)):
            feed.follow(statuses(*before))
        assert feed.ended and feed.news(0)[1]["state"] == words


@pytest.mark.parametrize("path", ["/", "/events", "/metrics"])
def test_nothing_is_told_without_the_token(path: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [record(1)])
    stranger = client(followed(at(1)), folder, token="another")
    answer = stranger.get(path)
    assert answer.status_code == 403 and "with its token" in answer.text and "loss" not in answer.text
    answer = stranger.get("/", params={"token": TOKEN})
    assert answer.status_code == 200 and not answer.cookies
    assert stranger.get(path).status_code == 403, "each address wants it"


def test_prometheus_gets_every_number_that_has_a_name(tmp_path: Path) -> None:
    feed = followed(at(7, reason="words", grad_norm=None, tflops=3.0))
    answer = client(feed, run(tmp_path / "one", [record(1)])).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = answer.text
    assert 'hytrain_up{run="demo"} 0\n' in told, "it has ended"
    assert '# TYPE hytrain_step_seconds gauge\nhytrain_step_seconds{run="demo",rank="0"} 0.5\n' in told
    assert "# TYPE hytrain_moved_layers_total counter\n" in told
    names = set(re.findall(r"^(\w+)\{", told, re.M))
    assert names - {"hytrain_up"} <= {metric.prometheus for metric in METRICS} and "hytrain_gradient_norm" not in names
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=told, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_prometheus_gets_all_ranks_and_odd_names() -> None:
    several = replace(at(7), ranks=(rank(0, 0.7), rank(1, 0.1)))
    feed = new('a "run"\\\n')
    feed.status = several
    told = exposition([feed])
    assert 'hytrain_up{run="a \\"run\\"\\\\\\n"} 1\n' in told
    assert re.findall(r'hytrain_step_seconds\{.*rank="(\d)"\}', told) == ["0", "1"]
    assert exposition([new()]).endswith('hytrain_up{run="demo"} 0\n'), "also before it has told a thing"


def test_names_for_prometheus_are_unlike() -> None:
    names = [metric.prometheus for metric in METRICS if metric.prometheus]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"hytrain_[a-z_]+", name) for name in names)


def test_the_dashboard_shows_metrics_that_exist(tmp_path: Path) -> None:
    """A name that does not exist would be an empty panel. Each expression selects the runs."""
    dashboard = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text())
    known = {metric.prometheus for metric in METRICS if metric.prometheus} | {"hytrain_up"}
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in shown:
        names = re.findall(r"hytrain_\w+", expression)
        assert names and set(names) <= known and expression.count('{run=~"$run"}') == len(names), expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 10
    if promtool := shutil.which("promtool"):
        rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(shown)]
        (file := tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
        checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_page_gets_another_timeline(tmp_path: Path) -> None:
    """Once. The first news have the one that there is, or that there is none."""
    feeds = [followed(at(1), folder=run(tmp_path / name, [record(1)])) for name in ("one", "two")]
    shown = dict[Any, object]()

    def timelines() -> list[str | None]:
        found, _ = web._news(feeds, ["one", "two"], [0, 0], shown)
        return [told.get("timeline") for told in found]

    assert [(text or "").strip() for text in timelines()] == ["", ""] and timelines() == [None, None]
    for steps in (2, 1):
        shutil.rmtree(feeds[1].folder / trace.FOLDER, ignore_errors=True)
        made(feeds[1].folder, steps, usual)
        other, own = timelines()
        assert other is None and own and f"What the {steps} steps in the timeline of two consist of" in own
        assert timelines() == [None, None]
    assert "Timeline of two: step 41<" in own


def test_a_count_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    feed = followed(at(1), at(2), folder=run(tmp_path / "one", [record(1)]))
    for given in ("9" * 5000, ",".join("1" * 5000)):
        assert told_of(feed, feed.folder, given)["records"] == []


@pytest.mark.parametrize("path", ["/", "/events", "/metrics"])
def test_no_cache_keeps_what_is_told_and_no_other_site_hears_the_address(path: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [record(1)])
    for token in (TOKEN, "another"):
        told = client(followed(at(1)), folder, token).get(path).headers
        assert (told["cache-control"], told["referrer-policy"]) == ("no-store", "no-referrer")
        assert told["content-security-policy"] == "frame-ancestors 'none'"


def test_of_large_records_a_page_gets_the_newest(tmp_path: Path) -> None:
    """What waits for who does not read is bounded, however many numbers a loop logs."""
    third = "9" * (web.NEWS_BYTES // 3)
    feed = followed(*(at(step, own=third) for step in range(1, 6)), folder=tmp_path)
    assert [known["step"] for known in feed.news(0)[1]["records"]] == [4, 5]
    assert [known["step"] for known in feed.news(4)[1]["records"]] == [5]
    feed = followed(at(1), at(2, own=3 * third), folder=tmp_path)
    assert [known["step"] for known in feed.news(0)[1]["records"]] == [2], "a single one is shown in any case"


@contextmanager
def serving(app: Any) -> Iterator[tuple[Any, tuple[str, int]]]:
    """A server on a thread, and its address."""
    server, listening = web.server(app), socket.create_server((web.HOST, 0))
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),))
    thread.start()
    try:
        yield server.server_state.connections, listening.getsockname()
    finally:
        server.should_exit = True
        thread.join()


def wait_for(happened: Callable[[], object]) -> None:
    ends_s = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.parametrize("asks", [b"", b"GET /?token=", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"])
def test_who_does_not_ask_or_read_is_disconnected(asks: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    monkeypatch.setattr(web, "PATIENCE_S", 0.05)
    app = Starlette(routes=[Route("/", lambda request: Response(b"." * (64 << 20)))])
    with serving(app) as (connections, address), socket.create_connection(address) as idle:
        idle.sendall(asks)
        wait_for(lambda: connections)
        wait_for(lambda: not connections)


def test_only_so_many_are_served_at_a_time(tmp_path: Path) -> None:
    feed = followed(at(1), folder=run(tmp_path / "one", [record(1)]))
    question = f"GET /metrics?token={TOKEN.replace(' ', '%20')} HTTP/1.1\r\nHost: h\r\n\r\n".encode()

    def asked(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(question)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    with serving(application([feed], TOKEN)) as (connections, address), ExitStack() as stack:
        assert asked(address).startswith(b"HTTP/1.1 200")
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(web.CONNECTIONS)]
        wait_for(lambda: len(connections) == web.CONNECTIONS)
        assert asked(address).startswith(b"HTTP/1.1 503")
        for each in idle:
            each.close()
        wait_for(lambda: not connections)
        assert asked(address).startswith(b"HTTP/1.1 200")


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    """If it cannot be guessed, and other users cannot read it."""
    (file := tmp_path / "token").write_text("  sixteen letters.\n")
    file.chmod(0o600)
    assert monitor._web_token(str(file)) == "sixteen letters."
    assert len({monitor._web_token(None) for _ in range(3)}) == 3
    file.write_text("fifteen letters\n")
    for path, words in ((file, "has 15 letters, which can be guessed"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            monitor._web_token(str(path))
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="other users can read the token in .*: chmod 600"):
            monitor._web_token(str(file))


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken, pytest.raises(ConfigError, match="choose another with --web PORT"):
        taken.bind((web.HOST, 0))
        taken.listen()
        web.serve([(new(), [])], taken.getsockname()[1], TOKEN)


class Waiting(Feed):
    """Follows once a page listens, and can tell when it has asked again."""

    def __init__(self, folder: Path) -> None:
        super().__init__("demo", folder, look)
        self.listens = threading.Event()

    def news(self, after: int) -> tuple[int, dict[str, Any]]:
        told = super().news(after)
        self.listens.set()
        return told


def test_summary_and_plans_go_on_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what the folder has of the time before, with each record once. Only what is new is told again."""
    monkeypatch.setattr(web, "SUM_S", 0.0)
    monkeypatch.setattr(web, "SUM_SHARE", math.inf)
    folder = run(tmp_path / "one", [record(step, reason="the first") for step in (1, 2)])
    feed, shown = new("one", folder), dict[Any, object]()

    def told() -> tuple[dict[str, str], list[str] | None]:
        """The summary's facts, as far as they are new, and what the plans have changed."""
        [one], summary = web._news([feed], ["one"], [0], shown)
        plans = one.get("plans")
        changes = None if plans is None else [cells[4] for cells in rows(plans, "Plans of one")[1:]]
        return {} if summary is None else {cells[0]: cells[1] for cells in rows(summary, "Summary")}, changes

    statuses, facts = list[dict[str, str]](), list[list[str] | None]()
    later = [at(step, loss=9.0) for step in (2, 3)]
    later.append(at(4, loss=9.0, reason="<other>", k=0.5, offloaded_layers=2))

    def coming() -> Iterator[m.Status]:
        for one in later:
            yield one
            found, plans = told()
            statuses.append(found)
            facts.append(plans)

    feed.follow(coming())
    assert [one.get("steps") for one in statuses] == ["2", "3", "4"] and statuses[2]["state"] == "live"
    assert statuses[1]["loss, mean of the last 50 steps"] == f"{(3.999 + 3.998 + 9.0) / 3:.4f}"
    assert facts[0] == ["the first plan: k 0.250, 1 layer visiting", "other layers"] and facts[1] is None
    assert facts[2] == [*facts[0], "k 0.250 → 0.500; 2 layers offloaded, 0 before"]
    assert told()[0]["state"] == "ended" and told() == ({}, None)
    assert "&lt;other&gt;" in feed.plans


def test_a_browser_gets_the_address_by_a_file_of_its_user(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Other users see command lines, but not this file. It is gone afterwards."""
    asked = list[Path]()

    def browse(address: str) -> bool:
        asked.append(Path(address.removeprefix("file://")))
        return len(asked) == 1

    monkeypatch.setattr(web.webbrowser, "open", browse)
    with web.opened("http://127.0.0.1:6180/?token=a&b"):
        assert (
            asked[0].stat().st_mode & 0o077 == 0 and 'url=http://127.0.0.1:6180/?token=a&amp;b"' in asked[0].read_text()
        )
        assert capsys.readouterr().out == ""
    with web.opened("http://127.0.0.1:6180/"):
        assert "open the address in yours" in capsys.readouterr().out
    assert not any(path.exists() for path in asked)
    for words in (["--open"], ["--follow", "--open"]):
        with pytest.raises(SystemExit):
            monitor.main(words)


def test_ended_runs_have_the_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, served = run(tmp_path / "one", [record(1), record(2)]), list[Any]()
    monkeypatch.setattr(web, "serve", lambda runs, port, token, show: served.extend(runs))
    assert monitor.main([str(folder), str(folder), "--web"]) == 0
    [(feed, statuses)] = served
    feed.follow(statuses)
    page = Client([feed], TOKEN).get("/").text
    assert "<h1>one</h1>" in page and [line["steps"] for line in drawn(page)["Loss"]["lines"]][0] == [1, 2]
    told = told_of(feed, folder)
    assert (told["is"], told["state"]) == ("ended", "the run has ended")
    assert told["line"] == "step 2   loss 3.9980   500.0 ms per step"


def test_a_browser_follows_the_run(tmp_path: Path) -> None:
    """In Chromium: values move, charts and plans grow, a timeline comes, the end is told, and its console is empty."""
    feed, other = Waiting(run(tmp_path / "one", [])), followed(at(3, loss=9.0), folder=run(tmp_path / "two", []))

    def statuses() -> Iterator[m.Status]:
        feed.listens.wait(60)
        made(feed.folder, 2, usual)
        for ended_s, step in enumerate((*range(1, 10), *range(4, 30))):  # the loop went back
            yield at(step, wall_time=1e9 + ended_s, **({"reason": f"<plan> of {step}"} if step in (4, 9) else {}))

    follower = threading.Thread(target=feed.follow, args=(statuses(),))
    follower.start()
    try:
        with serving(application([other, feed], TOKEN)) as (_, (host, port)):
            seen = in_a_browser(f"http://{host}:{port}/?token={TOKEN}", tmp_path / "profile")
    finally:
        feed.listens.set()
        follower.join()
    assert re.findall(r'<span class="line">(step \d+)', seen) == ["step 3", "step 29"], "each run has its own"
    assert seen.count("the run has ended") == 4, "shown and read aloud"
    assert "GPU, or trainer" in seen and "<td>3.00 GiB</td>" in seen
    assert seen.count("<canvas") == int(re.findall(r'data-charts="(\d+)"', seen)[0]) >= 6
    assert "two: training from – to –;" in seen and "one: training from 3.999 to 3.971;" in seen
    assert seen.count('<figure class="gantt">') == 1 and "Timeline of one: steps 41 to 42" in seen
    plans = re.findall(
        r'<td>(\d+)</td>(?:<td>[^<]*</td>){3}<td class="words">[^<]*</td><td class="words">&lt;plan&gt;', seen
    )
    assert plans == ["4", "9", "4", "9"]


def test_charts_follow_a_run_with_several_records_in_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are shorter than the time between events. The x axis ends with the last step."""
    feed = Waiting(run(tmp_path / "one", [record(step) for step in range(1, 9)]))
    (probe := tmp_path / "probe.js").write_text(
        "setInterval(() => (document.body.dataset.until = "
        "[...new Set(hytrain.charts.filter((one) => one.plot).map((one) => one.plot.scales.x.max))]), 50);"
    )
    monkeypatch.setattr(report, "SCRIPTS", (*report.SCRIPTS, str(probe)))

    def statuses() -> Iterator[m.Status]:
        for first in range(9, 41, 8):
            feed.listens.clear()
            feed.listens.wait(60)
            yield from (at(step) for step in range(first, first + 8))

    follower = threading.Thread(target=feed.follow, args=(statuses(),))
    follower.start()
    try:
        with serving(application([feed], TOKEN)) as (_, (host, port)):
            seen = in_a_browser(f"http://{host}:{port}/?token={TOKEN}", tmp_path / "profile")
    finally:
        follower.join()
    assert 'data-until="40"' in seen
