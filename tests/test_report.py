"""`hytrain-monitor report`: what its page says of runs' folders, and that a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hytrain.errors import ConfigError
from protocol.metrics import METRICS
from workers.watch import monitor, report
from workers.watch.report import page
from workers.watch.story import POINTS, WARM_UP_STEPS, read

ROOT = Path(__file__).resolve().parent.parent
NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)


def record(step: int, **more: Any) -> dict[str, Any]:
    ended = {"step": step, "wall_time": 1e9 + step, "at_s": float(step)}
    usual = {"step_s": 0.5, "stall_s": 0.05, "cpu_busy_s": 0.2, "k": 0.25}
    layers = {"gpu_layers": 2, "visiting_layers": 1, "offloaded_layers": 0, "moved": 3}
    return {**ended, **usual, **layers, "predicted_step_s": 0.4, "loss": 4.0 - step / 1000, **more}


def run(folder: Path, records: list[dict[str, Any]], *, recipe: str | None = None, start: Any = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe)
    if start is not None:
        (folder / "environment.json").write_text(json.dumps([start]))
    return folder


def rows(text: str, caption: str) -> list[list[str]]:
    """The cells of the table with this caption."""
    [found] = [table for table in re.findall(r"<table>(.*?)</table>", text, re.S) if f">{caption}<" in table]
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", found)
    return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", one)] for one in lines]


def drawn(text: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return {chart["title"]: chart for chart in json.loads(data)["charts"]}


def test_a_finished_run_is_summed_up(tmp_path: Path) -> None:
    records = [record(step, step_s=9.0 if step <= WARM_UP_STEPS else 0.5) for step in range(1, 41)]
    records[-1] |= {"validation_loss": 3.5, "tokens_per_s": 1000.0, "mfu": 0.4, "steps": 50.0}
    start = {"gpu": "a GPU", "cpu": "a CPU", "cores": 8, "versions": {"torch": "2.13", "hytrain": "0.1"}}
    text = page([read(run(tmp_path / "one", records, start=start))], NOW)
    told = {cells[0]: cells[1] for cells in rows(text, "Summary")}
    assert told["steps"] == "40 of 50" and told["state"] == "ended" and told["optimizer state"] == "exact"
    assert told["step time, median"] == "500.0 ms" and told["waiting for weights or memory"] == "10.0%"
    assert told["steps relative to the prediction, median"] == "1.25" and told["MFU, last"] == "40.0%"
    assert told["validation loss"] == "3.5000" and told["CPU"] == "a CPU, 8 cores" and told["layers moved"] == "3"
    assert {"Loss", "Step time", "k: share of parameters that the GPU owns"} <= drawn(text).keys()
    assert "GPU memory" not in drawn(text), "there are no such records"


def test_ranks_are_compared(tmp_path: Path) -> None:
    """Where there are several. The slowest one spends the least time in all-gathers."""
    folder = run(tmp_path / "one", [record(step, rank=4, gather_s=0.2) for step in range(1, 20)])
    assert read(folder).ranks == []
    others = [record(step, rank=5, gather_s=None, stall_s=0.1, k=0.5) for step in range(1, 20)]
    (folder / "metrics-1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in others) + '{"rank"')
    (folder / "metrics-2.jsonl").write_text("")
    (folder / "metrics-1-replaced.jsonl").write_text((folder / "metrics-1.jsonl").read_text())
    (folder / "metrics-replaced.jsonl").write_text(json.dumps(record(1, rank=9)) * 9)
    found = rows(page([read(folder)], NOW), "Ranks of one on this machine, medians of steps")[1:]
    assert found == [["4", "500.0 ms", "50.0 ms", "200.0 ms", "0.250"], ["5", "500.0 ms", "100.0 ms", "–", "0.500"]]


def test_energy_is_told_per_token(tmp_path: Path) -> None:
    """Of the steps in which power is known."""
    known = {"tokens": 500.0, "gpu_watts": 600.0}
    records = [record(step, **(known if step % 2 else {"tokens": 500.0})) for step in range(1, 41)]
    text = page([read(run(tmp_path / "one", records))], NOW)
    assert ["joules per token, GPU", "0.6"] in rows(text, "Summary") and "host" not in text.partition("Charts")[0][
        -900:
    ]
    assert [line["label"] for line in drawn(text)["Power"]["lines"]] == ["GPU"]
    several = [one | {"rank": 0} for one in records]
    assert "joules" not in page([read(run(tmp_path / "several", several))], NOW), "the tokens are those of all GPUs"


def test_what_is_not_exact_is_told(tmp_path: Path) -> None:
    smaller = {"state_dtype": "bfloat16", "master_dtype": "bfloat16"}
    text = page([read(run(tmp_path / "one", [record(step, **smaller) for step in range(9)]))], NOW)
    assert ["optimizer state", "moments in bfloat16, without masters: not exact"] in rows(text, "Summary")


def test_each_plan_has_its_reason_and_how_its_steps_were(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 31)]
    records[0]["reason"] = "the first"
    records[9] |= {"reason": "k=0.50 is <better>", "k": 0.5}
    for one in records[9:]:
        one |= {"step_s": 0.3, "predicted_step_s": 0.2}
    found = rows(page([read(run(tmp_path / "one", records))], NOW), "Plans of one")[1:]
    first = "the first plan: k 0.250, 1 layer visiting"
    assert found[0] == ["1", "400.0 ms", "500.0 ms", "1.25", first, "the first"]
    assert found[1] == ["10", "200.0 ms", "300.0 ms", "1.50", "k 0.250 → 0.500", "k=0.50 is <better>"]
    assert WARM_UP_STEPS < 9, "the first plan has measured steps"


def test_tokens_and_seconds_are_axes_too(tmp_path: Path) -> None:
    """Where the loop has gone back, the later steps count, in the lines, too. The tokens are all that were trained."""
    steps = [1, 2, 3, 2, 3, 4]
    records = [record(step, tokens=100.0, wall_time=5.0 * at, loss=float(at)) for at, step in enumerate(steps)]
    [data] = re.findall(r'id="data">(.*?)</script>', page([read(run(tmp_path / "one", records))], NOW), re.S)
    told = json.loads(data)
    assert told["axes"] == [{"steps": [1, 2, 3, 4], "tokens": [100, 400, 500, 600], "seconds": [0, 15, 20, 25]}]
    [line] = told["charts"][0]["lines"]
    assert (line["steps"], line["values"]) == ([1, 2, 3, 4], [0, 3, 4, 5])


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    records = [record(step, reason="so") for step in range(1, 20)]
    for one in records:
        one["streamed_layers"] = 7 + one.pop("offloaded_layers")
    found = rows(page([read(run(tmp_path / "one", records))], NOW), "Plans of one")[1:]
    assert found[0][4] == "the first plan: k 0.250, 1 layer visiting, 7 layers offloaded"


def test_runs_are_compared(tmp_path: Path) -> None:
    """Runs of one name are told apart by their folders. A run without a loss is in no chart of losses."""
    for name in ("a", "b"):
        run(tmp_path / name / "run", [record(step, loss=None if name == "b" else 1.0) for step in range(1, 20)])
    text = page([read(tmp_path / name / "run") for name in ("a", "b")], NOW)
    assert rows(text, "Summary")[0][1:] == ["a/run", "b/run"]
    assert [line["label"] for line in drawn(text)["Loss"]["lines"]] == ["a/run: training"]
    assert [line["run"] for line in drawn(text)["Step time"]["lines"]] == [0, 0, 1, 1]


def test_long_runs_become_means(tmp_path: Path) -> None:
    steps = 4 * POINTS
    records = [record(step, loss=float(step % 4), grad_norm=1e3 if step == 99 else 1.0) for step in range(1, steps + 1)]
    charts = drawn(page([read(run(tmp_path / "one", records))], NOW))
    [line] = charts["Loss"]["lines"]
    assert line["steps"] == list(range(4, steps + 1, 4)) and set(line["values"]) == {1.5}
    assert charts["Norm of the gradients"]["top"] == 1.25 and charts["Loss"]["top"] is None


def test_the_last_steps_are_drawn_though_they_are_few(tmp_path: Path) -> None:
    steps = 2 * POINTS + 1
    charts = drawn(page([read(run(tmp_path / "one", [record(step) for step in range(1, steps + 1)]))], NOW))
    assert charts["Loss"]["lines"][0]["steps"][-1] == steps


def test_what_a_loop_has_written_under_other_names_is_left_out(tmp_path: Path) -> None:
    odd = {"loss": "low", "lr": None, "reason": 3, "stall_s": float("nan"), "predicted_step_s": True, "steps": "many"}
    records = [record(step, **odd) for step in range(1, 9)] + [record(9, step_s=0.0)]
    folder = run(tmp_path / "one", records, start={"versions": None})
    (folder / "environment.json").write_text('[1, {"versions": null, "cpu": 3}]')
    text = page([read(folder)], NOW)
    assert ["steps", "9"] in rows(text, "Summary") and "Plans of" not in text
    (folder / "environment.json").write_text("{}")
    assert read(folder).starts == []


def test_few_numbers_above_zero_are_seen(tmp_path: Path) -> None:
    records = [record(step, cpu_busy_s=0.2 if step == 9 else 0.0) for step in range(1, 101)]
    assert drawn(page([read(run(tmp_path / "one", records))], NOW))["The CPU's updates"]["top"] is None


def test_lines_that_a_crash_has_cut_off_are_left_out(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", [record(step) for step in range(1, 9)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss"')
    assert read(folder).last["step"] == 8


def test_nothing_in_a_folder_gets_out_of_its_place(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script>"
    start = {"command": [nasty], "started": nasty, "host": nasty}
    records = [record(step, reason=nasty) for step in range(1, 9)]
    text = page([read(run(tmp_path / "<b>one", records, recipe=nasty, start=start))], NOW)
    assert nasty not in text and "<b>" not in text


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "one", [record(step) for step in range(1, 9)])
    assert monitor.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "report.html")]
    assert "<h1>one</h1>" in (folder / "report.html").read_text()
    assert monitor.main(["report", str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    assert monitor.main(["report", str(folder), "--out", str(tmp_path / "none" / "x.html")]) == 2
    assert "choose another with --out" in capsys.readouterr().err
    for look in ([], ["--once"]):
        assert monitor.main([str(folder), *look]) == 0
        said = capsys.readouterr().out
        assert re.search(r"^state +ended$", said, re.M) and re.search(r"^steps +8$", said, re.M)
        assert f"hytrain-monitor report {folder} writes a page" in said
    assert monitor.main([str(folder), "--set-k", "0.5"]) == 2
    assert f"the run in {folder} is not live" in capsys.readouterr().err
    run(tmp_path / "two", [{"loss": 1.0}])
    with pytest.raises(ConfigError, match="no record of a step"):
        report.read(tmp_path / "two")


def in_a_browser(address: str, profile: Path) -> str:
    """The page as Chromium has drawn it, without a word on its console."""
    browser = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("needs chromium or google-chrome on the PATH")
    options = ["headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "enable-logging=stderr"]
    options += ["virtual-time-budget=9000", f"user-data-dir={profile}", "dump-dom"]
    command = [browser, *(f"--{option}" for option in options), address]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in ran.stderr, ran.stderr
    return ran.stdout


def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    records = [record(step, tokens_per_s=10.0 * step, lr=1e-3) for step in range(1, 200)]
    file = tmp_path / "report.html"
    file.write_text(page([read(run(tmp_path / name, records)) for name in ("one", "two")], NOW))
    seen, charts = in_a_browser(file.as_uri(), tmp_path / "profile"), drawn(file.read_text())
    assert f'data-charts="{len(charts)}"' in seen and seen.count("<canvas") == len(charts) >= 7


def test_a_browser_draws_what_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss over tokens or time, smoothed, on a logarithmic axis; training and validation have two colours."""
    records = [record(step, tokens=10.0, loss=1.0 + step % 2, wall_time=100.0 * step) for step in range(1, 101)]
    records[49]["validation_loss"] = records[99]["validation_loss"] = 1.5
    (probe := tmp_path / "probe.js").write_text(
        """
        const [loss, other] = hytrain.charts, seen = document.body.dataset;
        const [smooth, log] = document.querySelectorAll("input");
        const series = () => loss.plot.series.slice(1).map((one) => [one.label, one._stroke ?? one.stroke()]);
        const choose = (one, kind) => one.dispatchEvent(new Event(kind));
        seen.first = JSON.stringify([series(), loss.plot.data[0].at(-1), loss.large, other.large]);
        const axis = document.querySelector("select");
        const ends = ["tokens", "seconds"].map((name) => {
          axis.value = name;
          choose(axis, "change");
          return [loss, other].map((one) => one.plot.data[0].at(-1));
        });
        smooth.value = 0.9;
        choose(smooth, "input");
        log.click();
        const [raw, mean] = loss.plot.data.slice(1);
        const spread = (some) => Math.max(...some.slice(-20)) - Math.min(...some.slice(-20));
        const names = series().map(([name]) => name);
        seen.then = JSON.stringify([ends, names, spread(raw), spread(mean) < 0.2, loss.plot.scales.y.distr]);
        """
    )
    monkeypatch.setattr(report, "SCRIPTS", (*report.SCRIPTS, str(probe)))
    (file := tmp_path / "report.html").write_text(page([read(run(tmp_path / "one", records))], NOW))
    body = in_a_browser(file.as_uri(), tmp_path / "profile")
    first, then = (json.loads(unescape(re.findall(rf'data-{name}="(.*?)"', body)[0])) for name in ("first", "then"))
    (training, blue), (validation, red) = first[0]
    assert (training, validation, first[1:]) == ("training", "validation", [100, True, False]) and blue != red
    assert then == [[[1000, 1000], [9900, 9900]], ["training", "training, smoothed", "validation"], 1, True, 3]


def test_a_browser_runs_only_the_page_s_own_script(tmp_path: Path) -> None:
    """Whatever got into a page, its policy keeps it from running and from being loaded."""
    file = tmp_path / "report.html"
    text = page([read(run(tmp_path / "one", [record(step) for step in range(1, 20)]))], NOW)
    strange = "<script>document.body.dataset.strange = 1</script><img src='data:,' onerror='document.title = 1'>"
    file.write_text(text.replace("<noscript>", f"{strange}<noscript>"))
    with pytest.raises(AssertionError, match="violates the following Content Security Policy"):
        in_a_browser(file.as_uri(), tmp_path / "profile")
    file.write_text(text)
    assert "<canvas" in in_a_browser(file.as_uri(), tmp_path / "profile")


def test_the_page_of_records_has_every_metric() -> None:
    text = (ROOT / "docs" / "records.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", text, re.M)
    assert found == [(metric.name, metric.unit, metric.meaning) for metric in METRICS]
