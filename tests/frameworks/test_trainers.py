"""Trainers' own smallest examples, with one line changed, for 50 steps: the bits of torch's optimizers.

`make test-frameworks` installs the trainers, and runs this. An example gets `optim`, the module in which the line that
differs finds its class, and returns what was trained. docs/trainers.md has the same rows.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from helpers import differing, weights
from small_models import VOCAB, gpt2, llama
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import hytrain
from hytrain.optim import Optimizer

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, LR = 50, 4, 1e-2

Example = Callable[[Any, Path], nn.Module]
#: By the trainer's name in docs/trainers.md: when updates begin with `updates="auto"`, and the example.
EXAMPLES: dict[str, tuple[str, Example]] = {}


def example(name: str, timing: str) -> Callable[[Example], Example]:
    def add(run: Example) -> Example:
        EXAMPLES[name] = (timing, run)
        return run

    return add


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def text(number: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(number))


def lines() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in text(0, STEPS * BATCH, 16)]


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def classified(rows: int = STEPS * BATCH) -> TensorDataset:
    return TensorDataset(noise(0, rows, 32), torch.arange(rows) % 10)


def arguments(folder: Path, **others: Any) -> dict[str, Any]:
    """Of transformers.TrainingArguments and its subclasses."""
    return {
        **{"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": LR},
        **{"warmup_steps": 5, "use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"},
        **{"dataloader_pin_memory": False, "logging_steps": 10},
        **others,
    }


def byte_tokenizer() -> Any:
    """One token per byte, of any text; its chat template marks what the assistant says."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    template = "{% for message in messages %}{{ message.role[0] + ':' + message.content + eos_token }}{% endfor %}"
    ends = {"eos_token": alphabet[0], "pad_token": alphabet[1]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)


def dialogue(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]


@example("transformers.Trainer", "step")
def transformers_trainer(optim: Any, folder: Path) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    model = gpt2()
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(folder)),
        train_dataset=lines(),
        optimizer_cls_and_kwargs=(optim.AdamW, {"lr": LR}),
    )
    trainer.train()
    return model


@example("Accelerate", "step")
def accelerate_loop(optim: Any, folder: Path) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt2()
    optimizer = optim.AdamW(model.parameters(), lr=LR)
    scheduler = LambdaLR(optimizer, lambda step: 0.98**step)
    loader = DataLoader(lines() + lines(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@example("Lightning Trainer", "backward")
def lightning_trainer(optim: Any, folder: Path) -> nn.Module:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optim.AdamW(self.parameters(), lr=LR)

    net = Net()
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=STEPS, logger=False, enable_progress_bar=False
    )
    trainer.fit(net, DataLoader(classified(), batch_size=BATCH))
    return net


@example("Lightning Fabric", "step")
def fabric(optim: Any, folder: Path) -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu")
    model = classifier()
    optimizer = optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = fabric.setup(model, optimizer)
    for x, y in fabric.setup_dataloaders(DataLoader(classified(), batch_size=BATCH)):
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.module


@example("TRL SFTTrainer", "step")
def trl_sft(optim: Any, folder: Path) -> nn.Module:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = llama()
    rows = Dataset.from_list([{"messages": dialogue(a, b)} for a in range(10) for b in range(20)])
    trainer = SFTTrainer(
        model,
        SFTConfig(**arguments(folder, max_length=32)),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
        optimizer_cls_and_kwargs=(optim.AdamW, {"lr": LR}),
    )
    trainer.train()
    return model


@example("TRL DPOTrainer", "step")
def trl_dpo(optim: Any, folder: Path) -> nn.Module:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = llama()
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b)} for a in range(10) for b in range(20)]
    trainer = DPOTrainer(
        model,
        ref_model=llama(),
        args=DPOConfig(**arguments(folder, max_length=32)),
        train_dataset=Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
        optimizers=(optim.AdamW(model.parameters(), lr=LR), None),
    )
    trainer.train()
    return model


