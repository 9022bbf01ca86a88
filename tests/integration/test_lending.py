"""Weights that another process has attached: the trainer's bits of one step, whatever the trainer does meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import DEADLINE_S, adamw, differing, state, train, wait_for, wait_for_coordinator, weights
from programs import ROOT, SCRIPTS, go_on, read_until, started
from small_models import behind_frozen, gpt2, llama, perceptron, square_loss, tokens
from test_k_invariance import CHOICES
from torch import Tensor, nn
from variants import every_second, slow

import hytrain
import hytrain.weights
from hytrain.errors import CapacityError, UsageError
from hytrain.memory import lending
from hytrain.memory.arena import Memory, SharedMemory
from hytrain.memory.lending import Copies, Form, Lending, Lent, Loan, view
from hytrain.memory.transfer import HostTransfers
from hytrain.model.given import tensors_of
from hytrain.run import lender
from hytrain.run.lender import Connection

pytestmark = pytest.mark.spawns


class Borrower:
    """A process that has attached weights, or is about to."""

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid
        self.hears()

    def __call__(self, order: str) -> Any:
        self.tell(order)
        return self.hears()

    def tell(self, order: str) -> None:
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def hears(self) -> Any:
        return json.loads(self.process.stdout.readline())


@contextmanager
def borrower() -> Iterator[Borrower]:
    with started(sys.executable, SCRIPTS / "borrows.py") as process:
        yield Borrower(process)


def at(opt: hytrain.AdamW) -> str:
    """Where a run is whose temporary folder is another one."""
    return opt._session.place.cluster.socket_dir


def digests(model: nn.Module) -> dict[str, str]:
    """Of the bits of all that a forward reads, by all names, without passing through HyTrain's hooks."""
    return {name: digest(tensor) for name, tensor in tensors_of(model).items()}


def digest(tensor: Tensor) -> str:
    elements = tensor.detach().cpu().clone().contiguous().reshape(-1)
    return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()


def kept(monkeypatch: pytest.MonkeyPatch) -> list[Loan]:
    """The loans that were copied since because somebody was still using them."""
    found, keep = list[Loan](), Loan.keep

    def noted(self: Loan, *spare: Any) -> Any:
        found.append(self)
        return keep(self, *spare)

    monkeypatch.setattr(Loan, "keep", noted)
    return found


def make(dtype: torch.dtype) -> nn.Module:
    """The first one is tied, and has a parameter in pieces."""
    return gpt2(dtype) if dtype is torch.float32 else llama(dtype)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = {**CHOICES, "two banks": {"k": 0.3, "max_grad_norm": 1e3, "speculate": True}}


@every_second(dtype=DTYPES, choice=OPTIONS.keys())
def test_the_bits_of_one_step_while_training_goes_on(choice: str, dtype: torch.dtype) -> None:
    """With every placement, and training ends with the bits that it would have had."""
    expected = make(dtype)
    with adamw(expected, **OPTIONS[choice]) as opt:
        train(expected, opt, range(10))
        ended = state(opt) | weights(expected)
    model = make(dtype)
    with borrower() as attached, adamw(model, **OPTIONS[choice]) as opt:
        train(model, opt, range(4))
        with opt.lend_weights() as lent:
            assert attached(f"attach {at(opt)}") is None
            opt.synchronize()
            then = digests(model)
            assert {name: lent[name].shape for name in lent} == {n: t.shape for n, t in tensors_of(model).items()}
            for step in range(4, 7):
                assert attached("digests") == {"step": 4, "tensors": then, "copies": then}
                train(model, opt, [step])
                wait_for_coordinator(opt)
        assert attached("digests")["tensors"] == then
        with opt.lend_weights():
            assert attached("renew") is None
            assert attached("digests") == {"step": 7, "tensors": digests(model), "copies": digests(model)} != then
            assert attached("release") is None
        train(model, opt, range(7, 10))
        assert differing(state(opt) | weights(model), ended) == []
        assert attached("close") is None
        assert attached("left") == []


