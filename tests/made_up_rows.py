"""A result set that nobody measured, for tests of what is made out of rows: every part, one host, round numbers."""

from __future__ import annotations

from typing import Any

from benchmarks import parts
from benchmarks.parts import Job, Segment
from benchmarks.rows import Rows

STEP_S = {"no-offload": 0.6, "forward-backward": 0.5, "torchao-fp32": 1.3, "deepspeed-zero2": 1.9, "fsdp2": 2.1}
STEP_S |= {"fsdp2:no-offload": 0.5, "fsdp2-muon:no-offload": 0.5, "deepspeed-zero3": 2.5}
GPU_GB = {"no-offload": 60.0, "forward-backward": 15.0, "torchao-fp32": 29.0, "deepspeed-zero2": 12.0, "fsdp2": 5.0}
GPU_GB |= {
    "no-offload-muon": 45.0,
    "fsdp2-muon:no-offload": 40.0,
    "fsdp2:no-offload": 40.0,
    "bnb-8bit": 22.0,
    "torch-bf16": 29.0,
}


def made_up(*wanted: str, host: str = "host-a", at: str = "2026-01-01T00:00:00+00:00") -> Rows:
    """Rows of these parts, or of all; those on several ranks have four."""
    jobs = [(part, job) for part in wanted or parts.PARTS for job in jobs_of(part)]
    return Rows(row(part, job, segment, host=host, at=at) for part, job in jobs for segment in job.segments)


def jobs_of(part: str) -> list[Job]:
    return parts.PARTS[part](Job(ranks=4 if part in parts.RANKED else 0))


def row(part: str, job: Job, segment: Segment, *, host: str = "host-a", at: str = "2026") -> dict[str, Any]:
    """As `suite` would write it: HyTrain takes 0.5 s at any batch and k, plus a little for a k far from 0.25."""
    ours, label = "hytrain" in job.system, segment.label
    k = float(label.rpartition("k=")[2]) if "k=" in label else 0.6 if label == "halved" else 0.25
    step_s = (0.5 + (k - 0.25) ** 2 / 10) if ours else STEP_S.get(job.system, 1.0)
    slow = segment.settle // 2
    found: dict[str, Any] = {
        **{name: getattr(job, name) for name in ("system", "shape", "sequence", "dtype", "clip", "cap_gib")},
        **{"part": part, "batch": segment.batch, "label": label, "exact": parts.about(job.system).exact},
        **{"step_s": step_s, "steps_s": [step_s] * segment.measure, "tflops": 200.0, "host_gb": 50.0, "loss": 2.5},
        "settling_s": [1.0] * slow + [step_s] * (segment.settle - slow),
        "gpu_peak_gb": (14.0 if label in parts.LEAN.values() else 12 + 30 * k)
        if ours
        else GPU_GB.get(job.system, 15.0),
        **{"host": host, "commit": "c0ffee", "at": at, "command": f"python -m benchmarks.suite {part}"},
        **{"hardware": {"gpu": "made up"}, "versions": {"torch": "0"}},
    }
    if ours:
        ks = [0.6 if label == "given back" else 0.25] * slow + [k] * (segment.settle + segment.measure - slow)
        policy = "deadline" if label in ("", "auto", "deadline", "auto from the start") else "fixed"
        found |= {"k": k, "ks": ks, "predicted_step_s": 1.05 * step_s, "stall_s": 0.01, "policy": policy, "moved": 3}
    if job.ranks:
        found |= {"ranks": job.ranks, "gpu_peak_gb_by_rank": [found["gpu_peak_gb"]] * job.ranks}
    if segment.profile:
        found["idle"] = {"share": 0.02, "weights": 0.005, "launch": 0.005, "turnaround": 0.01, "copies": 0, "other": 0}
    if segment.launches:
        found |= {"call_s": 0.1, "idle": {"share": 0.3, "launch": 0.2, "kernels": 3000.0, "busy_s": 0.4}}
    if segment.saves:
        found |= {
            "saved_with": "a call",
            "saved_is": "fsynced",
            "save_s": 40.0,
            "save_call_s": 1.0,
            "save_stall_s": 2.0,
        }
        found |= {"save_stall_share": 0.05, "disk_bytes": 42 * 10**9, "disk_bytes_per_parameter": 12.02}
        found |= {"save_host_gb": 0.4, "resume_s": 20.0, "restored": True}
    if segment.power:
        seconds = [index / 4 for index in range(1, 48)]
        found |= {"gpu_watts": 600.0, "gpu_joules_per_token": 600 * step_s / 8192, "host_watts": 200.0}
        found["watts"] = {"at_s": seconds, "gpu_watts": [600.0] * 47, "host_watts": [None, *[200.0] * 46]}
    if segment.monitors:
        found["monitors_read"] = [40, 1] * (segment.monitors // 2)
    if segment.digest:
        found["digest"] = "00ff"
    return found