@example("PEFT", "step")
def peft(optim: Any, folder: Path) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(folder)),
        train_dataset=lines(),
        optimizer_cls_and_kwargs=(optim.AdamW, {"lr": LR}),
    )
    trainer.train()
    return model


@example("Sentence Transformers", "step")
def sentence_transformers(optim: Any, folder: Path) -> nn.Module:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder / "bert")
    byte_tokenizer().save_pretrained(folder / "bert")
    words = Transformer(str(folder / "bert"), max_seq_length=32)
    model = SentenceTransformer(modules=[words, Pooling(32)], device="cpu")
    rows = [{"anchor": f"{a} and {b}", "positive": f"{b} and {a}"} for a in range(10) for b in range(20)]
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(**arguments(folder)),
        train_dataset=Dataset.from_list(rows),
        loss=MultipleNegativesRankingLoss(model),
        optimizer_cls_and_kwargs=(optim.AdamW, {"lr": LR}),
    )
    trainer.train()
    return model


@example("LightningCLI", "backward")
def lightning_cli(optim: Any, folder: Path) -> nn.Module:
    from lightning.pytorch.cli import LightningCLI
    from lightning_module import Data, Net

    command = LightningCLI(
        Net,
        Data,
        save_config_callback=None,
        args=[
            "fit",
            *(f"--optimizer.class_path={optim.__name__}.AdamW", f"--optimizer.init_args.lr={LR}"),
            *(f"--trainer.max_steps={STEPS}", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}"),
            *("--trainer.logger=false", "--trainer.enable_progress_bar=false"),
        ],
    )
    return command.model


@example("timm", "step")
def timm(optim: Any, folder: Path) -> nn.Module:
    """As its train.py: `--opt`, a schedule per update, clipping through its scaler, an EMA."""
    from timm import create_model
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    default_registry.register(OptimInfo("ouradamw", f"{optim.__name__}.AdamW", has_betas=True))
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="ouradamw", lr=LR, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=5, warmup_epochs=1, updates_per_epoch=10)
    ema = ModelEmaV3(model, decay=0.99)
    for step in range(STEPS):
        x, y = noise(step, BATCH, 3, 32, 32), torch.arange(BATCH)
        nn.functional.cross_entropy(model(x), y).backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        ema.update(model, step=step)
        optimizer.zero_grad()
        scheduler.step_update(num_updates=step + 1)
    return nn.ModuleList([model, ema])


