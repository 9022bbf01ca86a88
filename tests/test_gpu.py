"""On a GPU: who owns a layer changes no bit, and replayed gradients give torch's AdamW."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.memory.capacity import GpuMemory, gpu_memory
from hytrain.memory.transfer import Copy, CudaTransfers, Transfer
from hytrain.state import tensor_file
from hytrain.state.tensor_file import PIECE_BYTES
from hytrain.step import activations
from hytrain.step.gradient import RoundTrip
from hytrain.tensors import address
from protocol.messages import GradReady

pytestmark = [pytest.mark.gpu, pytest.mark.spawns, pytest.mark.usefixtures("forked_workers")]

STEPS = 30
OFFLOADED = {"offload_activations": True}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def llama(dtype: torch.dtype, device: str = "cuda") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, vocab_size=1024, attn_implementation="eager", use_cache=False)
    with torch.device(device):
        model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype=dtype).train()
    return model


def state_of(model: nn.Module, optimizer: hytrain.AdamW) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, on the CPU."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        state.update({f"{index}.{key}": tensor.cpu().clone() for key, tensor in entry.items()})
    return state


def assert_same(results: list[dict[str, torch.Tensor]]) -> None:
    for other in results[1:]:
        assert [name for name in other if not torch.equal(other[name], results[0][name])] == []


def train(
    model: nn.Module, run_dir: Path, autocast: bool = False, kind: Any = hytrain.AdamW, **options: Any
) -> tuple[dict[str, Any], int]:
    """Weights and optimizer state after STEPS steps, on the CPU; and how many handovers there were."""
    optimizer = kind(model, **{"lr": 1e-3, **options}, run_dir=str(run_dir))
    generator = torch.Generator().manual_seed(0)
    parts = options.get("grad_accumulation", 1)
    for _ in range(STEPS):
        for _ in range(parts):
            batch = torch.randint(0, 1024, (4, 64), generator=generator).cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=batch, labels=batch).loss / parts
            optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer._engine._handover.wait()
    scale = optimizer.loss_scale
    state = state_of(model, optimizer)
    if scale is not None:
        state["loss_scale"], state["skipped"] = scale.cpu(), torch.tensor(optimizer.skipped_steps)
    moved = optimizer.statistics().moved
    optimizer.close()
    return state, moved


@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        *((dtype, {}) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (torch.bfloat16, {"state_dtype": "bfloat16"}),
        (torch.bfloat16, {"state_dtype": "bfloat16", "master_dtype": "bfloat16"}),
        (torch.bfloat16, {"state_dtype": "float8"}),
    ],
    ids=["bfloat16", "float16", "float32", "bfloat16 moments", "no masters", "float8 moments"],
)
def test_the_result_does_not_depend_on_who_owns_a_layer(
    dtype: torch.dtype, state: dict[str, Any], tmp_path: Path
) -> None:
    choices: list[dict[str, Any]] = [{"k": k} for k in (0.0, 0.3, 1.0, "auto")]
    choices += [{"k": 0.2, "visit": 0.5}, {"k": 0.0, "visit": 1.0}]
    choices += [{"k": 0.0, "offload_weights": 1.0}, {"k": 0.2, "visit": 0.5, "offload_weights": 0.6}]
    fixed = [train(llama(dtype), tmp_path, **choice, **state)[0] for choice in choices]
    for offloaded in (0.0, 1.0, "auto"):
        random, moved = train(llama(dtype), tmp_path, policy="random", offload_weights=offloaded, **state)
        assert_same([*fixed, random])
        assert moved > 20


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_blocks_that_compute_in_parts_give_the_same_bits_whoever_owns_a_layer(
    checkpointed: bool, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        model = recomputing(torch.bfloat16) if checkpointed else llama(torch.bfloat16)
        model.config.use_cache = False  # type: ignore[union-attr]
        hytrain.split_batch(model, 3)
        return model

    choices: list[dict[str, Any]] = [{"k": k} for k in (0.0, 1.0)]
    choices += [{"k": 0.0, "visit": 1.0, "offload_weights": 1.0, "offload_activations": checkpointed}]
    fixed = [train(make(), tmp_path, **choice)[0] for choice in choices]
    random, moved = train(make(), tmp_path, policy="random", offload_weights="auto")
    assert_same([*fixed, random])
    assert moved > 20


class Mixture(nn.Module):
    """Two of eight experts for each row of x, (rows, 256); an expert without a row has no gradient in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(256, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        y = x
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            if len(row):
                y = y.index_add(0, row, expert(x[row]).tanh() * shares[row, place, None])
        return y


@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 0.05}], ids=["no clipping", "clipped"])
def test_skipped_experts_do_not_depend_on_who_owns_a_layer(clipping: dict[str, Any], tmp_path: Path) -> None:
    results: list[dict[str, torch.Tensor]] = []
    choices: list[dict[str, Any]] = [{"k": 0.0}, {"k": 1.0}, {"k": 0.0, "visit": 1.0}, {"policy": "random"}]
    choices += [{"k": 0.0, "visit": 0.5, "offload_weights": 1.0}, {"policy": "random", "offload_weights": "auto"}]
    for options in choices:
        torch.manual_seed(0)
        model = nn.Sequential(*[Mixture() for _ in range(4)]).to("cuda", torch.bfloat16)
        optimizer = hytrain.AdamW(model, lr=1e-3, weight_decay=0.1, run_dir=str(tmp_path), **options, **clipping)
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            x = torch.randn(3, 256, generator=generator).to("cuda", torch.bfloat16)
            (model(x) - x.sin()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer._engine._handover.wait()
        counts = [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
        assert min(counts) < STEPS / 2 < max(counts) == STEPS
        results.append(state_of(model, optimizer))
        optimizer.close()
    assert_same(results)


def mixtral() -> nn.Module:
    """Fused experts, computed one by one: what computes them all at once may not be deterministic."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    config = transformers.MixtralConfig(**shape, **experts, vocab_size=1024, use_cache=False)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device("cuda"):
        model: nn.Module = transformers.MixtralForCausalLM(config).to(dtype=torch.bfloat16).train()
    return model


def test_fused_experts_in_pieces_do_not_depend_on_who_owns_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hytrain.model.layers.MIN_PIECE_NUMEL", 1 << 18)
    monkeypatch.setattr("hytrain.model.layers.MAX_PIECE_NUMEL", 1 << 18)
    choices: list[dict[str, Any]] = [{"k": k} for k in (0.0, 0.3, 1.0)]
    choices += [{"k": 0.0, "visit": 1.0}, {"k": 0.2, "visit": 0.5, "offload_weights": 0.6}, {"policy": "random"}]
    assert_same([train(mixtral(), tmp_path, **options)[0] for options in choices])


@pytest.fixture(scope="session")
def compiler() -> Any:
    """Imported before a test's temporary folder is made, where it would keep headers; without processes of its own."""
    importlib.import_module("torch._inductor.codecache")
    return importlib.import_module("torch._inductor.config")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
def test_compiled_blocks_give_the_same_bits_whoever_owns_a_layer(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights are offloaded and activations are recomputed."""
    monkeypatch.setattr(compiler, "compile_threads", 1)
    choices: list[dict[str, Any]] = [{"k": 1.0}, {"k": 0.3}, {"k": 0.0, "visit": 0.5, "offload_weights": 1.0}]
    results = []
    for options in choices:
        model: Any = llama(torch.bfloat16)
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for block in model.model.layers:
            block.compile()
        results.append(train(model, tmp_path, **options)[0])
    assert_same(results)


class Driver:
    """CUDA's, which pins at most so many bytes: beyond that, it is asked to pin once more what is pinned."""

    def __init__(self, most: int) -> None:
        self._cuda, self._most = torch.cuda.cudart(), most
        self.pinned, self.refusals = dict[int, int](), 0
        self._spare = torch.empty(1 << 16, dtype=torch.uint8).pin_memory()

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if sum(self.pinned.values()) + nbytes > self._most:
            self.refusals += 1
            code = int(self._cuda.cudaHostRegister(address(self._spare), self._spare.nbytes, flags))
            assert code, "it is pinned"
            return code
        self.pinned[start] = nbytes
        return int(self._cuda.cudaHostRegister(start, nbytes, flags))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.pinned[start]
        return int(self._cuda.cudaHostUnregister(start))


def test_memory_that_the_driver_does_not_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied all the same, and the driver's error ends nothing that comes after it."""
    choices: list[dict[str, Any]] = [{"k": 0.0}, {"k": 0.0, "visit": 1.0}, {"k": 0.0, "offload_weights": 1.0}]
    choices += [{"policy": "random", "offload_weights": "auto"}, {"k": 0.0, "max_grad_norm": 0.05}]
    for choice in choices:
        results = [train(llama(torch.bfloat16), tmp_path, **choice)[0]]
        for most in (4 << 20, 0):
            driver = Driver(most)
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "cudart", lambda driver=driver: driver)
                results.append(train(llama(torch.bfloat16), tmp_path, **choice)[0])
            assert driver.refusals and not driver.pinned
        assert_same(results)


def peak_bytes() -> int:
    """Also of what is free once streams have passed it."""
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"])


def wide(dtype: torch.dtype) -> nn.Module:
    """Layers of 28 MB of weights: planes that are pinned in several pieces."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(3000, 3000), nn.Tanh()) for _ in range(5)]).to("cuda", dtype)


def test_gradients_that_leave_are_freed_whatever_the_sender_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is free once they are copied: a thread that gets no core in the meantime costs no memory."""
    model, may_send, message = wide(torch.bfloat16), threading.Event(), RoundTrip.departed

    def send_later(*departure: Any) -> GradReady:
        assert may_send.wait(60.0)
        return message(*departure)

    monkeypatch.setattr(RoundTrip, "departed", send_later)
    batch = torch.ones(2, 3000, device="cuda", dtype=torch.bfloat16)
    with hytrain.AdamW(model, k=0.0, updates="backward", run_dir=str(tmp_path)) as opt:
        for _ in range(3):
            may_send.clear()
            model(batch).square().mean().backward()
            waiting = torch.cuda.memory_allocated()
            may_send.set()
            opt.step()
            opt.zero_grad()
            opt.synchronize()
            assert waiting - torch.cuda.memory_allocated() < 2 * 2 * 3000 * 3001, "two layers of five"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_layers_move_bit_for_bit(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in bf16 with two banks."""
    monkeypatch.setenv("HYTRAIN_REPLAN_EVERY", "1")
    banks = {"max_grad_norm": 1e9} if dtype is torch.bfloat16 else {}
    results: list[dict[str, torch.Tensor]] = []
    for options in ({"k": 1.0}, {"policy": "random"}, {"k": 0.0, "overlap": False}):
        model = wide(dtype)
        optimizer = hytrain.AdamW(model, lr=1e-3, run_dir=str(tmp_path), **options, **banks)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        for step in range(200):
            x = torch.randn(16, 3000, generator=generator).to("cuda", dtype)
            (model(x) - x.sin()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                optimizer._engine._handover.wait()
        results.append(state_of(model, optimizer))
        assert (optimizer.statistics().moved > 50) is ("policy" in options)
        optimizer.close()
    assert_same(results)


def test_gradients_that_wait_for_visits_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward waits on the device for the oldest visit, and then uses that memory again."""
    results: list[dict[str, torch.Tensor]] = []
    model = wide(torch.bfloat16)
    one = sum(parameter.nbytes for parameter in model[0].parameters())
    for hold_bytes, options in (
        (0, {"k": 1.0}),
        (1 << 30, {"visit": 1.0}),
        (2 * one, {"visit": 1.0}),
        (0, {"visit": 1.0}),
    ):
        monkeypatch.setattr(GpuMemory, "for_waiting_bytes", lambda _, hold_bytes=hold_bytes: hold_bytes)
        model = wide(torch.bfloat16)
        optimizer = hytrain.AdamW(model, lr=1e-3, run_dir=str(tmp_path), **({"k": 0.0} | options))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        most = 0
        for _ in range(30):
            x = torch.randn(4096, 3000, generator=generator).to("cuda", torch.bfloat16)
            (model(x) - x.sin()).float().square().mean().backward()
            most = max(most, optimizer._engine._visits.waiting_bytes)
            optimizer.step()
            optimizer.zero_grad()
        results.append(state_of(model, optimizer))
        assert most <= max(hold_bytes, one) and (most > 0) is ("visit" in options)
        optimizer.close()
    assert_same(results)


def test_weights_that_leave_are_looked_at_before_others_use_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the device looks: a difference is refused as a write that would be lost."""

    def weights_out(transfers: CudaTransfers, copies: Sequence[Copy]) -> Transfer:
        with torch.cuda.stream(transfers._out):
            torch.cuda._sleep(20_000_000)
        return transfers.gradients_out(copies)

    monkeypatch.setattr(CudaTransfers, "weights_out", weights_out)
    results = [train(llama(torch.bfloat16), tmp_path, k=0.0, offload_weights=share)[0] for share in (1.0, 0.0)]
    assert_same(results)


POISON = {4: float("inf"), 5: float("nan"), 20: float("-inf")}


def train_poisoned(dtype: torch.dtype, run_dir: Path, runs: list[dict[str, Any]], **common: Any) -> dict[str, Any]:
    """The state that all runs end with; the third parameter's gradient is inf or NaN in some steps."""
    results = []
    for options in runs:
        steps, model = iter(range(10**6)), llama(dtype)

        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            value = POISON.get(next(steps))  # noqa: B023
            return None if value is None else gradient.index_fill(0, torch.tensor([1], device="cuda"), value)

        list(model.parameters())[2].register_hook(hook)
        results.append(train(model, run_dir, **common, **options)[0])
    assert_same(results)
    assert all(tensor.isfinite().all() for tensor in results[0].values())
    return results[0]


@pytest.mark.parametrize("max_norm", [0.7, 3.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_clipping_gives_the_same_bits_whoever_owns_a_layer(dtype: torch.dtype, max_norm: float, tmp_path: Path) -> None:
    """Ahead of the verdict or behind it; in most steps, in some and in none."""
    ahead, behind = {"k": 0.0, "speculate": True}, {"k": 0.0, "speculate": False}
    runs: list[dict[str, Any]] = [{"k": 0.0, "overlap": False}, ahead, behind, {"k": 1.0}, {"policy": "random"}]
    runs += [{"k": 0.0, "offload_weights": 1.0}, {"k": 0.0, "visit": 1.0, "offload_weights": 1.0}]
    state = train_poisoned(dtype, tmp_path, runs, max_grad_norm=max_norm, on_nonfinite="skip")
    unclipped, _ = train(llama(dtype), tmp_path, k=0.0)
    assert not torch.equal(state["lm_head.weight"], unclipped["lm_head.weight"])


class Wide(nn.Module):
    """No block repeats, so its parameters are divided: the first into eight pieces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(1000, 3000), nn.Linear(3000, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(self.up(x).tanh()))


@pytest.mark.parametrize("limit", [1e9, None], ids=["HyTrain clips", "the loop clips"])
@pytest.mark.parametrize("k", [0.0, 0.5])
def test_the_norm_is_that_of_clip_grad_norm_(k: float, limit: float | None, tmp_path: Path) -> None:
    """The weights stay, so that the GPU computes the same gradients for both."""
    model = Wide().cuda()
    other = copy.deepcopy(model)
    optimizer = hytrain.AdamW(model, lr=0.0, weight_decay=0.0, max_grad_norm=limit, k=k, run_dir=str(tmp_path))
    assert max(len(known.places) for known in optimizer._engine._parameters) == 8
    for _ in range(20):
        x = torch.randn(64, 1000, device="cuda")
        for each in (model, other):
            each(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 1e9)
        ours = nn.utils.clip_grad_norm_(model.parameters(), 1e9) if limit is None else None
        optimizer.step()
        ours = optimizer.grad_norm if ours is None else ours
        assert ours is not None and torch.equal(ours, norm)
        other.zero_grad()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scaled_losses_give_the_same_bits_whoever_owns_a_layer(
    dtype: torch.dtype, max_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hytrain.step.scaling.GROWTH_STEPS", 6)
    runs: list[dict[str, Any]] = [{"k": 0.0, "overlap": False}, {"k": 0.0}, {"k": 1.0}, {"policy": "random"}]
    state = train_poisoned(dtype, tmp_path, runs, max_grad_norm=max_norm, loss_scale="dynamic")
    assert int(state["skipped"]) >= 3
    if dtype is torch.float16:
        halves = [name for name in state if name.endswith(".remainder")]
        assert len(halves) == len(list(llama(dtype).parameters()))


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_replayed_float16_gradients_give_torchs_gradscaler(k: float, tmp_path: Path) -> None:
    """On the CPU, over fp32 masters: weights, masters and scales, with gradients of all magnitudes that float16 has."""
    ours = Replay([(64, 48), (512,), (128, 256)]).half().cuda()
    masters = [nn.Parameter(parameter.detach().float().cpu()) for parameter in ours.weights]
    reference, scaler = torch.optim.AdamW(masters, lr=1e-2, fused=True), torch.amp.GradScaler("cpu")
    optimizer = hytrain.AdamW(ours, lr=1e-2, k=k, loss_scale="dynamic", run_dir=str(tmp_path))
    generator = torch.Generator().manual_seed(5)
    for step in range(50):
        gradients = [
            (torch.randn(master.shape, generator=generator) * 10.0 ** (step % 9 - 9)).half().cuda()
            for master in masters
        ]
        optimizer.scale(ours(gradients).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = (gradient * torch.tensor(scaler.get_scale()).half().cuda()).float().cpu()
        scaler.step(reference)
        scaler.update()
        assert float(optimizer.loss_scale) == scaler.get_scale()  # type: ignore[arg-type]
    optimizer.synchronize()
    entries = optimizer.state_dict()["state"]
    for index, (mine, master) in enumerate(zip(ours.weights, masters, strict=True)):
        assert torch.equal(entries[index]["remainder"].cpu(), master) and torch.equal(mine.cpu(), master.half())
    optimizer.close()


@pytest.mark.parametrize("options", [{"autocast": True}, {"gradient_dtype": torch.bfloat16}], ids=str)
def test_float32_parameters_with_less_than_float32_elsewhere(options: dict[str, Any], tmp_path: Path) -> None:
    assert_same([train(llama(torch.float32), tmp_path, k=k, **options)[0] for k in (0.0, 1.0)])


class Replay(nn.Module):
    """Parameters whose gradient is whatever forward is given: d(sum(p·g))/dp = g."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.weights, gradients, strict=True)]).sum()


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_replayed_gradients_give_torchs_adamw(k: float, tmp_path: Path) -> None:
    """Bit-identical to torch's fused AdamW on the CPU; its CUDA kernel differs, relative to the update, by < 1e-3."""
    shapes = [(64, 48), (512,), (128, 256)]
    models = {"hytrain": Replay(shapes).cuda(), "cpu": Replay(shapes), "cuda": Replay(shapes).cuda()}
    start = [parameter.detach().clone() for parameter in models["cpu"].weights]
    ours = hytrain.AdamW(models["hytrain"], lr=1e-2, k=k, run_dir=str(tmp_path))
    theirs = {name: torch.optim.AdamW(models[name].parameters(), lr=1e-2, fused=True) for name in ("cpu", "cuda")}
    generator = torch.Generator().manual_seed(5)
    for step in range(50):
        gradients = [torch.randn(shape, generator=generator) * 10.0 ** (step % 7 - 5) for shape in shapes]
        for name, model in models.items():
            model([gradient.to(next(model.parameters()).device) for gradient in gradients]).backward()
            optimizer = theirs.get(name, ours)
            optimizer.step()
            optimizer.zero_grad()
    ours.synchronize()
    for mine, reference, cuda, before in zip(
        models["hytrain"].weights, models["cpu"].weights, models["cuda"].weights, start, strict=True
    ):
        assert torch.equal(mine.cpu(), reference)
        update = (reference - before).detach().abs().clamp_min(1e-12)
        error = (cuda.cpu() - reference).detach().abs() / update
        assert float(error.median()) < 1e-3
    ours.close()


MOMENTUM: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True}
ROUNDED = {"state_dtype": "bfloat16", "master_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        (hytrain.SGD, torch.float32, {"lr": 0.01, "weight_decay": 0.01}),
        (hytrain.SGD, torch.float16, MOMENTUM),
        (hytrain.SGD, torch.bfloat16, {**MOMENTUM, "max_grad_norm": 0.5}),
        (hytrain.Lion, torch.bfloat16, {"lr": 1e-4, "weight_decay": 0.1, **ROUNDED}),
        (hytrain.Muon, torch.float32, {"lr": 0.01}),
        (hytrain.Muon, torch.float16, {"lr": 0.01, "max_grad_norm": 0.5}),
        (hytrain.Muon, torch.bfloat16, {"lr": 0.01, "grad_accumulation": 2}),
        (hytrain.Muon, torch.bfloat16, {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", **ROUNDED}),
    ],
    ids=["sgd-float32", "momentum-float16", "momentum-bfloat16", "lion-rounded"]
    + ["muon-float32", "muon-float16", "muon-bfloat16", "muon-rounded"],
)
def test_other_algorithms_give_the_same_bits_whoever_owns_a_layer(
    kind: Any, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    runs = {"k": 0.0}, {"k": 1.0}, {"k": 0.0, "visit": 1.0}, {"policy": "random", "offload_weights": "auto"}
    assert_same([train(llama(dtype), tmp_path, kind=kind, **options, **choice)[0] for choice in runs])


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_replayed_gradients_give_torchs_sgd(k: float, tmp_path: Path) -> None:
    """Bit-identical to torch's SGD on the CPU."""
    shapes = [(64, 48), (512,), (128, 256), (77,)]
    numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
    mine, theirs = Replay(shapes).cuda(), Replay(shapes)
    ours = hytrain.SGD(mine, k=k, run_dir=str(tmp_path), **numbers)
    reference = torch.optim.SGD(theirs.parameters(), **numbers)
    generator = torch.Generator().manual_seed(5)
    for step in range(50):
        gradients = [torch.randn(shape, generator=generator) * 10.0 ** (step % 7 - 5) for shape in shapes]
        mine([gradient.cuda() for gradient in gradients]).backward()
        theirs(gradients).backward()
        for optimizer in (ours, reference):
            optimizer.step()
            optimizer.zero_grad()
    ours.synchronize()
    for weight, expected in zip(mine.weights, theirs.weights, strict=True):
        assert torch.equal(weight.cpu(), expected)
    ours.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_accumulation_gives_the_same_bits_whoever_owns_a_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    host = {"accumulate_on": "host"}
    runs = (
        {"k": 0.0, "overlap": False},
        {"k": 0.0, **host},
        {"k": 1.0, **host},
        {"policy": "random", "offload_weights": "auto"},
    )
    assert_same([train(llama(dtype), tmp_path, grad_accumulation=3, **options)[0] for options in runs])


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_saved_and_resumed(dtype: torch.dtype, k: float, tmp_path: Path) -> None:
    """By files and by dictionaries, at another k than it was saved at."""

    def steps(model: nn.Module, optimizer: hytrain.AdamW, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            batch = torch.randint(0, 1024, (4, 64), generator=generator).cuda()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def copied(model: nn.Module, optimizer: hytrain.AdamW) -> tuple[dict[str, Any], dict[str, Any]]:
        state = optimizer.state_dict()
        entries = {i: {name: t.cpu().clone() for name, t in entry.items()} for i, entry in state["state"].items()}
        return {name: t.cpu().clone() for name, t in model.state_dict().items()}, {**state, "state": entries}

    whole = llama(dtype)
    optimizer = hytrain.AdamW(whole, lr=1e-3, k=0.3, run_dir=str(tmp_path / "whole"))
    steps(whole, optimizer, range(4))
    optimizer.save(tmp_path / "state")
    weights, saved = copied(whole, optimizer)
    steps(whole, optimizer, range(4, 8))
    expected = copied(whole, optimizer)
    optimizer.close()
    for way in ("files", "dictionary"):
        model = llama(dtype)
        optimizer = hytrain.AdamW(model, lr=1e-3, k=k, run_dir=str(tmp_path / way))
        model.load_state_dict(weights)
        if way == "files":
            optimizer.load(tmp_path / "state")
        else:
            optimizer.load_state_dict(saved)
        steps(model, optimizer, range(4, 8))
        found = copied(model, optimizer)
        optimizer.close()
        assert all(torch.equal(found[0][name], tensor) for name, tensor in expected[0].items())
        for index, entry in expected[1]["state"].items():
            assert all(torch.equal(found[1]["state"][index][name], tensor) for name, tensor in entry.items())


@pytest.mark.parametrize("has_room", [True, False])
def test_a_state_is_saved_while_training_goes_on(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a copy on the GPU, or without room for one from where it lies. What was lent is free again."""
    memory = gpu_memory(torch.device("cuda", torch.cuda.current_device()))
    if not has_room:
        monkeypatch.setattr(GpuMemory, "lend", lambda *_: None)
    model, steps = wide(torch.bfloat16), 3
    for parameter in model.parameters():
        if parameter.dim() == 2:  # files have it in another order than memory
            parameter.data = parameter.data.t().contiguous().t()
    optimizer = hytrain.AdamW(model, k=0.5, run_dir=str(tmp_path / "run"))

    def train() -> None:
        for _ in range(steps):
            model(torch.ones(2, 3000, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def planes() -> list[torch.Tensor]:
        return [t.cpu().clone() for entry in optimizer.state_dict()["state"].values() for t in entry.values()]

    train()
    expected, needed = planes(), torch.cuda.max_memory_allocated()
    saved = optimizer.async_save(tmp_path / "state")
    assert bool(memory._lent) >= (has_room and not saved.done())
    train()
    saved.result()
    assert memory._lent == 0
    assert not has_room or torch.cuda.max_memory_allocated() <= needed
    assert not all(map(torch.equal, planes(), expected))
    optimizer.load(tmp_path / "state")
    assert all(map(torch.equal, planes(), expected))
    optimizer.close()


def test_what_lies_in_another_order_than_in_the_file_is_copied_a_piece_at_a_time() -> None:
    tensor = torch.arange(4 * PIECE_BYTES // 4, device="cuda", dtype=torch.int32).view(1024, -1).t()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.cat([piece.clone() for piece in tensor_file._pieces(tensor)]).view(torch.int32)
    assert torch.cuda.max_memory_allocated() - before <= 2 * PIECE_BYTES
    assert torch.equal(found, tensor.cpu().flatten())


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_weights_that_were_written_are_trained_on(k: float, tmp_path: Path) -> None:
    model = wide(torch.bfloat16)
    optimizer = hytrain.AdamW(model, lr=0.0, weight_decay=0.0, k=k, run_dir=str(tmp_path))

    def step() -> None:
        model(torch.ones(2, 3000, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    optimizer.synchronize()
    with torch.no_grad():
        model[0][0].weight.fill_(0.5)
    optimizer.import_weights()
    step()
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    step()
    optimizer.synchronize()
    assert torch.equal(model[0][0].weight, torch.ones_like(model[0][0].weight))
    optimizer.close()


def test_a_model_that_is_not_on_the_gpu_is_brought_there_without_offloaded_weights(tmp_path: Path) -> None:
    def trained(where: str, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
        torch.manual_seed(0)
        model = (
            nn.Sequential(*[nn.Sequential(nn.Linear(3000, 3000), nn.Tanh()) for _ in range(12)]).bfloat16().to(where)
        )
        before = torch.cuda.memory_allocated()
        optimizer = hytrain.AdamW(model, lr=1e-3, run_dir=str(tmp_path / where), **options)
        for _ in range(3):
            model(torch.ones(2, 3000, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()  # no gradient waits for the link any more
        held = torch.cuda.memory_allocated() - before
        state = state_of(model, optimizer)
        optimizer.close()
        assert all(parameter.is_cuda for parameter in model.parameters())
        return state, held

    (expected, _), (found, held) = trained("cuda", k=0.0), trained("cpu", k=0.0, offload_weights=1.0, device="cuda")
    assert_same([expected, found])
    assert held < 12 * 2 * 3000 * 3000 / 2, "all weights take twice as much"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options", [{"k": 0.0, "offload_weights": 1.0}, {"k": 0.2, "visit": 0.5, "offload_weights": 0.6}], ids=str
)
def test_a_deferred_model_trains_as_one_built_at_once(options: dict[str, Any], device: str, tmp_path: Path) -> None:
    """With the values of the device for which it was built."""
    expected, _ = train(llama(torch.bfloat16, device).cuda(), tmp_path, **options)
    deferred = hytrain.deferred_init(lambda: llama(torch.bfloat16, device))
    found, _ = train(deferred, tmp_path, **options, device="cuda")
    assert_same([expected, found])


class Branches(nn.Module):
    """Two branches, the second one on a stream of its own; gradients of either come milliseconds late."""

    def __init__(self, side: torch.cuda.Stream) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(1024, 1024, device="cuda"), nn.Linear(1024, 1024, device="cuda")
        self.side = side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            far = self.far(x)
        x.record_stream(self.side)
        current.wait_stream(self.side)
        far.record_stream(current)
        near = self.near(x)
        for branch in (far, near):
            branch.register_hook(lambda _: torch.cuda._sleep(10_000_000))
        return x + (near + far).tanh()


def assert_streams_agree(build: Callable[[torch.cuda.Stream], nn.Module], x: torch.Tensor, k: float, run: Path) -> None:
    """The same operations in the same order on one stream: autograd adds up a tensor's gradients in that order."""
    results = []
    for side in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.manual_seed(0)
        model = build(side)
        optimizer = hytrain.AdamW(model, lr=1e-3, k=k, run_dir=str(run / str(len(results))))
        losses = []
        for number in range(10):
            torch.manual_seed(number)
            loss = model(torch.randn_like(x)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        results.append({**state_of(model, optimizer), "losses": torch.stack(losses).cpu()})
        optimizer.close()
    assert_same(results)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_gradients_of_two_streams(k: float, tmp_path: Path) -> None:
    x = torch.empty(4096, 1024, device="cuda")
    assert_streams_agree(lambda side: nn.Sequential(*(Branches(side) for _ in range(4))), x, k, tmp_path)


class Twice(nn.Module):
    """A layer that is called twice, the second time on a stream that has waited for nothing but the forward's begin.

    Without gradients there: autograd warns of a parameter that is used on two streams.
    """

    def __init__(self, side: torch.cuda.Stream) -> None:
        super().__init__()
        self.block = nn.Linear(8192, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
        self.side = side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        near = self.block(x)
        with torch.cuda.stream(self.side), torch.no_grad():
            far = self.block(-x)
        x.record_stream(self.side)
        current.wait_stream(self.side)
        far.record_stream(current)
        return near + far.sigmoid()


def test_a_layer_that_is_called_on_two_streams(tmp_path: Path) -> None:
    assert_streams_agree(Twice, torch.empty(64, 8192, device="cuda", dtype=torch.bfloat16), 0.0, tmp_path)


def recomputing(dtype: torch.dtype) -> nn.Module:
    model: Any = llama(dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("late", [0, 5_000_000], ids=["in time", "late"])
def test_activations_in_host_memory_change_no_bit(
    late: int, checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late their copies are, both ways."""
    out, back = CudaTransfers.activations_out, CudaTransfers.activations_in

    def leave(transfers: CudaTransfers, copies: Sequence[Copy]) -> Transfer:
        with torch.cuda.stream(transfers._saving):
            torch.cuda._sleep(late)
        return out(transfers, copies)

    def come(transfers: CudaTransfers, copies: Sequence[Copy], *others: Any, **more: Any) -> Transfer:
        with torch.cuda.stream(transfers._restoring):
            torch.cuda._sleep(late)
        return back(transfers, copies, *others, **more)

    monkeypatch.setattr(CudaTransfers, "activations_out", leave)
    monkeypatch.setattr(CudaTransfers, "activations_in", come)
    monkeypatch.setattr(activations, "MIN_BYTES", 1 << 12)
    monkeypatch.setattr(activations, "WINDOW_BYTES", 1 << 20)
    make = recomputing if checkpointed else llama
    runs: list[dict[str, Any]] = [{"k": 0.0}, {"k": 1.0}, {"k": 0.0, "visit": 1.0, "offload_weights": 1.0}]
    runs += [{"policy": "random", "offload_weights": "auto"}, {"k": 0.5, "grad_accumulation": 2}]
    for options in runs:
        found = [train(make(torch.bfloat16), tmp_path, **options, **more)[0] for more in ({}, OFFLOADED)]
        assert_same(found)


class Deep(nn.Module):
    """Blocks whose inputs are all that is kept of them: 32 MiB each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks).to("cuda", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_activations_leave_the_gpu(tmp_path: Path) -> None:
    """Also while the device is late: the host is then blocks ahead of it. Later steps take no more than the first."""
    depth, each, results, peaks = 40, 32 << 20, list[Any](), list[int]()
    for options in ({}, OFFLOADED):
        model = Deep(depth)
        optimizer = hytrain.AdamW(model, lr=1e-3, k=0.0, run_dir=str(tmp_path), **options)
        x, of_steps = torch.ones(16384, 1024, device="cuda", dtype=torch.bfloat16), []
        for _ in range(4):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda._sleep(100_000_000)
            model(x).float().square().mean().backward()
            of_steps.append(peak_bytes() - before)
            optimizer.step()
            optimizer.zero_grad()
        results.append(state_of(model, optimizer))
        peaks.append(max(of_steps))
        optimizer.close()
    assert_same(results)
    assert peaks[0] > (depth - 2) * each, "all inputs"
    assert peaks[1] < peaks[0] - (depth - 2) * each + activations.WINDOW_BYTES + 6 * each
