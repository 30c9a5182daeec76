"""Builds the native library with `properties.cpp`, and runs that: ``make sanitize``.

As it is shipped, for this machine and, in qemu, for arm64; with AVX-VNNI's products in another encoding; under
AddressSanitizer and UndefinedBehaviorSanitizer; under ThreadSanitizer. Needs g++, and Debian's packages
g++-aarch64-linux-gnu and qemu-user.

    python tests/native/check.py SEED
"""

from __future__ import annotations

import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
READABLE = ("-O1", "-g", "-fno-omit-frame-pointer")
PACKAGES = {"g++": "g++", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}


@frozen
class Build:
    """A build of the library, and how much is run on it: ``rounds`` of models, ``plans`` broken ones for each."""

    name: str
    machine: str
    flags: tuple[str, ...]
    rounds: int
    plans: int
    compiler: str = "g++"
    runner: tuple[str, ...] = ()

    def make(self) -> Path:
        """Compiles and links it."""
        room = ROOT / "build" / "native" / self.name
        room.mkdir(parents=True, exist_ok=True)
        flags = [*SETUP["FLAGS"], *self.flags]
        sources = [("native/step.cpp", []), ("native/packings.cpp", []), ("tests/native/properties.cpp", [])]
        sources += [
            ("native/compute.cpp", [f"-DLEVEL={one}", *own]) for one, own in SETUP["levels"](self.machine).items()
        ]
        objects = [str(room / f"{index}.o") for index in range(len(sources))]
        for (source, own), to in zip(sources, objects, strict=True):
            subprocess.run([self.compiler, *flags, *own, "-c", source, "-o", to], cwd=ROOT, check=True)
        program = room / "properties"
        subprocess.run([self.compiler, *flags, *objects, "-o", str(program), "-pthread"], cwd=ROOT, check=True)
        return program


HERE = platform.machine()
BUILDS = (
    Build("shipped", HERE, (), 60, 500),
    # AVX-VNNI's products at level 3, in the encoding of AVX-512: for processors that have that one alone
    *([Build("evex", HERE, ("-DEVEX",), 30, 0)] if HERE == "x86_64" else []),
    Build("arm64", "aarch64", ("-static",), 12, 200, "aarch64-linux-gnu-g++", ("qemu-aarch64",)),
    Build("address", HERE, (*READABLE, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"), 40, 1000),
    # no broken plans: threads may write one page for two chunks of them, which harms nobody else
    Build("thread", HERE, (*READABLE, "-fsanitize=thread"), 30, 0),
)


def main(seed: int) -> None:
    """Seeds of different calls have no model in common.

    Raises:
        SystemExit: a program is missing, or a promise is broken.
    """
    if missing := [package for program, package in PACKAGES.items() if shutil.which(program) is None]:
        sys.exit(f"make sanitize needs the packages {', '.join(missing)}: apt-get install {' '.join(missing)}")
    for build in BUILDS:
        command = [*build.runner, str(build.make()), str(1000 * seed), str(build.rounds), str(build.plans)]
        sys.stdout.write(f"{build.name}: ")
        sys.stdout.flush()
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(f"exit status {code} of {' '.join(command)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