@example("torchvision references", "backward")
def torchvision(optim: Any, folder: Path) -> nn.Module:
    """As its references/classification: SGD, a rate that warms up, an average of the model."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    warm, rest = LinearLR(optimizer, start_factor=0.01, total_iters=5), CosineAnnealingLR(optimizer, T_max=45)
    scheduler = SequentialLR(optimizer, schedulers=[warm, rest], milestones=[5])
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.99), use_buffers=True)
    for step in range(STEPS):
        output = model(noise(step, BATCH, 3, 32, 32))
        loss = nn.functional.cross_entropy(output, torch.arange(BATCH), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        scheduler.step()
    return nn.ModuleList([model, average])


@example("diffusers", "step")
def diffusers(optim: Any, folder: Path) -> nn.Module:
    """As its examples/unconditional_image_generation."""
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
    )
    ema = EMAModel(model.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=model.config)
    schedule = DDPMScheduler(num_train_timesteps=100)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
    rate = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=5, num_training_steps=STEPS)
    images = DataLoader(TensorDataset(noise(0, STEPS * BATCH, 3, 16, 16)), batch_size=BATCH)
    model, optimizer, images, rate = accelerator.prepare(model, optimizer, images, rate)
    for step, [clean] in enumerate(images):
        added = noise(100 + step, *clean.shape)
        times = torch.arange(BATCH) + step
        with accelerator.accumulate(model):
            found = model(schedule.add_noise(clean, added, times), times).sample
            accelerator.backward(nn.functional.mse_loss(found, added))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
    ema.copy_to(model.parameters())
    return model


@example("litgpt", "step")
def litgpt(optim: Any, folder: Path) -> nn.Module:
    """`litgpt pretrain --optimizer.class_path=…`, with torch.compile around the whole model."""
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule

    class Text(DataModule):
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = 0, **others: Any) -> None:
            self.rows = text(0, 2 * STEPS * BATCH, max_seq_length + 1)

        def train_dataloader(self) -> Any:
            return DataLoader(self.rows, batch_size=BATCH)

        def val_dataloader(self) -> Any:
            return DataLoader(self.rows[: 2 * BATCH], batch_size=BATCH)

    trained, setup = [], pretrain.L.Fabric.setup

    def kept(fabric: Any, model: nn.Module, *others: Any) -> Any:
        trained.append(model)
        return setup(fabric, model, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.L.Fabric, "setup", kept)
        patch.setattr(sys, "argv", ["litgpt", "pretrain", "pythia-14m"])  # which it saves beside the weights
        pretrain.setup(
            "pythia-14m",
            Config(block_size=16, n_layer=2, n_embd=32, n_head=4, padded_vocab_size=VOCAB, intermediate_size=64),
            out_dir=folder,
            precision="32-true",
            data=Text(),
            train=TrainArgs(
                save_interval=None,
                log_interval=10,
                global_batch_size=2 * BATCH,
                micro_batch_size=BATCH,
                max_tokens=2 * STEPS * BATCH * 16,
                max_norm=1.0,
                min_lr=1e-4,
                lr_warmup_steps=5,
            ),
            eval=EvalArgs(interval=20, max_iters=2),
            optimizer={"class_path": f"{optim.__name__}.AdamW", "init_args": {"lr": LR, "weight_decay": 0.1}},
            devices=1,
            logger_name="csv",
        )
    return trained[0]


@example("torchtitan", "step")
def torchtitan(optim: Any, folder: Path, *, resumes: bool = False) -> nn.Module:
    """Its optimizers, its rates and its clipping, in its Trainer's order; the Trainer itself needs a GPU.

    If it `resumes`, the second half of the steps is made by others, which load the state of the first.
    """
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.utils import clip_grad_norm_

    class Optimizers(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):  # with the inherited one, `build` makes an OptimizersContainer
            pass

        _resolve_optimizer_factory = staticmethod(lambda name: getattr(optim, name))

    model = llama()
    groups = [
        ParamGroupConfig(pattern=r".*norm.*", optimizer_name="AdamW", optimizer_kwargs={"lr": LR, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": LR, "weight_decay": 0.1}),
    ]

    def made() -> tuple[Any, Any]:
        optimizers = Optimizers.Config(param_groups=groups).build(model_parts=[model])
        rates = LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=optimizers, training_steps=STEPS)
        return optimizers, rates

    optimizers, rates = made()
    for step in range(STEPS):
        optimizers.zero_grad()
        if resumes and step == STEPS // 2:
            saved, rate = copy.deepcopy(optimizers.state_dict()), copy.deepcopy(rates.state_dict())
            assert any(key.endswith("exp_avg") for key in saved), "or nothing would be resumed"
            optimizers, rates = made()
            optimizers.load_state_dict(saved)
            rates.load_state_dict(rate)
        rows = text(step, BATCH, 16)
        model(input_ids=rows, labels=rows).loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        rates.step()
    return model


@example("NeMo Automodel", "step")
def nemo_automodel(optim: Any, folder: Path) -> nn.Module:
    """The section `optimizer` of its YAML, and its recipe's order."""
    from nemo_automodel.components.optim import build_optimizer
    from nemo_automodel.components.training.utils import clip_grad_norm

    model = llama()
    [optimizer] = build_optimizer(model, (f"{optim.__name__}.AdamW", {"lr": LR, "weight_decay": 0.1}))
    for step in range(STEPS):
        rows = text(step, BATCH, 16)
        model(input_ids=rows, labels=rows).loss.backward()
        clip_grad_norm(1.0, [model])
        optimizer.step()
        optimizer.zero_grad()
    return model


