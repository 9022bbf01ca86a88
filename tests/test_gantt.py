"""The picture of a timeline in a report: what it draws, that it needs no colours, and that a browser shows it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import pytest
from test_bill import Drawn
from test_report import in_a_browser, record, rows, run

from hytrain.run import trace
from hytrain.step.measure import TRACKS
from workers.watch import gantt, timeline
from workers.watch.bill import PARTS, bill
from workers.watch.gantt import MOST_STEPS, ROWS, figure
from workers.watch.report import page
from workers.watch.story import read
from workers.watch.timeline import KINDS, of_run

NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
DRAWN = {name: kind for name, kind in KINDS.items() if kind.row}
CSS = (Path(gantt.__file__).with_name("pages") / "page.css").read_text()
NASTY = "</title></svg><script>alert(1)</script>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """More steps than are drawn, with a span of each kind of work in each."""
    folder = run(tmp_path / "one", [record(step) for step in range(1, 50)])
    drawn = Drawn(folder)
    drawn.steps(MOST_STEPS + 2)
    for step in range(MOST_STEPS + 2):
        for index, kind in enumerate(name for name, kind in KINDS.items() if kind.row == ROWS[0]):
            drawn.span("compute", kind, step, 12.0 * index, 12.0 * index + 10, lid=index)
        for track, kind in (("D2H", "D2H"), ("CPU update", "CPU update"), ("H2D", "H2D"), ("visits", "visit")):
            drawn.span(track, kind, step, 50, 60, lid=1)
        drawn.span("compute", "forward", step, 99.0, 99.001, lid=99)
    drawn.close()
    trace.merge(folder)
    return folder


def drawn_in(text: str) -> str:
    [found] = re.findall(r'<figure class="gantt">.*?</figure>', text, re.S)
    return found


def test_each_kind_of_work_is_drawn_in_the_row_of_its_place(folder: Path) -> None:
    text = drawn_in(page([read(folder)], NOW))
    assert f"<figcaption>Timeline of one: steps 41 to {40 + MOST_STEPS}</figcaption>" in text
    assert re.findall(r"<li>([\w ]+)</li>", text) == [
        "trainer",
        "gradients out",
        "CPU update",
        "weights back",
        "visits",
    ]
    rects = re.findall(r'<rect class="g-([a-z]+)" x="([\d.]+)" y="(\d+)" width="([\d.]+)".*?<title>(.*?)</title>', text)
    for name, kind in DRAWN.items():
        if name != "all-gather":
            drawn = [title for style, *_, title in rects if style == kind.style and title.startswith(f"{name} layer-")]
            assert len(drawn) == MOST_STEPS, name
    assert all(float(width) == pytest.approx(42, abs=0.1) for *_, width, _ in rects), "10 of 100 ms, and no speck"
    rows_of = {style: int(y) for style, _, y, _, _ in rects}
    assert (
        len({rows_of[style] for style in ("forward", "backward", "gpu", "stall", "ranks", "outside", "batches")}) == 1
    )
    assert rows_of["forward"] < rows_of["cpu"] < rows_of["visit"]
    assert "forward layer-0: 10.0 ms, step 42" in [title for *_, title in rects]


def test_the_picture_has_names_and_needs_no_colours(folder: Path) -> None:
    text = drawn_in(page([read(folder)], NOW))
    assert 'tabindex="0" role="region" aria-label="Timeline of one' in text, "the keyboard scrolls it"
    [told] = re.findall(r'<svg role="img"[^>]* aria-label="([^"]*)"', text)
    assert "computing 40.0% of a step" in told and "the loop between steps 10.0%" in told
    legend = re.findall(r'<rect class="g-(\w+)" width="22" height="14"/></svg>([^<]*)</li>', text)
    assert dict(legend) == {kind.style: kind.label for name, kind in DRAWN.items() if name != "all-gather"}
    styles = {kind.style for kind in DRAWN.values()}
    fills = {style: re.findall(rf"\.g-{style}\b[^}}]*{{ fill: ([^;]+);", CSS) for style in styles}
    assert all(len(fill) == 1 for fill in fills.values()), "each has a style"
    told_apart = [fills[style][0] for style in ("stall", "ranks", "gpu", "outside", "forward", "backward")]
    assert [fill.startswith(("url(#p-", "none")) for fill in told_apart] == [True] * 4 + [False] * 2
    assert "fill-opacity" in CSS.partition(".g-backward")[2].partition("}")[0], "paler than forward"


def test_everything_that_processes_draw_is_in_the_picture_or_left_out_on_purpose() -> None:
    kinds = {kind for _, kind in TRACKS.values()} | {"CPU update", "waiting"}
    assert kinds - DRAWN.keys() == {"after backward", "step()", "waiting"} and KINDS.keys() <= kinds


def test_the_table_beside_it_tells_causes_and_what_helps(folder: Path) -> None:
    found = rows(page([read(folder)], NOW), f"What the {MOST_STEPS + 2} steps in the timeline of one consist of")
    assert found[0][1:] == ["of a step", "share", "busy", "bound", "mostly", "what helps"]
    told = {cells[0]: cells[1:] for cells in found[1:]}
    assert told["computing"][:4] == ["40.0 ms", "40.0%", "40.0 ms", "40.0 ms"]
    loop = PARTS["loop"]
    assert told[loop.title] == ["10.0 ms", "10.0%", "10.0 ms", "10.0 ms", "", loop.advice]
    assert f"<p>{bill(of_run(folder)[0]).limit}</p>" in page([read(folder)], NOW)


def test_ranks_have_rows_of_their_own(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [record(step) for step in range(1, 50)])
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getpid", lambda rank=rank: 100 + rank)
            drawn = Drawn(folder, rank)
        drawn.steps(1)
        drawn.span("compute", "forward", 0, 0, 90, lid=0)
        drawn.close()
    trace.merge(folder)
    text = page([read(folder)], NOW)
    assert re.findall(r"<li>([\w :]+)</li>", drawn_in(text)) == ["rank 0: trainer", "rank 1: trainer"]
    assert "Timeline of one: step 41<" in text
    assert len(rows(text, "What the 1 steps in the timeline of one, rank 1 consist of")) == 3


def test_without_a_timeline_that_can_be_read_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_BYTES", 1000)
    assert "gantt" not in page([read(folder)], NOW).partition("<body>")[2], "too large for a page"
    monkeypatch.undo()
    (folder / trace.FILE).write_text("{")
    assert "What the" not in page([read(folder)], NOW)
    assert figure("one", {}) == ""


def test_names_of_layers_stay_text(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [record(step) for step in range(1, 50)])
    drawn = Drawn(folder)
    drawn.steps(1)
    drawn._writer.span("compute", f"stall {NASTY}", 0.0, 0.05, kind="stall", lid=0, step=0)
    drawn.close()
    trace.merge(folder)
    text = page([read(folder)], NOW)
    assert NASTY not in text and f"stall {NASTY}: 50.0 ms, step 41" in unescape(drawn_in(text))


def test_a_browser_shows_it(folder: Path, tmp_path: Path) -> None:
    """Wide enough to scroll, below its own height; the page itself stays as wide as the window."""
    file = tmp_path / "report.html"
    probe = """<script>
        const [box, lane, bar, picture] = [".gantt .box", ".lanes li", ".g-forward", "svg[role=img]"].map((one) =>
          document.querySelector(one));
        const below = lane.getBoundingClientRect().top - picture.getBoundingClientRect().top;
        document.body.dataset.gantt = [box.scrollWidth > box.clientWidth,
          document.documentElement.scrollWidth <= innerWidth, getComputedStyle(bar).fill.startsWith("rgb"),
          Math.abs(below - 22) < 3].join();</script></body>"""
    whole = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page([read(folder)], NOW)
    )  # a probe is let in
    file.write_text(whole.replace("</body>", probe))
    assert 'data-gantt="true,true,true,true"' in in_a_browser(file.as_uri(), tmp_path / "profile")
