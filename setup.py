"""Compiles the native library, which is optional: without a compiler the package is installed without it.

All else is in pyproject.toml. The library is called by `triolet.models.native`, and is no Python module: one serves all
versions of Python.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any
from zlib import crc32

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-g0", "-std=c++17", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"]
_V4 = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
X86 = {
    "level3": ["-march=x86-64-v3"],
    "level3_vnni": ["-march=x86-64-v3", "-DVNNI"],
    "level4": [*_V4],
    "level5": [*_V4, "-mavx512bf16"],
}


def made_of() -> int:
    """The checksum of the library's sources, by which `Library.load` knows whether they have changed since."""
    sources = sorted([*Path("native").glob("*.cpp"), *Path("native").glob("*.h")])
    return crc32(b"".join(path.read_bytes() for path in sources))


def levels(machine: str) -> dict[str, list[str]]:
    """The instruction sets that are compiled for ``machine``, with the flags of each."""
    return {"level1": [], **(X86 if machine in {"x86_64", "AMD64"} else {})}


class Build(build_ext):
    """Compiles what computes once for each instruction set; the library chooses when it runs."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Any) -> None:
        *plain, computing = ext.sources
        compiler: Any = self.compiler
        objects = compiler.compile(
            plain, output_dir=self.build_temp, macros=[("MADE_OF", f"{made_of()}u")], extra_postargs=FLAGS
        )
        for level, flags in levels(platform.machine()).items():
            objects += compiler.compile(
                [computing],
                output_dir=f"{self.build_temp}/{level}",
                macros=[("LEVEL", level)],
                extra_postargs=[*FLAGS, *flags],
            )
        compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), libraries=["pthread"], target_lang="c++")


class Wheel(bdist_wheel):
    """For one kind of machine, and all versions of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "triolet.models.native.step",
                ["native/step.cpp", "native/packings.cpp", "native/compute.cpp"],
                depends=[str(header) for header in Path("native").glob("*.h")],
                optional=True,
            )
        ],
        cmdclass={"bdist_wheel": Wheel, "build_ext": Build},
    )