@example("Ignite", "backward")
def ignite(optim: Any, folder: Path) -> nn.Module:
    from ignite.engine import create_supervised_trainer

    model = classifier()
    optimizer = optim.AdamW(model.parameters(), lr=LR)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    trainer.run(DataLoader(classified(), batch_size=BATCH), max_epochs=1)
    return model


@example("skorch", "backward")
def skorch(optim: Any, folder: Path) -> nn.Module:
    from skorch import NeuralNetClassifier

    model = classifier()
    net = NeuralNetClassifier(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=optim.AdamW,
        lr=LR,
        batch_size=BATCH,
        max_epochs=1,
        train_split=None,
        verbose=0,
    )
    data = classified()
    net.fit(data.tensors[0].numpy(), data.tensors[1].numpy())
    return net.module_


@example("Stable-Baselines3", "step")
def stable_baselines3(optim: Any, folder: Path) -> nn.Module:
    from stable_baselines3 import PPO

    agent = PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=100,
        batch_size=20,
        n_epochs=5,
        seed=0,
        device="cpu",
        policy_kwargs={"optimizer_class": optim.Adam},
    )
    agent.learn(200)
    return agent.policy


# ---------------------------------------------------------------- the test


class Run:
    """What one run has left: how many steps it has made, how many of them were HyTrain's, and the weights."""

    def __init__(self, example: Example, optim: Any, folder: Path) -> None:
        self.steps, self._made = 0, dict[int, torch.optim.Optimizer]()
        torch.manual_seed(0)
        counted = register_optimizer_step_post_hook(self._count)
        try:
            model = example(optim, folder)
        finally:
            counted.remove()
        ours = [opt for opt in self._made.values() if isinstance(opt, Optimizer)]
        self.updated = sum(opt.statistics().step for opt in ours)
        for opt in ours:
            opt.close()
        self.weights = weights(model)

    def _count(self, opt: torch.optim.Optimizer, *args: Any) -> None:
        if type(opt).__module__.partition(".")[0] in ("reference", "hytrain"):  # not a wrapper
            self.steps += 1
            self._made[id(opt)] = opt


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Some trainers' settings outlive them."""
    yield
    for name, states in {"accelerate.state": ("AcceleratorState", "GradientState", "PartialState")}.items():
        for state in states if name in sys.modules else ():
            getattr(sys.modules[name], state)._reset_state()


@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")  # those of trainers
@pytest.mark.usefixtures("torchvision_beside_a_torch_for_cpus")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bits_of_torchs_optimizer(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timing, run = EXAMPLES[name]
    expected = Run(run, reference, tmp_path / "torch")
    with caplog.at_level(logging.INFO, "hytrain.step.timing"):
        got = Run(run, hytrain, tmp_path / "hytrain")
    assert (expected.steps, expected.updated) == (STEPS, 0)
    assert (got.steps, got.updated) == (STEPS, STEPS)
    assert differing(got.weights, expected.weights) == []
    said = [record.getMessage() for record in caplog.records if record.name == "hytrain.step.timing"]
    assert {when for line in said for when in re.findall(r"updates begin in (\w+)", line)} == {timing}


@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")  # torch's, of schedulers that are made anew
@pytest.mark.usefixtures("torchvision_beside_a_torch_for_cpus")
def test_torchtitan_resumes(tmp_path: Path) -> None:
    expected, got = (Run(partial(torchtitan, resumes=True), optim, tmp_path) for optim in (reference, hytrain))
    straight = Run(torchtitan, reference, tmp_path)
    assert differing(got.weights, expected.weights) == differing(expected.weights, straight.weights) == []


def test_the_page_has_the_same_rows() -> None:
    """With the versions that `make test-frameworks` installs."""
    pinned = set()
    for file in ("constraints.txt", "tests/frameworks/requirements.txt"):
        pinned |= {line.strip() for line in (ROOT / file).read_text().splitlines() if "==" in line}
    page = (ROOT / "docs/trainers.md").read_text(encoding="utf-8").partition("## Not in the test")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert {row[0]: row[-1] for row in rows} == {name: timing for name, (timing, _) in EXAMPLES.items()}
    assert {row[1].replace(" ", "==") for row in rows} <= pinned