@pytest.mark.parametrize("k", [0.0, slow(0.5), slow(1.0)])
def test_buffers_and_frozen_parameters_are_lent(k: float) -> None:
    """Those of the step, too, and unlike trained ones they are always copies."""
    model = behind_frozen()
    model[0].requires_grad_(False)
    with borrower() as attached, adamw(model, k=k) as opt, opt.lend_weights() as lent:
        assert {lent[name].kind for name in lent} == {"trained", "frozen", "buffer"}
        attached(f"attach {at(opt)}")
        then = digests(model)
        assert attached("digests")["tensors"] == then
        train(model, opt, range(2), square_loss)
        assert model[1].num_batches_tracked == 2
        assert attached("digests")["tensors"] == then


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"k": 0.0}, {"k": 0.5}, {"k": 1.0}, {"k": 0.0, "visit": 0.5, "offload_weights": 1.0}]
)
def test_a_gpu_of_another_process(options: dict[str, Any]) -> None:
    """What is registered with CUDA there moves while it is used, and is used again."""
    model = llama(torch.bfloat16)
    with borrower() as attached, adamw(model, device="cuda", **options) as opt:
        for turn in range(3):
            train(model, opt, [2 * turn], language_loss_on_the_gpu)
            with opt.lend_weights():
                attached("renew" if turn else f"attach {at(opt)}")
                opt.synchronize()
                then = digests(model)
                assert attached("digests") == {"step": 2 * turn + 1, "tensors": then, "copies": then}
                train(model, opt, [2 * turn + 1], language_loss_on_the_gpu)
                assert attached("digests") == {"step": 2 * turn + 1, "tensors": then, "copies": then}
        assert attached("close") is None
        assert attached("left") == []


def language_loss_on_the_gpu(model: nn.Module, step: int) -> Tensor:
    batch = tokens(step).cuda()
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def test_what_the_cpu_owns_is_copied_only_if_it_is_used_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, what is mapped is used again."""
    copied, model = kept(monkeypatch), perceptron()
    with borrower() as attached, adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        for turn in range(2):
            with opt.lend_weights() as lent:
                assert os.fstat(lent.copies.memory.descriptor).st_blocks == 0
                attached("renew" if turn else f"attach {at(opt)}")
                assert attached("digests")["tensors"] == digests(model)
                attached("release")
                wait_for(lambda: not any(one.loan for one in opt._engine._lending.borrowers))
            train(model, opt, range(2), square_loss)
        assert copied == []
        with opt.lend_weights():
            attached("renew")
        train(model, opt, range(2), square_loss)
        assert len(copied) == 1
        attached("close")
        wait_for(lambda: not opt._engine._lending.borrowers)
        train(model, opt, range(2), square_loss)
        assert len(copied) == 1 and opt._engine._lending._in_use == []


def test_who_comes_late_sees_the_step_that_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, model = kept(monkeypatch), perceptron()
    with borrower() as attached, adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        with opt.lend_weights():
            then = digests(model)
            train(model, opt, range(3), square_loss)
            attached(f"attach {at(opt)}")
            assert attached("digests") == {"step": 2, "tensors": then, "copies": then}
    assert len(copied) == 1


@pytest.mark.parametrize("choice", ["a part", "offloaded, visiting", slow("all on the GPU")])
def test_the_gpu_is_parked_while_weights_are_lent(choice: str) -> None:
    """First they are lent: when they have left the GPU, they cannot be."""
    model, expected = perceptron(), perceptron()
    with adamw(expected, **OPTIONS[choice]) as opt:
        train(expected, opt, range(4), square_loss)
    with borrower() as attached, adamw(model, **OPTIONS[choice]) as opt:
        for turn in range(2):
            train(model, opt, [2 * turn], square_loss)
            with opt.lend_weights():
                then = digests(model)
                with opt.parked(weights=True):
                    attached("renew" if turn else f"attach {at(opt)}")
                    assert attached("digests")["tensors"] == then
                    with pytest.raises(UsageError, match=r"call opt\.resume\(\) before they are used"):
                        opt.lend_weights()
            train(model, opt, [2 * turn + 1], square_loss)
            assert attached("digests")["tensors"] == then
            with opt.parked(), opt.lend_weights():
                attached("renew")
            assert attached("digests")["tensors"] == digests(model)
    assert differing(weights(model), weights(expected)) == []


def test_weights_that_are_written_by_hand_are_written_elsewhere() -> None:
    model = perceptron()
    with borrower() as attached, adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
            then = digests(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            opt.import_weights()
            assert digests(model) != then
            assert attached("digests")["tensors"] == then


@pytest.mark.parametrize("made", [gpt2, slow(llama)])
def test_a_model_without_memory_gets_them(made: Any) -> None:
    """Tied ones are tied, and buffers that no state_dict has are there."""
    model = made(torch.float32)
    with borrower() as attached, adamw(model, k=0.4) as opt:
        train(model, opt, range(2))
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
            model.eval()
            with torch.no_grad():
                expected = model(input_ids=torch.arange(16).view(2, 8)).logits
            assert attached(f"logits {json.dumps(model.config.to_dict())}") == {"logits": digest(expected)}
            other = json.dumps(model.config.to_dict() | {"vocab_size": 99})
            assert "load_into(): what has made this makes another model than the one" in attached(f"logits {other}")


@pytest.mark.parametrize("k", ["0.0", slow("1.0")])
def test_a_trainer_that_dies_leaves_them(k: str) -> None:
    with (
        borrower() as attached,
        started(sys.executable, SCRIPTS / "lends.py", k) as trainer,
    ):
        attached(f"attach {read_until(trainer, 'lent').split()[1]}")
        then = attached("digests")
        go_on(trainer)
        read_until(trainer, "trained")
        trainer.kill()
        trainer.wait(DEADLINE_S)
        assert attached("digests") == then
        assert "lends nothing any more: its trainer has ended, or has closed its optimizer" in attached("renew")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_borrower_that_dies_costs_nothing(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, model = kept(monkeypatch), perceptron()
    with borrower() as attached, adamw(model, k=0.0) as opt:
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
        attached.process.send_signal(how)
        attached.process.wait(DEADLINE_S)
        wait_for(lambda: not opt._engine._lending.borrowers)
        train(model, opt, range(2), square_loss)
    assert copied == []


def test_a_borrower_that_dies_before_its_child_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child keeps the connection open, but it has none of the weights."""
    copied, model = kept(monkeypatch), perceptron()
    with borrower() as attached, adamw(model, k=0.0) as opt:
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
            child = psutil.Process(attached("child"))
        attached.process.kill()
        attached.process.wait(DEADLINE_S)
        wait_for(lambda: not opt._engine._lending.borrowers)
        train(model, opt, range(2), square_loss)
        child.kill()
        wait_for(lambda: not child.is_running())
    assert copied == []


