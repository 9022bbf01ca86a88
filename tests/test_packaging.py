"""What is published: the source archive is whole, and the wheel made of it trains in another environment and folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

import hytrain
from hytrain.kernels.build import VARIANTS, cache_folder, package_name
from hytrain.kernels.native import SOURCE
from hytrain.memory import reclaim

ROOT = Path(__file__).resolve().parent.parent
NOT_PUBLISHED = {".gitignore"}

SCRIPT = """
import sys, torch, hytrain, workers, protocol
print(hytrain.__file__, workers.__file__, protocol.__file__, sep="\\n")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
opt = hytrain.AdamW(model, lr=1e-2, k=0.5, backend="native")
losses = []
for step in range(5):
    loss = (model(torch.ones(4, 32)) - 1).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
try:
    hytrain.AdamW(torch.nn.ReLU())
except ValueError as refused:
    assert "#model-without-trainable-parameters " in refused.__notes__[0], "the page of errors is in the wheel"
assert "torch._dynamo" not in sys.modules, "importing torch's compiler takes more than a second"
print(*sorted(role for role, _, _ in opt.processes()), flush=True)
"""


def call(*command: str | Path, **options: object) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return str(ran.stdout)


@pytest.fixture(scope="module")
def published() -> set[str]:
    """The files of the project: those that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no checkout")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def archives(published: set[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel made from it. Both are made from a copy of the checkout, which stays clean."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in published:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    own = {"HYTRAIN_CACHE": str(cache_folder(os.environ))}  # to compile only once on a machine
    call(sys.executable, "-P", "-m", "build", "--no-isolation", copy, env=alone(**own))
    [sdist], [wheel] = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    return sdist, wheel


def alone(**variables: str) -> dict[str, str]:
    """An environment in which nothing leads to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(files.read(name))


def test_the_source_archive_is_the_project(archives: tuple[Path, Path], published: set[str]) -> None:
    with tarfile.open(archives[0]) as files:
        names = {member.name.partition("/")[2] for member in files if member.isfile()}
    assert published - NOT_PUBLISHED - names == set()
    assert {name for name in names - published if ".egg-info/" not in name} == {"PKG-INFO"}


def test_the_long_description_stands_alone(archives: tuple[Path, Path]) -> None:
    """The index can show it, and its links lead to the repository, to files that are there."""
    call(sys.executable, "-P", "-m", "twine", "check", "--strict", *archives, env=alone())
    known = metadata(archives[1])
    links = re.findall(r"\]\(([^)]+)\)", str(known.get_payload(decode=False)))
    [repository] = [url.split(", ")[1] for url in known.get_all("Project-URL", []) if url.startswith("Source, ")]
    place = re.compile(rf"{repository}(?:#.+|/blob/main/([^#]+).*)|https://raw\.githubusercontent\.com/.+?/main/(.+)")
    found = [place.fullmatch(link) for link in links if "hytrain" in link or not link.startswith("https://")]
    assert len(found) > 10 and None not in found
    assert all((ROOT / (match[1] or match[2] or ".")).exists() for match in found if match)


def test_the_wheel_has_the_kernels(archives: tuple[Path, Path]) -> None:
    machine = os.uname().machine
    with ZipFile(archives[1]) as files:
        libraries = {name for name in files.namelist() if name.endswith(".so")}
    built = [(SOURCE, variant) for variant in VARIANTS[machine]] + [(reclaim.SOURCE, reclaim.VARIANT)]
    assert libraries == {f"hytrain/kernels/{package_name(*each)}" for each in built}
    assert archives[1].name == f"hytrain-{hytrain.__version__}-py3-none-linux_{machine}.whl"


def test_without_a_compiler_the_wheel_is_for_every_machine(archives: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(archives[0]) as files:
        files.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    call(sys.executable, "-P", "-m", "build", "--no-isolation", "--wheel", folder, env=alone(CXX="no-such-c++"))
    assert [wheel.name for wheel in folder.glob("dist/*")] == [f"hytrain-{hytrain.__version__}-py3-none-any.whl"]


@pytest.mark.spawns
def test_the_wheel_trains_in_a_fresh_environment(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """In another folder, through three processes, without a compiler. Other packages are those of this environment."""
    _, wheel = archives
    fresh = tmp_path / "environment"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    quiet = ["-q", "--disable-pip-version-check", "--no-compile"]
    install = ["install", "--no-deps", "--no-index", "--no-build-isolation", *quiet, wheel]
    call(sys.executable, "-P", "-m", "pip", "--python", python, *install, env=alone())
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", env=alone()).strip())
    borrowed = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    (tmp_path / "script.py").write_text(SCRIPT)
    own = {"HYTRAIN_RUN_DIR": str(tmp_path / "run"), "HYTRAIN_CACHE": str(tmp_path / "cache"), "CXX": "no-such-c++"}
    here = {"cwd": tmp_path, "env": alone(HYTRAIN_THREADS="1", **own)}
    *files, roles = call(python, "script.py", **here).splitlines()
    assert [Path(file).parent.parent for file in files] == [site] * 3
    assert roles == "coordinator optimizer trainer"
    for package in ("hytrain", "workers", "protocol"):
        assert (site / package / "py.typed").is_file(), "its types are for users, too"
    for command in ("hytrain-cluster", "hytrain-monitor"):
        assert f"usage: {command}" in call(fresh / "bin" / command, "--help", **here)
    assert f"Version: {hytrain.__version__}" in str(metadata(wheel))
