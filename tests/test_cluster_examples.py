"""examples/cluster: what the Slurm script starts, and the container."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from workers.launch import launcher, torchrun

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples/cluster"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
IMAGE = "hytrain-test"
TRAINED = ["--nproc-per-node", "2", "examples/demo.yaml", "--set", "train.steps=2", "--set", "train.device=cpu"]


@pytest.mark.parametrize("image", [None, "hytrain.sif"])
def test_the_slurm_script_starts_a_launcher_that_takes_its_options(tmp_path: Path, image: str | None) -> None:
    script = FOLDER / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    for name, body in (("srun", r'printf "%s\n" "$@"'), ("scontrol", "echo node7; echo node8")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "42", "RANKS": "4"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "IMAGE": image or ""}
    command = ["bash", script, "recipe.yaml", "--set", "run.name=two words"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = ran.stdout.splitlines()
    start = words.index("hytrain-cluster")
    assert words[:start][2:] == (["apptainer", "exec", "--nv", image] if image else [])
    arguments = launcher._parse(words[start + 1 :])
    assert (arguments.program, arguments.arguments) == ("recipe.yaml", ["--set", "run.name=two words"])
    job = torchrun.job(arguments)
    assert job is not None and (job.ranks, job.world, job.meeting) == (4, 8, "42@node7:29500")


def engine() -> str | None:
    """The program that builds and runs containers here."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_container_trains() -> None:
    """On two ranks, with torch for the CPU."""
    if (name := engine()) is None:
        pytest.skip("neither docker nor podman runs here")
    build = [name, "build", "-t", IMAGE, "--build-arg", f"TORCH_INDEX={CPU_TORCH}", "-f", FOLDER / "Containerfile"]
    built = subprocess.run([*build, ROOT], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    try:
        command = [name, "run", "--rm", "--ipc", "host", IMAGE, "hytrain-cluster", *TRAINED]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-4000:]
    finally:
        subprocess.run([name, "image", "rm", IMAGE], capture_output=True, check=False)
