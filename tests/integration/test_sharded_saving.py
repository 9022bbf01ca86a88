"""Saved on four ranks, loaded on two and on one, under another mesh and under plain FSDP2 with torch's AdamW, and back.

Every way gives the same bits, right after loading and after more steps.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import LR, adamw, differing
from ranks import RankGroup
from sharded_models import Decoder, for_this_rank, fused, next_token_loss
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hytrain
from hytrain.errors import ConfigError, SavingError
from hytrain.memory.capacity import GpuMemory, Room
from hytrain.state import manifest, shards

#: By rank.
K = {"k": (0.0, 1.0, 0.5, 0.0)}


class InPieces(nn.Module):
    """No blocks: it is cut by size, through its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Embedding(67, 96), nn.Linear(96, 67, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(tokens).tanh())
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks, float32": Decoder,
    "pieces, bfloat16": lambda: InPieces().to(torch.bfloat16),
    "pieces, float8 moments": lambda: InPieces().to(torch.bfloat16),
}


def precision(name: str) -> dict[str, Any]:
    return {"state_dtype": "float8"} if "float8" in name else {}


def sharded(name: str, *shape: int) -> nn.Module:
    """Over a mesh of this shape; with two numbers, replicas first. On the GPUs if the ranks have some."""
    device = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    model = MODELS[name]().to(device)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        next_token_loss(model, step, None if dist.is_initialized() else 0).backward()
        opt.step()
        opt.zero_grad()


def whole(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and state of all ranks together. Remainders are int32 in DTensors."""
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    order = [names[id(p)] for group in opt.param_groups for p in group["params"]]
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in named.items()}
    for number, entry in opt.state_dict()["state"].items():
        found |= {f"{order[number]}.{plane}": value for plane, value in entry.items()}
    values = {n: value.full_tensor() if isinstance(value, DTensor) else value.clone() for n, value in found.items()}
    return {n: (value.int() if value.dtype is torch.int16 else value).cpu() for n, value in values.items()}


def in_whole_arrays(opt: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state as one rank would have it."""
    saved = opt.state_dict()
    whole = lambda value: value.full_tensor() if isinstance(value, DTensor) else value  # noqa: E731
    return saved | {"state": {n: {p: whole(v) for p, v in entry.items()} for n, entry in saved["state"].items()}}


def dcp_save(model: nn.Module, opt: torch.optim.Optimizer, folder: Path, **options: bool) -> None:
    weights, state = get_state_dict(model, opt, options=StateDictOptions(**options))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def dcp_load(model: nn.Module, opt: torch.optim.Optimizer, folder: Path, **options: bool) -> None:
    weights, state = get_state_dict(model, opt, options=StateDictOptions(**options))
    if not isinstance(opt, hytrain.AdamW):
        assert not any("remainder" in entry for entry in state["state"].values()), "torch's AdamW does not have it"
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state, options=StateDictOptions(**options))


# ---------------------------------------------------------------- in the ranks