def test_a_borrower_that_is_stopped_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For so long, and then the step is refused before it writes anything. It can be done again."""
    model, expected = perceptron(), perceptron()
    with adamw(expected, k=0.0) as opt:
        train(expected, opt, range(3), square_loss)
    with borrower() as attached, adamw(model, k=0.0) as opt:
        train(model, opt, range(1), square_loss)
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
            then = digests(model)
        attached.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(attached.pid).status() == psutil.STATUS_STOPPED)
        with monkeypatch.context() as patch:
            patch.setattr(lending, "ANSWER_S", 0.1)
            for _ in range(2):
                with pytest.raises(UsageError, match=rf"process {attached.pid} uses weights that this step would"):
                    train(model, opt, range(1, 3), square_loss)
                opt.zero_grad()
        assert digests(model) == then
        said = f"a step waits for process {attached.pid}, which uses weights that the step would overwrite"
        assert [record.getMessage() for record in caplog.records].count(said) == 2
        attached.process.send_signal(signal.SIGCONT)
        train(model, opt, range(1, 3), square_loss)
        assert attached("digests")["tensors"] == then
    assert differing(weights(model), weights(expected)) == []


def test_without_host_memory_lending_is_refused_and_so_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = perceptron(), perceptron()
    with adamw(expected, k=0.5) as opt:
        train(expected, opt, range(3), square_loss)
    with borrower() as attached, adamw(model, k=0.5) as opt:
        train(model, opt, range(1), square_loss)
        with monkeypatch.context() as patch:
            patch.setattr(lending, "available_bytes", lambda: 100)
            with pytest.raises(CapacityError, match=r"0\.0 MiB of host memory are needed for copies of weights, and 0"):
                opt.lend_weights()
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
        with monkeypatch.context() as patch:
            patch.setattr(lending, "available_bytes", lambda: 100)
            with pytest.raises(UsageError, match=r"needed to keep the weights of a past step, which .* Let it release"):
                train(model, opt, range(1, 2), square_loss)
        opt.zero_grad()
        attached("close")
        wait_for(lambda: not opt._engine._lending.borrowers)
        train(model, opt, range(1, 3), square_loss)
    assert differing(weights(model), weights(expected)) == []


@pytest.mark.usefixtures("own_run")
def test_who_cannot_attach_is_told() -> None:
    model = perceptron()
    with borrower() as attached:
        with adamw(model, k=0.5, updates="backward") as opt:
            run, name = opt.run_dir, opt._session.place.cluster.run_name
            assert attached(f"attach {run}") == (
                f"ConfigError: the run {name} has lent no weights yet: its trainer calls opt.lend_weights()"
            )
            assert "ConfigError: no live run is called 'none'" in attached("attach none")
            train(model, opt, [0], square_loss)
            with opt.lend_weights():
                with pytest.raises(UsageError, match=r"attach\(\) is for another process: in the trainer itself"):
                    hytrain.weights.attach(opt.run_dir)
                assert attached(f"attach {run}") is None
                assert "attached in the process that has forked this one" in attached("forked")
                assert attached("release") is None
                assert attached("digests") == (
                    "UsageError: these weights are released, and may have changed: call renew() first"
                )
            none_now = f"ConfigError: the run {name}: it lends no weights now: its trainer calls opt.lend_weights()"
            assert attached("renew") == none_now
            assert attached(f"attach {run}") == none_now
            square_loss(model, 1).backward()
            with pytest.raises(UsageError, match=r"between backward and step\(\)"):
                opt.lend_weights()
            opt.step()
            opt.zero_grad()
            with opt.lend_weights():
                attached("attach")
        assert "lends nothing any more: its trainer has ended, or has closed" in attached("renew")
        assert attached("close") is None
        assert attached("renew") == "UsageError: these weights are closed: hytrain.weights.attach(…) again"


def test_the_token_of_another_run_opens_nothing() -> None:
    with adamw(perceptron(), k=0.5) as opt, opt.lend_weights():
        cluster = opt._session.place.cluster
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(lender.door(cluster.socket_dir, opt._session.place.rank))
            for token in ("", "ä", cluster.token[:-1]):
                asking.send(json.dumps({"kind": "take", "token": token, "asked": 1, "has": []}).encode())
                kind, body, descriptors = lender.receive(asking) or ("", {}, [])
                assert (kind, body["why"], descriptors) == ("refused", "the token is another run's", [])
            for nonsense in (b"[]", b"{", b'{"kind": "take"}', b'{"kind": "seen"}', b'{"kind": 7}'):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                    other.connect(lender.door(cluster.socket_dir, opt._session.place.rank))
                    other.send(nonsense)
                    assert lender.receive(other) is None
        train(opt._session.model, opt, range(1), square_loss)


def test_another_user_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "peer", lambda connection: (1, os.getuid() + 1))
    with adamw(perceptron(), k=0.5) as opt, opt.lend_weights():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(lender.door(opt._session.place.cluster.socket_dir, opt._session.place.rank))
            assert lender.receive(asking) is None
        assert opt._engine._lending.borrowers == set()


def test_to_write_them_ends_the_borrower() -> None:
    with borrower() as attached, adamw(perceptron(), k=0.0) as opt, opt.lend_weights():
        attached(f"attach {at(opt)}")
        attached.tell("write")
        assert attached.process.wait(DEADLINE_S) == -signal.SIGSEGV


def test_an_answer_to_what_was_told_before_does_not_count() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        known, shared = Connection(ours), SharedMemory("lent", 4096)
        for _ in range(2):
            known.tell([], Memory(shared.descriptor, 4096))
            _, _, [descriptor] = lender.receive(theirs) or ("", None, [])
            os.close(descriptor)
        known.has_seen(1)
        assert known.is_moving
        known.has_seen(2)
        assert not known.is_moving
        shared.close()
        known.close()


def test_a_message_has_any_number_of_descriptors_and_bytes() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull, "rb") as file:
        lender.send(ours, "given", ["x" * (2 << 20)], [file.fileno()] * 600)
        kind, body, descriptors = lender.receive(theirs) or ("", None, [])
        for descriptor in descriptors:
            os.close(descriptor)
        assert (kind, len(body[0]), len(descriptors)) == ("given", 2 << 20, 600)


def test_lending_again_and_again_leaves_nothing() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    model = perceptron()
    with borrower() as attached, adamw(model, k=0.5) as opt:
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
        counts = set[int]()
        for step in range(20):
            train(model, opt, [step], square_loss)
            with opt.lend_weights():
                attached("renew")
                assert attached("digests")["tensors"] == digests(model)
            if step > 1:
                counts.add(descriptors())
        assert len(counts) == 1
        assert attached("close") is None
        assert attached("left") == []


def test_a_rebuilt_engine_lends_anew() -> None:
    """What was attached before stays what it was."""
    model = perceptron()
    model[0].requires_grad_(False)
    with borrower() as attached, adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        with opt.lend_weights():
            attached(f"attach {at(opt)}")
            then = digests(model)
            model[0].requires_grad_(True)
            train(model, opt, range(2, 5), square_loss)
            assert attached("digests")["tensors"] == then
        with opt.lend_weights():
            assert "lends nothing any more" in attached("renew")
            assert attached(f"attach {at(opt)}") is None
            assert attached("digests")["tensors"] == digests(model)


def test_copies_have_the_pages_that_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has registered one with CUDA would read what it was. Without copies, other memory is used from then on."""
    found = []
    with adamw(perceptron(), k=0.0) as opt:
        for is_copied in (True, True, False, True):
            with monkeypatch.context() as patch:
                if is_copied:
                    patch.setattr(lending, "_home", lambda known: None)
                with opt.lend_weights() as lent:
                    found.append(lent.copies)
                    assert bool(os.fstat(lent.copies.memory.descriptor).st_blocks) is is_copied
    assert found[0] is found[1] is not found[2] is found[3]


