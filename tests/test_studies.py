"""The studies run in their small form, and show what they are to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hytrain.recipe import model, report

pytest.importorskip("sklearn")

from examples.studies import decoder, digits
from examples.studies.cotraining import study

ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYTRAIN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HYTRAIN_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of the table that it prints, without its head."""
    main(["--small"])
    return [row.split(" | ") for row in ROW.findall(capsys.readouterr().out)][2:]


def test_the_models_can_be_built() -> None:
    """Slow tests train them in their small form; here they are built in each form, co-training's without memory."""
    for width, depth in ((64, 2), (1024, 4)):
        assert digits.perceptron(width, depth)(torch.ones(2, 64)).shape == (2, 10)
    for shape in (study.SMALL, study.ON_CPU, study.ON_GPU):
        wanted = shape.recipe.model
        built = model.build_empty(wanted, model.configuration(wanted, None, shape.length))
        assert built.config.num_hidden_layers == shape.layers


@pytest.mark.slow
@pytest.mark.spawns
def test_digits_are_learned_alike_by_both_optimizers() -> None:
    """In the same bits."""
    plain, ours = (digits.train("cpu", 3, 64, 2, with_hytrain=each) for each in (False, True))
    assert ours.losses == plain.losses and ours.accuracy == plain.accuracy > 0.8
    assert plain.losses[0] > plain.losses[1] > plain.losses[2]
    assert len(ours.epoch_s) == 3


@pytest.mark.slow
@pytest.mark.spawns
def test_the_table_of_digits_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(digits.main, capsys)
    assert len(found) == (3 if torch.cuda.is_available() else 2)
    assert len({tuple(row[1:3]) for row in found if "CPU" in row[0]}) == 1, "the same losses"


@pytest.mark.slow
@pytest.mark.spawns
def test_the_table_of_co_training_has_a_row_for_each_number_of_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "draw_curve", lambda *arguments: None)  # matplotlib keeps its fonts open
    found = rows(study.main, capsys)
    assert [row[0][:1] for row in found] == ["0", "1"]
    assert sum("chosen by auto" in row[0] for row in found) == 1
    assert min(float(row[2]) for row in found) == 1.0
    assert float(found[1][3]) > 0.0 and float(found[1][4]) > 0.0, "both have computed parts"


def test_the_decoder_writes_one_token_after_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt at once, then a token of each sequence at a time, with a cache."""
    model, lengths = decoder.decoder("cpu", small=True), list[int]()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    clock = iter(range(100))
    monkeypatch.setattr(decoder.time, "perf_counter", lambda: next(clock))
    found = decoder.rate(model, batch=2, prompt=8, written=4)
    assert lengths == [8] + decoder.REPEATS * [8, 1, 1, 1, 1]
    assert found == (2 * 8, 2 * 4), "of both sequences, in a second by this clock"
    monkeypatch.undo()
    assert [row[:2] for row in rows(decoder.main, capsys)] == [["1", "8"], ["4", "8"]]