class Late(DefaultSavePlanner):
    """Saves after an event."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def create_local_plan(self) -> SavePlan:
        self._event.wait()
        return super().create_local_plan()


def save_all(name: str, shape: tuple[int, ...], folder: Path) -> dict[str, Tensor]:
    """Train, save in every way, and train on. What is saved asynchronously is the state before that, too."""
    model = sharded(name, *shape)
    with adamw(model, **for_this_rank(K), **precision(name)) as opt:
        train(model, opt, range(3))
        saved = whole(model, opt)
        saving = []
        for way, ranks in (("own", {0}), ("copied", {0, 1, 2, 3})):  # which have memory for a copy
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    GpuMemory, "room", lambda _, ranks=ranks: Room(1 << 40, 0) if dist.get_rank() in ranks else None
                )
                saving.append(opt.async_save(folder / way))
        dcp_save(model, opt, folder / "sharded")
        dcp_save(model, opt, folder / "full", full_state_dict=True)
        weights, state = get_state_dict(model, opt)
        tree, has_trained = {"model": weights, "optimizer": state}, threading.Event()
        saving += [
            dcp.async_save(tree, planner=Late(has_trained), process_group=dist.new_group(), **where)
            for where in (
                {"checkpoint_id": folder / "async"},
                {"storage_writer": FileSystemWriter(folder / "staged by the writer")},
            )
        ]
        train(model, opt, range(3, 5))
        has_trained.set()
        for each in saving:
            each.result()  # type: ignore[union-attr]
        assert differing(whole(model, opt), saved) != []
    return saved


def load_all(name: str, shape: tuple[int, ...], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state that every way loads, and the one two steps later."""
    model, loaded = sharded(name, *shape), list[dict[str, Tensor]]()
    arrays = dict[str, Any]()
    with adamw(model, lr=0.5, **for_this_rank(K), **precision(name)) as opt:
        for way in ("sharded", "full", "async", "staged by the writer", "own", "copied", "a dictionary"):
            if way in ("own", "copied", "a dictionary"):
                opt.load_state_dict(arrays) if way == "a dictionary" else opt.load(folder / way)
                weights = model.state_dict()
                dcp.load({"model": weights}, checkpoint_id=folder / "sharded")
                model.load_state_dict(weights)
            else:
                dcp_load(model, opt, folder / way, **({"full_state_dict": True} if way == "full" else {}))
            assert opt.param_groups[0]["lr"] == LR
            loaded.append(whole(model, opt))
            arrays = in_whole_arrays(opt)
            if unequal := differing(loaded[-1], loaded[0]):
                raise AssertionError(f"{way}: {unequal}")
            train(model, opt, range(3, 5))
        return loaded[0], whole(model, opt)


