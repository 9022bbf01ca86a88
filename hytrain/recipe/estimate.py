"""What a recipe will need, before anything is started: memory by plane, process and placement, and FLOPs by step.

The launcher prints it for `--dry-run`. The model is counted on the meta device, so a large one is as quick
as a small one.

Bytes per parameter           owned by the CPU                          owned by the GPU
    bf16 model    host 14 = 2 grads + 2 weights + 2 remainder + 8    GPU 2 weights + 10
    fp16 model    host 16 = 2 grads + 2 weights + 4 remainder + 8    GPU 2 weights + 12
    fp32 model    host 16 = 4 grads + 4 weights + 8                  GPU 4 weights + 8
With either placement the weights also lie on the GPU, once. Updates that may have to be undone take a second bank of
all that they write, 12 bytes more in host memory; without room for it they wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hytrain.memory.host import available_bytes
from hytrain.recipe import model as models
from hytrain.recipe import tokenizer
from hytrain.recipe.config import Recipe
from hytrain.recipe.report import table

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Plane:
    """Bytes per trainable parameter of one kind of array, by placement, and who maps it in host memory."""

    name: str
    host_if_cpu: int
    trainer_if_cpu: int
    trainer_if_gpu: int
    mapped_by: str


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes at one k: planes of the optimizer alone, planes shared with the trainer, the trainer's device."""

    k: float
    optimizer: int
    shared: int
    trainer: int

    @property
    def host(self) -> int:
        return self.optimizer + self.shared


@dataclass(frozen=True, slots=True)
class Estimate:
    """The whole answer. `device` is where the trainer computes: "GPU", even if none is here, or "CPU"."""

    device: str
    trainable: int
    frozen: int
    planes: tuple[Plane, ...]
    needs: tuple[Need, ...]
    free_host: int
    free_device: int | None
    flops_per_step: float
    peak_tflops: float | None

    def render(self) -> str:
        """Two tables and what they leave out, as plain text."""
        trainer = f"trainer ({self.device})"
        lines = [
            f"{self.trainable:,} trainable parameters" + (f", {self.frozen:,} frozen" if self.frozen else ""),
            "",
            table(
                (
                    "plane",
                    "host, CPU-owned",
                    f"{trainer}, CPU-owned",
                    f"{trainer}, GPU-owned",
                    "host copy in",
                ),
                [self._plane_row(plane) for plane in self.planes],
            ),
            "(bytes per parameter)",
            "",
            table(
                ("k", "optimizer", "shared planes", "host planes", trainer),
                [
                    (f"{n.k:g}", *map(gib, (n.optimizer, n.shared, n.host, n.trainer)))
                    for n in sorted(self.needs, key=lambda n: n.k)
                ],
            ),
            f"Free now: host {gib(self.free_host)}{self._free_device()}.",
            "Activations, gradients in flight and the libraries themselves come on top.",
            "",
            f"{self.flops_per_step / 1e12:,.3f} TFLOP a step" + self._floor(),
        ]
        return "\n".join(lines)

    def _plane_row(self, plane: Plane) -> tuple[str, ...]:
        numbers = (plane.host_if_cpu, plane.trainer_if_cpu, plane.trainer_if_gpu)
        return (plane.name, *(str(n or "-") for n in numbers), plane.mapped_by)

    def _free_device(self) -> str:
        if self.device == "CPU":
            return ", the trainer's part included"
        return ", no GPU in this machine" if self.free_device is None else f", GPU {gib(self.free_device)}"

    def _floor(self) -> str:
        if self.peak_tflops is None:
            return "."
        seconds = self.flops_per_step / (self.peak_tflops * 1e12)
        return f", no faster than {seconds:.3f} s at the GPU's peak of {self.peak_tflops:g} TFLOP/s."


def estimate(recipe: Recipe) -> Estimate:
    """Counts what the recipe needs. A GPU that it asks for need not be here.

    Raises ConfigError for a model that can't be made.
    """
    length = recipe.data.sequence_length
    hf = models.configuration(recipe.model, _vocab_size(recipe), length)
    model = models.skeleton(hf, recipe.model.dtype)
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trainable
    wanted, k = recipe.optimizer, recipe.optimizer.k
    speculates = wanted.speculate if wanted.speculate is not None else wanted.objective != "host-memory"
    second_bank = speculates and recipe.train.max_grad_norm is not None and recipe.train.loss_scale is None
    planes = planes_of(recipe.model.dtype, wanted.gradient_dtype, second_bank=second_bank)
    here = torch.cuda.is_available()
    wants_gpu = recipe.train.device == "cuda" or (here and recipe.train.device == "auto")
    device = torch.device("cuda" if here and wants_gpu else "cpu")
    tokens = recipe.data.batch_size * length
    return Estimate(
        device="GPU" if wants_gpu else "CPU",
        trainable=trainable,
        frozen=frozen,
        planes=planes,
        needs=tuple(
            need(planes, trainable, frozen, share) for share in {0.0, 1.0} | (set() if k == "auto" else {float(k)})
        ),
        free_host=available_bytes(),
        free_device=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        flops_per_step=models.cost(model, hf, length).flops_per_token * tokens,
        peak_tflops=models.peak_tflops(device),
    )


def planes_of(dtype: str, gradient_dtype: str = "auto", *, second_bank: bool = False) -> tuple[Plane, ...]:
    """The planes of a layer in this dtype. A bf16 layer keeps the rest of its fp32 master in `remainder`, fp16 all."""
    weight = 4 if dtype == "float32" else 2
    gradient = {"auto": weight, "bfloat16": 2, "float32": 4}[gradient_dtype if dtype == "float32" else "auto"]
    both, own = "optimizer, trainer", "optimizer"
    rest = {"bfloat16": 2, "float16": 4}.get(dtype)
    remainder = () if rest is None else (Plane("remainder", rest, 0, rest, own),)
    state = (*remainder, Plane("exp_avg", 4, 0, 4, own), Plane("exp_avg_sq", 4, 0, 4, own))
    second = (Plane("weights'", weight, 0, 0, both), *(Plane(p.name + "'", p.host_if_cpu, 0, 0, own) for p in state))
    planes = (Plane("grads", gradient, 0, 0, both), Plane("weights", weight, weight, weight, both), *state)
    return (*planes, *second) if second_bank else planes


def need(planes: tuple[Plane, ...], trainable: int, frozen: int, k: float) -> Need:
    """The planes' bytes when the GPU owns the fraction k. Frozen parameters lie on the trainer's device."""
    by_gpu = round(trainable * k)
    by_cpu = trainable - by_gpu
    weight = next(p.trainer_if_gpu for p in planes if p.name == "weights")
    shared = sum(p.host_if_cpu for p in planes if "trainer" in p.mapped_by)
    host = sum(p.host_if_cpu for p in planes)
    trainer = by_cpu * sum(p.trainer_if_cpu for p in planes) + by_gpu * sum(p.trainer_if_gpu for p in planes)
    return Need(k, by_cpu * (host - shared), by_cpu * shared, trainer + frozen * weight)


def gib(size: int) -> str:
    """A size as people compare it: GiB, or MiB below one GiB."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"


def _vocab_size(recipe: Recipe) -> int | None:
    if recipe.data.kind == "random":
        return None
    wanted = recipe.tokenizer
    if wanted.path is not None:
        return tokenizer.load(wanted.path).vocab_size
    return 256 if wanted.kind == "bytes" else wanted.vocab_size