def test_copies_have_their_pages_before_they_are_pinned() -> None:
    """Many threads make them; the driver, which pins them, would make one after the other."""
    rows, had = 1 << 16, list[int]()

    class Driver(HostTransfers):
        def pin(self, start: int, nbytes: int, *, gently: bool = False) -> None:
            had.append(os.fstat(copies.memory.descriptor).st_blocks * 512)

    copies = Copies([Form(torch.float32, torch.Size((rows, 16)))] * 12, Driver())
    copies.write({index: torch.ones(rows, 16) for index in range(10)})
    assert had == [40 * rows * 16] * 10
    copies.write({10: torch.ones(rows, 16)})
    assert had[10:] == [44 * rows * 16]
    copies.close()


def test_the_door_is_closed_with_the_optimizer() -> None:
    with adamw(perceptron(), k=0.5) as opt:
        opt.lend_weights()
        path = Path(lender.door(at(opt), opt._session.place.rank))
        assert path.is_socket()
    assert not path.exists()


def test_a_loan_needs_no_arena_that_its_layer_has_left() -> None:
    """The descriptor's number may be another file's by then."""
    arena, elements = SharedMemory("0", 8192), torch.arange(1024, dtype=torch.float32)
    view(arena.mapping, 4096, elements.dtype, elements.shape).copy_(elements)
    lent = Lent(Memory(arena.descriptor, 8192, 4096), 4096, elements.dtype, elements.shape, "trained")
    loan = Loan(Lending([], HostTransfers()), 1, {"a": lent}, Copies([], HostTransfers()))
    arena.close()
    with open(os.devnull, "rb"):
        [moved], kept = loan.keep()
    assert moved == (lent.memory.number, 4096, 4096, 0)
    found = view(kept.mapping, loan["a"].offset, elements.dtype, elements.shape)
    assert torch.equal(found, elements) and loan["a"].memory is kept.memory
    assert loan.free() is kept
    kept.close()
    loan.copies.close()


@pytest.mark.usefixtures("own_run")
def test_a_policy_learns_from_what_another_process_samples(
    trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example in its small form. It ends with the time of each phase."""
    example = ROOT / "examples/grpo_one_gpu.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--small"])
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(example), run_name="grpo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL's
        with started(sys.executable, example, "--small", "--sampler", cwd=tmp_path) as sampler:
            assert read_until(sampler, "ready")
            script["train"](sampler)
    printed = capsys.readouterr().out
    rewards = [float(reward) for reward in re.findall(r"^step \d+: reward ([\d.]+)$", printed, re.M)]
    assert len(rewards) >= 6 and rewards[-1] > 2 * rewards[0]
    assert re.findall(r"^(\w+): [\d.]+ ms per step$", printed, re.M) == [
        *("lend", "park", "attach", "sample", "resume", "train")
    ]
