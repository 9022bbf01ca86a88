"""The CPU kernels of a wheel: the same bits from each, on this processor and on an emulated one of another kind.

All functions update planes of random bits, and of usual numbers, in place and elsewhere. What differs from the kernel
that is compiled for this CPU differs from torch, too (`test_kernels.py`).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hytrain.kernels.build import NATIVE, VARIANTS, build, features, find_compiler, variant_flags
from hytrain.kernels.native import SOURCE, NativeBackend
from hytrain.kernels.scalars import TYPICAL, scalars

DRIVER = Path(__file__).with_name("kernel_driver.cpp")
NUMEL = 2 * 4096 + 333
CROSS, EMULATOR, THERE = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
PLANES, WRITTEN = 5, 4  # kernel_driver.cpp: gradients are not written
HERE = os.uname().machine
#: With decay: a product by 1 is the same, fused with an addition or not.
HYPERS = {rule: replace(hyper, weight_decay=0.1) for rule, hyper in TYPICAL.items()}
Kind = tuple[str, str, str, str]


def kinds() -> list[Kind]:
    """Rule, dtypes of weights and gradients, dtype of moments: each has a function."""
    return [*NativeBackend(1)._updates[True]]


def cases() -> Iterator[tuple[str, bytes]]:
    generator = torch.Generator().manual_seed(5)
    for kind in kinds():
        rule, weights, *_ = kind
        for usual, by in ((False, 1.0), (True, 1.0), (True, 0.37)):
            step = scalars(HYPERS[rule], 3, 0.9)
            numbers = [*step.values, *[0.0] * (16 - len(step.values))]
            has_remainder = weights in ("bfloat16", "float16")
            name = f"hytrain_{'_'.join(kind)}"
            head = struct.pack("64s17f4I2q", name.encode(), *numbers, by, 77, 88, 99, has_remainder, NUMEL, NUMEL - 5)
            yield name, head + b"".join(planes(kind, usual, generator))


def planes(kind: Kind, usual: bool, generator: torch.Generator) -> Iterator[bytes]:
    _, weights, grads, state = kind
    for dtype in (weights, "float32" if weights == "float16" else "int16", state, state, grads):
        bits = torch.randint(0, 256, (4 * NUMEL,), generator=generator, dtype=torch.uint8)
        if usual and (dtype := dtype.removeprefix("lone_")) in ("float32", "float16", "bfloat16"):
            values = (
                torch.randn(NUMEL, generator=generator).mul(0.1).square().to(getattr(torch, dtype)).view(torch.uint8)
            )
            bits[: values.numel()] = values
        yield bits.numpy().tobytes()


@cache
def given() -> tuple[tuple[str, ...], bytes]:
    names, blobs = zip(*cases())
    return names, b"".join(blobs)


def results(driver: list[str], library: Path) -> list[bytes]:
    """The planes after each case: those written elsewhere, then those written in place."""
    names, blob = given()
    ran = subprocess.run([*driver, library], input=blob, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    size = 2 * WRITTEN * 4 * NUMEL
    assert len(ran.stdout) == size * len(names)
    return [ran.stdout[at : at + size] for at in range(0, len(ran.stdout), size)]


def compiled(compiler: str, at: Path) -> str:
    subprocess.run([*compiler.split(), "-std=c++17", DRIVER, "-ldl", "-o", at], check=True)
    return str(at)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(" ".join(find_compiler(os.environ)), tmp_path_factory.mktemp("driver") / "driver")


@pytest.fixture(scope="module")
def expected(driver: str) -> list[bytes]:
    return results([driver], build(SOURCE, flags=NATIVE))


@pytest.fixture
def variant(request: Any) -> Path:
    """Built here: on a new machine that is no cost of the test."""
    if not features().issuperset(VARIANTS[HERE][request.param][1]):
        pytest.skip(f"this CPU has no {request.param}")
    return build(SOURCE, flags=variant_flags(request.param))


@pytest.mark.parametrize("variant", VARIANTS[HERE], indirect=True)
def test_a_variant_has_the_bits_of_the_kernel_for_this_cpu(variant: Path, driver: str, expected: list[bytes]) -> None:
    assert_same(results([driver], variant), expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS["aarch64"])
def test_an_emulated_processor_has_the_same_bits(variant: str, expected: list[bytes], tmp_path: Path) -> None:
    for command in (CROSS, EMULATOR):
        if not shutil.which(command):
            pytest.skip(f"there is no {command}: apt-get install g++-aarch64-linux-gnu qemu-user-static")
    library = build(SOURCE, {**os.environ, "CXX": CROSS}, variant_flags(variant, "aarch64"))
    assert_same(results([EMULATOR, "-L", THERE, compiled(CROSS, tmp_path / "driver")], library), expected)


def assert_same(found: list[bytes], expected: list[bytes]) -> None:
    differ = {name for name, a, b in zip(given()[0], found, expected, strict=True) if a != b}
    assert not differ
    assert len(set(expected)) == len(expected), "each function does something else"
