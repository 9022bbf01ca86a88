"""What setup.cfg can't say: the README as the package index shows it, and the libraries and the page that a wheel has.

Built where there is a C++ compiler, a wheel has a library for each kind of CPU in `hytrain.kernels.build.VARIANTS`, and
is for machines of this kind. Built where there is torch, too, it has what serves that version's allocator. Without
these, and installed with -e, first use compiles.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from platform import machine

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from hytrain.errors import BackendUnavailable  # noqa: E402
from hytrain.kernels.build import VARIANTS, build, package_name, variant_flags  # noqa: E402

KERNELS = Path("hytrain", "kernels")

REPOSITORY = "https://github.com/hytrain/hytrain"
PICTURES = "https://raw.githubusercontent.com/hytrain/hytrain/main/"


def absolute(readme: str) -> str:
    """The page with each relative link of its Markdown, and each relative picture, made absolute."""
    readme = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{PICTURES}", readme)
    readme = re.sub(r"(\]\()(?=#)", rf"\1{REPOSITORY}", readme)
    return re.sub(r"(\]\()(?![a-z]+:)", rf"\1{REPOSITORY}/blob/main/", readme)


class BuildPy(build_py):
    """Adds the kernels, and the page of errors, which says where a message is explained."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shutil.copyfile(HERE / "docs/errors.md", Path(self.build_lib, "hytrain/errors.md"))
        source, into = HERE / KERNELS / "update.cpp", Path(self.build_lib, KERNELS)
        environ = {"HYTRAIN_CACHE": self.get_finalized_command("build").build_temp, **os.environ}
        variants = VARIANTS.get(machine(), {})
        try:
            with ThreadPoolExecutor() as pool:
                libraries = [*pool.map(lambda one: build(source, environ, variant_flags(one)), variants)]
        except BackendUnavailable as reason:
            self.warn(f"without CPU kernels, which first use will compile: {reason}")
            return
        for variant, library in zip(variants, libraries):
            shutil.copyfile(library, into / package_name(source, variant))
        try:
            from hytrain.memory import reclaim

            library = build(reclaim.SOURCE, environ, reclaim.torch_flags())
        except (ImportError, BackendUnavailable) as reason:
            self.warn(f"without what serves torch's allocator, which first use will compile: {reason}")
            return
        shutil.copyfile(library, into / package_name(reclaim.SOURCE, reclaim.VARIANT))


class Wheel(bdist_wheel):
    """One with kernels is for one kind of machine, and for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        self.plat_name_supplied = any(Path(self.bdist_dir).rglob("*.so"))
        return super().get_tag()


setup(
    long_description=absolute((HERE / "README.md").read_text(encoding="utf-8")),
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
)
