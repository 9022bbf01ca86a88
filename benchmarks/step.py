"""One job in this process: builds the system, runs the segments' steps, writes a row for each. `suite` starts it.

    python -m benchmarks.step --rows-to FILE JOB     JOB as JSON, see `parts`; rows as JSON lines, behind what is there

    build ─▶ segment: commands ─▶ settle ─▶ measure ─▶ (save) ─▶ row ─▶ next segment … ─▶ close

A step's time is the device's: from one step's end to the next, by CUDA events (on a CPU by the wall clock), without a
synchronisation in between. Each row is written at once, so a process that is stopped keeps its rows.

All systems share the model, the batches and the loss: same seed, same shapes, same random tokens.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import graphs, idle, ranks, saving, text
from benchmarks.host import gpu_peak_bytes, used_bytes
from benchmarks.monitors import Monitors
from benchmarks.parts import COMPILED, GRAPHED, IN_PARTS, KEPT, SHAPES, WHOLE, Job, Segment
from benchmarks.power import Power
from benchmarks.rows import times_of
from benchmarks.systems import SYSTEMS, Running, Setting, Training, Unavailable
from hytrain import deferred_init
from hytrain.model.layers import find_blocks
from hytrain.model.split_batch import split_batch
from hytrain.run.environment import gpu_uuid

#: A segment with patience is measured once k was the same for so many steps and no layer moved in them. The planner
#: decides every fourth step, so it has looked at its last plan twice.
STILL_STEPS: Final = 8
#: Steps whose launches are looked at, once by the host's clock and once by the profiler.
LAUNCHED_STEPS: Final = 3
BATCHES: Final = 4


def main() -> int:
    """The command line; 1 after an exception, whose last line is the reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--rows-to", default="/dev/stdout", metavar="FILE")
    parser.add_argument("--run-dir", help="keep HyTrain's run folder, with its trace and logs, here")
    parser.add_argument("job", type=Job.from_json)
    arguments = parser.parse_args()
    try:
        with open(arguments.rows_to, "a", buffering=1) as out, tempfile.TemporaryDirectory() as folder:
            for row in rows(arguments.job, arguments.run_dir or folder):
                if ranks.leads():
                    out.write(json.dumps(row) + "\n")
    except Exception as error:
        traceback.print_exc()
        if arguments.job.ranks:
            ranks.report(error)
        return 1
    return 0


def rows(job: Job, run_dir: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each segment. Raises whatever the system raises, `Unavailable` if it can't run here."""
    name, _, option = job.system.partition(":")
    known = ranks.SYSTEMS if job.ranks else SYSTEMS
    if name not in known:
        raise Unavailable(f"no system is called {name!r}; known: {', '.join(known)}")
    system = known[name]
    if (system.cuda_only or job.device == "cuda") and not (job.device == "cuda" and torch.cuda.is_available()):
        raise Unavailable(f"{name} needs a CUDA device, and there is none" + " on device cpu" * (job.device == "cpu"))
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    if job.cap_gib:  # for all systems: what the allocator could not join again would be lost below the cap
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    began_s = time.perf_counter()
    if job.ranks:
        run_dir = ranks.join(job, run_dir)
    model = build_model(job, system.dtype or job.dtype)
    if job.cap_gib:
        model = below_cap(model, job)
    model_s = round(time.perf_counter() - began_s, 2)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before a system takes them apart
    running = system.build(model, Setting(option, job.clip, job.segments[0].batch, run_dir, job))
    start_s = round(time.perf_counter() - began_s, 2)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    gc.collect()
    gc.freeze()  # as docs/stalls.md says: otherwise Python has a longer step now and then, with any system
    facts = {"parameters": parameters, "model_s": model_s, "start_s": start_s, "versions": versions}
    for index, segment in enumerate(job.segments):
        row: dict[str, Any] = {"index": index, "batch": segment.batch, "label": segment.label, **facts}
        try:
            whole = isinstance(running, Training)
            row.update(running.measure(job, segment, model) if whole else measure(job, segment, model, running))
            if segment.saves:
                row.update(saved(job, segment, model, running, Path(run_dir), row["step_s"]))
            if job.ranks:
                row = ranks.merged(row, job)
            if "mean_s" in row:  # batches of several lengths
                yield row
                continue
            row["tflops"] = round(flops_per_step(job, parameters, segment.batch) / row["step_s"] / 1e12, 2)
            if peak := ranks.peak_tflops():
                row["mfu"] = round(row["tflops"] / peak, 4)
        except Unavailable as error:
            row["error"] = str(error)
        yield row
    if isinstance(running, Running) and running.optimizer is not None:
        running.optimizer.close()
    if job.ranks:
        ranks.leave()


def build_model(job: Job, dtype: str) -> nn.Module:
    """A Llama or Mixtral with random weights on the job's device, recomputing activations on a GPU; or a GPT-2."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

    shape = SHAPES[job.shape]
    alike: dict[str, Any] = {"vocab_size": shape.vocabulary, "use_cache": False}
    routed = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen} if shape.experts else {}
    config = (
        GPT2Config(
            n_embd=shape.hidden,
            n_inner=shape.intermediate,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            activation_function="gelu_pytorch_tanh",  # the same function in one kernel
            bos_token_id=None,
            eos_token_id=None,
            **alike,
        )
        if job.reads_text
        else (MixtralConfig if routed else LlamaConfig)(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads or shape.heads,
            max_position_embeddings=max(4096, job.length),
            **alike,
            **routed,
        )
    )

    def make() -> nn.Module:
        with torch.device("meta" if job.is_on_meta else job.device):
            made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        return made

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    model = deferred_init(make) if is_deferred(job) else make()
    torch.set_default_dtype(torch.float32)
    if job.device == "cuda" and not job.reads_text and job.blocks not in (KEPT, GRAPHED, WHOLE):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if shape.loss_chunks > 1 or job.context > 1:
        from hytrain.recipe.loss import in_chunks

        in_chunks(model, shape.loss_chunks, ranks.context(job))
    if job.blocks == COMPILED:
        for block in find_blocks(model):
            block.compile(dynamic=False)  # kernels of each batch size
    if job.blocks == IN_PARTS:
        split_batch(model, job.segments[0].batch)
    if job.blocks == WHOLE:
        model.compile(dynamic=False)
    if job.blocks == GRAPHED:
        graphs.capture(model, job.segments[0].batch, job.sequence)
    return model


def is_deferred(job: Job) -> bool:
    """Whether the model is built without memory, which HyTrain's AdamW alone gives it later: the same values."""
    return job.system.startswith("hytrain") and not job.ranks and not job.reads_text and job.blocks != GRAPHED


def below_cap(model: nn.Module, job: Job) -> nn.Module:
    """The model in host memory, so that it can be larger than what torch may take of the GPU's from now on."""
    model = model if is_deferred(job) or job.is_on_meta else model.cpu()
    if job.device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(job.cap_gib * 2**30 / total, 1.0))
    return model


