"""`hytrain-monitor --web` beside a run: its address, its numbers, and its end."""

from __future__ import annotations

import re
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
from helpers import adamw, train
from programs import read_until, started
from small_models import perceptron, square_loss

from workers.monitor import EXIT_INTERRUPTED

MONITOR = Path(__file__).resolve().parents[2] / "bin" / "hytrain-monitor"


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.usefixtures("own_run")
def test_a_run_is_served_and_interrupting_the_page_leaves_it_alone() -> None:
    """Although a browser is still connected."""
    pytest.importorskip("uvicorn")
    model = perceptron()
    with adamw(model, k=0.5) as opt:
        train(model, opt, range(8), square_loss)
        with started(sys.executable, MONITOR, opt.run_dir, "--web", "0", "--web-token", "a b") as page:
            address = read_until(page, "http://").strip()
            assert address.endswith("/?token=a+b")
            assert f"<h1>{opt.run_dir.name}</h1>" in read(address)
            train(model, opt, range(8, 16), square_loss)
            with urllib.request.urlopen(address.replace("/?", "/events?"), timeout=30) as events:
                assert b'"records"' in events.readline() + events.readline()
                told = read(address.replace("/?", "/metrics?"))
                assert re.search(r'hytrain_up\{run="[^"]+"\} 1\n', told) and "hytrain_step_seconds{" in told
                page.send_signal(signal.SIGINT)
                assert page.wait(30) == EXIT_INTERRUPTED
        train(model, opt, range(16, 20), square_loss)
        assert opt.statistics().step == 20