def load_under_torch(shape: tuple[int, ...], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = sharded("blocks, float32", *shape)
    opt = fused(model)
    dcp_load(model, opt, folder / "sharded")
    loaded = whole(model, opt)
    train(model, opt, range(3, 5))
    dcp_save(model, opt, folder / "torch")
    return loaded, whole(model, opt)


def load_from_torch(shape: tuple[int, ...], folder: Path) -> dict[str, Tensor]:
    model = sharded("blocks, float32", *shape)
    with adamw(model, lr=0.5, **for_this_rank(K)) as opt:
        dcp_load(model, opt, folder / "torch")
        return whole(model, opt)


# ---------------------------------------------------------------- and outside


@pytest.mark.parametrize("name", MODELS)
def test_saved_on_four_and_loaded_on_two_and_one(
    name: str, four_ranks: RankGroup, two_ranks: RankGroup, tmp_path: Path
) -> None:
    saved, *_ = four_ranks.run(save_all, name, (2, 2) if "bfloat16" in name else (4,), tmp_path)  # with replicas, too
    (loaded, trained), *_ = two_ranks.run(load_all, name, (2,), tmp_path)
    assert differing(loaded, saved) == []
    if "float32" in name:
        (loaded, trained_by_torch), *_ = two_ranks.run(load_under_torch, (2,), tmp_path)
        assert differing(loaded, saved) == [] and differing(trained_by_torch, trained) == []
        assert differing(four_ranks.run(load_from_torch, (2, 2), tmp_path)[0], trained) == []
    model = MODELS[name]()
    model.load_state_dict({name: value for name, value in saved.items() if name in dict(model.named_parameters())})
    with adamw(model, k=0.5, **precision(name)) as opt:
        opt.load(tmp_path / "own")
        assert differing(whole(model, opt), saved) == []


@pytest.mark.slow
def test_saved_on_eight_and_loaded_on_four(eight_ranks: RankGroup, four_ranks: RankGroup, tmp_path: Path) -> None:
    name = next(iter(MODELS))
    saved, *_ = eight_ranks.run(save_all, name, (8,), tmp_path)
    (loaded, _), *_ = four_ranks.run(load_all, name, (4,), tmp_path)
    assert differing(loaded, saved) == []


def export(folder: Path) -> None:
    """As in a recipe: new weights of seed 0, over two ranks."""
    from transformers import AutoConfig

    from hytrain.recipe import checkpoint, config, model
    from hytrain.recipe.parallel import Job
    from hytrain.run.ranks import Ranks

    names = ("data_replicate", "data_shard", "context", "tensor")
    job = Job(Ranks.of_job(), init_device_mesh("cpu", (1, 2, 1, 1), mesh_dim_names=names))
    torch.manual_seed(0)
    source = config.Model(config={"model_type": "llama"}, dtype="bfloat16")
    made = model.build_sharded(source, AutoConfig.for_model("llama", **LLAMA), torch.device("cpu"), job.mesh, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "MAX_FILE_BYTES", 40_000)
        checkpoint.export(made, folder, job)


#: With tied weights.
LLAMA = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def test_weights_are_exported_from_shards(two_ranks: RankGroup, tmp_path: Path) -> None:
    """In several files, of which each rank writes some; they are those of one rank with the same seed."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    two_ranks.run(export, tmp_path)
    torch.manual_seed(0)
    expected = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16)
    found, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert found.config.architectures == ["LlamaForCausalLM"] and found.dtype is torch.bfloat16
    assert differing(dict(found.named_parameters()), dict(expected.named_parameters())) == []
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded_on_two_gpus(name: str, tmp_path: Path, two_gpus: RankGroup) -> None:
    """State that is in host memory has a mesh of GPUs."""
    saved, *_ = two_gpus.run(save_all, name, (2,), tmp_path)
    assert differing(two_gpus.run(load_all, name, (2,), tmp_path)[0][0], saved) == []


# ---------------------------------------------------------------- refused, on every rank


def flip_a_bit(slot: Path) -> None:
    file = sorted(slot.glob("shard-00002-*"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def lose_a_file(slot: Path) -> None:
    sorted(slot.glob("shard-00002-*"))[0].unlink()


def lose_the_first_rows(slot: Path) -> None:
    sorted(slot.glob("shard-00001-*"))[0].unlink()
    manifest.seal(slot.parent, slot.iterdir())


def lack_a_parameter(slot: Path) -> None:
    index = json.loads((slot / "index.json").read_text())
    del index["step_of"]["norm.weight"]
    (slot / "index.json").write_text(json.dumps(index))
    manifest.seal(slot.parent, slot.iterdir())


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip_a_bit, "shard-00002-.* is damaged"),
    (lose_a_file, "shard-00002-.* is missing"),
    (lose_the_first_rows, "is missing or of another shape"),
    (lack_a_parameter, "of another model, or norm.weight"),
]


def said(act: Callable[[], object]) -> tuple[type, str]:
    """The error. The ranks are still together afterwards."""
    found: tuple[type, str] = (type(None), "")
    try:
        act()
    except Exception as error:
        found = type(error), str(error)
    dist.barrier()
    return found


def try_all(folder: Path) -> list[tuple[type, str]]:
    """What is said of each damage, then of a folder that one rank does not see, and of a disk that is full on one."""
    model, rank, errors = sharded("blocks, float32", 2), dist.get_rank(), []
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2))
        opt.save(folder / "whole")
        before = whole(model, opt)
        for damage, _ in DAMAGES:
            if rank == 0:
                shutil.rmtree(folder / "damaged", ignore_errors=True)
                shutil.copytree(folder / "whole", folder / "damaged")
                damage(*(folder / "damaged").glob("state-*"))
            dist.barrier()
            errors.append(said(lambda: opt.load(folder / "damaged")))
        errors.append(said(lambda: opt.load(folder / ("whole", "nothing")[rank])))
        assert differing(whole(model, opt), before) == []
        train(model, opt, range(2, 4))
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(shards, "write", fail)
            errors.append(said(lambda: opt.save(folder / "whole")))
        opt.load(folder / "whole")
        assert opt.state_dict()["state"][0]["step"] == 2, "the old state is still there"
    return errors


def fail(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_refused_on_every_rank(two_ranks: RankGroup, tmp_path: Path) -> None:
    errors = [*zip(*two_ranks.run(try_all, tmp_path), strict=True)]
    sentences = [*(sentence for _, sentence in DAMAGES), "there is no folder .*nothing"]
    for by_rank, sentence in zip(errors, sentences, strict=False):
        assert [(kind, bool(re.search(sentence, text))) for kind, text in by_rank] == [(ConfigError, True)] * 2, by_rank
    for (kind, text), whose in zip(errors[-1], ("rank 1: ", ""), strict=True):
        said = f"{whose}{tmp_path}/whole could not be written: no space left. What was saved before is whole"
        assert (kind, text) == (SavingError, said)