def batches(job: Job, segment: Segment) -> list[Tensor]:
    """Tokens on the device, (batch, sequence) each: random ones of a fixed seed, or text with one token more."""
    batch, group = segment.batch * job.sharing, ranks.rank() // (job.sharing * job.context)
    if job.reads_text:
        return text.windows(job, batch, count=segment.settle + segment.measure, seed=1 + group)
    generator = torch.Generator().manual_seed(1 + group)
    shape, vocabulary = (batch, job.length), SHAPES[job.shape].vocabulary
    return [torch.randint(0, vocabulary, shape, generator=generator).to(job.device) for _ in range(BATCHES)]


def flops_per_step(job: Job, parameters: int, batch: int) -> int:
    """6 FLOP per parameter that a token meets, and causal attention's; what checkpointing repeats does not count."""
    shape = SHAPES[job.shape]
    attention = shape.layers * shape.hidden * job.length
    return 6 * (parameters - shape.idle_parameters + attention) * batch * job.sequence


def measure(job: Job, segment: Segment, model: nn.Module, running: Running) -> dict[str, Any]:
    """One segment's numbers: times in seconds, memory in GB (1e9 bytes)."""
    if running.fixed_batch and segment.batch != job.segments[0].batch:
        raise Unavailable(f"{job.system} was built for batch {job.segments[0].batch}")
    if segment.profile and job.device != "cuda":
        raise Unavailable("what keeps a GPU idle needs a GPU")
    for name, value in segment.commands:
        running.command(name, value)
    with ExitStack() as stack:
        power = stack.enter_context(Power(gpu_uuid(torch.device(job.device)))) if segment.power else None
        watching = stack.enter_context(attached(segment, running)) if segment.monitors else None
        steps = Steps(job, segment, running)
        while not steps.settled():
            steps.run()
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        retries = alloc_retries()
        profile = stack.enter_context(idle.Profile(segment.measure)) if segment.profile else None
        began_s = steps.finished_s() if power else 0.0
        for _ in range(segment.measure + (profile.warm_up if profile else 0)):
            steps.run()
            if profile:
                profile.step()
        ended_s = steps.finished_s() if power else 0.0
        told = watching and watching.read()
    row = {
        **times_of(steps.times(), segment.measure),
        "gpu_peak_gb": round(gpu_peak_bytes() / 1e9, 2),
        "alloc_retries": alloc_retries() - retries,
        "host_used_bytes": used_bytes(),
        "loss": round(steps.loss, 4),
        **own_account(running, steps, segment),
    }
    if job.clip and running.optimizer is not None:
        last = [float(norm) for norm in steps.norms[-segment.measure :] if norm is not None]
        if last:  # or else the loop has clipped by itself
            row["clipped_share"] = sum(norm > job.clip for norm in last) / len(last)
    if profile:
        row["idle"] = profile.result()
    if told:
        row["monitors_read"] = told
    if power:
        watts = power.of(began_s, ended_s, segment.measure * segment.batch * job.sequence)
        if not watts:
            raise Unavailable("nothing here tells its power: of a GPU, nvidia-ml-py does")
        row |= watts
    if job.reads_text:
        row |= text.held_out(model, job, segment.batch)
    if segment.launches:
        row |= launches(job, segment, running)
    if segment.digest:
        row["digest"] = digest(model, running)
    return row


def launches(job: Job, segment: Segment, running: Running) -> dict[str, Any]:
    """How long the host takes for a step, and on a GPU what the GPU does meanwhile.

    The device has nothing to do before the step. So the call returns when all is launched, unless the driver's queue
    was full: then the host has waited for the device.
    """
    steps, calls_s = Steps(job, segment, running), list[float]()
    for _ in range(LAUNCHED_STEPS):
        steps.finished_s()
        began_s = time.perf_counter()
        steps.run()
        calls_s.append(time.perf_counter() - began_s)
    found: dict[str, Any] = {"call_s": round(statistics.median(calls_s), 5)}
    if job.device == "cuda":
        with idle.Profile(LAUNCHED_STEPS) as profile:
            for _ in range(LAUNCHED_STEPS + profile.warm_up):
                steps.run()
                profile.step()
        found["idle"] = profile.result()
    return found


def attached(segment: Segment, running: Running) -> Monitors:
    if running.optimizer is None:
        raise Unavailable("only HyTrain has monitors")
    return Monitors(segment.monitors, Path(running.optimizer.run_dir))


def alloc_retries() -> int:
    """How often torch's allocator has found no memory, waited for the device, freed what it kept, and tried again."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_initialized() else 0


def saved(job: Job, segment: Segment, model: nn.Module, running: Any, run_dir: Path, step_s: float) -> dict[str, Any]:
    """What it costs to save beside the segment's steps, which took `step_s` each without."""
    way = getattr(running, "saving", None)
    if way is None:
        raise Unavailable(f"nobody has said how {job.system} saves its state")
    return saving.measure(model, way, run_dir / "saved", partial(Steps, job, segment, running), step_s)


class Steps:
    """The steps of one segment, and a mark after each."""

    def __init__(self, job: Job, segment: Segment, running: Running) -> None:
        self._segment, self._running = segment, running
        self._batches = batches(job, segment)
        self._cuda, self._in_ranks = job.device == "cuda", job.ranks > 0
        self._marks: list[Any] = []
        self.statistics: list[Any] = []  # HyTrain's, after each step
        self.norms: list[Tensor | None] = []  # of its gradients
        self.first = running.optimizer.statistics().step + 1 if running.optimizer else 0
        self.count, self.loss = 0, 0.0
        self._mark()

    def run(self) -> None:
        loss = self._running.step(self._batches[self.count % len(self._batches)])
        self._mark()
        self.count += 1
        if self._running.optimizer is not None:
            self.statistics.append(copy(self._running.optimizer.statistics()))
            self.norms.append(self._running.optimizer.grad_norm)
        self._last_loss = loss.detach()

    def settled(self) -> bool:
        """The segment's settling is over on all ranks, or its patience."""
        segment = self._segment
        if self.count < segment.settle:
            return False
        if self.count >= segment.settle + segment.patience:
            return True
        last = self.statistics[-STILL_STEPS:]
        still = self.count >= STILL_STEPS and len({each.k for each in last}) <= 1
        still = still and not any(each.moving for each in last)
        return all(ranks.gathered(still)) if self._in_ranks else still

    def finished_s(self) -> float:
        """Waits until the device has done all steps; returns when that was, on the monotonic clock."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    def times(self) -> list[float]:
        """Seconds of each step. Waits for the device."""
        self.loss = float(self._last_loss)
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]

    def _mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)


def own_account(running: Running, steps: Steps, segment: Segment) -> dict[str, Any]:
    """HyTrain's own numbers: k of every step, and over the measured ones its prediction and its stalls."""
    if running.optimizer is None:
        return {}
    last = steps.statistics[-1]
    measured = running.records(steps.first, last.step, steps.loss, ranks.rank())[-segment.measure :]

    def of(field: str, choose: Callable[[list[float]], float] = statistics.median) -> float | None:
        values = [record[field] for record in measured if record.get(field) is not None]
        return round(choose(values), 5) if values else None

    return {
        "k": float(last.k),
        "visiting": len(last.visiting_layers),
        "offloaded": len(last.offloaded_layers),
        "ks": [round(float(each.k), 4) for each in steps.statistics],
        "moved": last.moved,
        "policy": measured[-1].get("policy") if measured else None,
        **{field: of(field) for field in ("predicted_step_s", "stall_s", "cpu_busy_s", "predicted_host_bytes")},
        "predicted_gpu_bytes": of("predicted_gpu_bytes", max),  # as the peak is that of all measured steps
    }


def digest(model: nn.Module, running: Running) -> str:
    """A checksum of all weights, to the bit."""
    if running.optimizer is not None:
        running.optimizer.synchronize()
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()[:16]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # peers leave threads and processes behind that would hold up an orderly exit
