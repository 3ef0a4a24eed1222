"""Builds `pycoll._C` from csrc/ with a small ninja file.

torch.utils.cpp_extension gives every unit the same flags and puts the objects of an editable
install into a temporary folder. Here

- only csrc/torch and csrc/bindings are compiled with torch's and Python's include directories, so
  a core unit that includes torch does not compile;
- csrc is searched for `#include "…"` alone (-iquote), so that `<torch/…>` is always torch's own
  header although csrc has a folder of that name;
- objects stay in build/<python>-torch<version>/: every kind of install compiles only what changed.

The CUDA kernels become a library of their own, `pycoll/libpycoll_cuda.so`, where there is a use for it
(class Cuda says when).

Environment: CXX, CXXFLAGS, LDFLAGS as usual; MAX_JOBS, the number of units compiled at once;
PYCOLL_CUDA and PYCOLL_CUDA_ARCHS (docs/building.md). Everything else is declared in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH_FOLDERS = ("torch", "bindings")  # of csrc; every other folder knows neither torch nor Python
CUDA_FOLDER = Path("csrc/kernels/cuda")
CUDA_LIBRARY = "libpycoll_cuda.so"
DEFAULT_CUDA_ARCHS = "90a"
HEADER_SUFFIXES = (".h", ".inl", ".cuh", ".cu")

CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    # A fused multiply-add rounds once where two operations round twice: contracted code would give
    # other bits in a vector body than in its scalar tail, and on one machine than on another.
    "-ffp-contract=off",
    # Comparisons and conversions may be done for elements that the scalar loop would skip: needed to
    # vectorise them, and it changes no result.
    "-fno-trapping-math",
    "-fno-math-errno",
    # The same bytes are seen as several types (a slot's payload).
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-iquote",
    "csrc",
)
TORCH_DEFINES = ("-DUSE_DISTRIBUTED", "-DTORCH_EXTENSION_NAME=_C")
TORCH_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
# Of every file for the GPU; host code sees csrc by -I, since nvcc knows no -iquote.
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", "csrc")
GIB = 1 << 30

NO_TORCH = """
pycoll is compiled against the torch it will run with, and no torch can be imported here.
Install torch first, then build pycoll in that same environment:

    pip install --no-build-isolation .
"""
NO_PYTHON_HEADERS = (
    "pycoll needs Python.h, which {} does not have (on Debian: apt-get install python3-dev)."
)
NO_COMPILER = (
    "pycoll needs a C++20 compiler and found no {!r} (on Debian: apt-get install g++; or set CXX)."
)
NO_NVCC = (
    "PYCOLL_CUDA=1 asks for CUDA kernels, but nvcc is neither in CUDA_HOME nor in PATH: install a CUDA "
    "toolkit, set CUDA_HOME, or leave PYCOLL_CUDA unset."
)
WRONG_CUDA = "PYCOLL_CUDA is {!r}: 1 builds the CUDA kernels, 0 does not; unset, torch decides."
WRONG_ARCHS = "PYCOLL_CUDA_ARCHS is {!r}: list architectures such as 80,90a,100."
NO_NINJA = "pycoll is built with ninja, which was not found: pip install ninja"


@dataclass(frozen=True)
class TorchInstall:
    """Where the installed torch keeps what a build needs. Found without importing torch, which
    would load the very backend that is being rebuilt."""

    home: Path
    version: str
    cuda: str | None  # the toolkit it was built with

    @classmethod
    def find(cls) -> TorchInstall:
        spec = importlib.util.find_spec("torch")
        for home in map(Path, (spec and spec.submodule_search_locations) or ()):
            if (home / "version.py").is_file():
                known = runpy.run_path(str(home / "version.py"))
                return cls(home, known["__version__"], known.get("cuda"))
        raise SystemExit(NO_TORCH)

    @property
    def requirement(self) -> str:
        major, minor = self.version.split(".")[:2]
        return f"torch=={major}.{minor}.*"

    @property
    def include_dirs(self) -> list[Path]:
        include = self.home / "include"
        return [include, include / "torch/csrc/api/include"]


@dataclass(frozen=True)
class Toolchain:
    cxx: str
    description: str
    ninja: str
    python_include: Path

    @classmethod
    def find(cls) -> Toolchain:
        cxx = os.environ.get("CXX", "g++")
        if shutil.which(shlex.split(cxx)[0]) is None:
            raise SystemExit(NO_COMPILER.format(cxx))
        scripts = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
        ninja = shutil.which("ninja", path=os.pathsep.join([*scripts, os.environ.get("PATH", "")]))
        if ninja is None:
            raise SystemExit(NO_NINJA)
        python_include = Path(sysconfig.get_path("include"))
        if not (python_include / "Python.h").is_file():
            raise SystemExit(NO_PYTHON_HEADERS.format(python_include))
        output = subprocess.check_output([*shlex.split(cxx), "--version"], text=True)
        return cls(cxx, output.splitlines()[0].strip(), ninja, python_include)


@dataclass(frozen=True)
class Cuda:
    """Whether CUDA kernels are built, for which architectures, and by whom.

    PYCOLL_CUDA=0: never. 1: always, and nvcc's absence is an error. Unset: if nvcc is there and torch was built
    with CUDA, because no other torch can have a tensor that the kernels could be called with. Whether the machine
    has a GPU does not matter.
    """

    nvcc: str | None
    archs: tuple[str, ...]
    description: str  # of what is built, or why nothing is

    @classmethod
    def find(cls, torch: TorchInstall) -> Cuda:
        choice = os.environ.get("PYCOLL_CUDA", "")
        if choice not in ("", "0", "1"):
            raise SystemExit(WRONG_CUDA.format(choice))
        if choice == "0":
            return cls(None, (), "PYCOLL_CUDA was 0 when it was built")
        home = os.environ.get("CUDA_HOME", "")
        nvcc = shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc")
        if nvcc is None:
            if choice == "1":
                raise SystemExit(NO_NVCC)
            return cls(None, (), "nvcc was not found when it was built")
        if choice == "" and torch.cuda is None:
            return cls(
                None, (), f"torch {torch.version} has no CUDA (PYCOLL_CUDA=1 builds them still)"
            )
        text = os.environ.get("PYCOLL_CUDA_ARCHS") or DEFAULT_CUDA_ARCHS
        archs = tuple(
            part.removeprefix("sm_") for part in text.replace(" ", ",").split(",") if part
        )
        if not archs or not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
            raise SystemExit(WRONG_ARCHS.format(text))
        output = subprocess.check_output([nvcc, "--version"], text=True)
        release = re.search(r"release ([\d.]+)", output)
        names = ", ".join(f"sm_{arch}" for arch in archs)
        return cls(nvcc, archs, f"{names}, by nvcc {release[1] if release else '?'}")

    @property
    def flags(self) -> list[str]:
        codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in self.archs]
        return [*NVCC_FLAGS, *(part for code in codes for part in ("-gencode", code))]


def cuda_sources() -> list[Path]:
    """What the library of CUDA kernels consists of, beside base/error."""
    found = (path.relative_to(ROOT) for path in (ROOT / CUDA_FOLDER).glob("*.cu"))
    return sorted(found, key=lambda path: (-(ROOT / path).stat().st_size, path))


def sources() -> list[Path]:
    """Every translation unit, relative to the root and in a fixed order."""
    found = (path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cpp"))
    return sorted(path for path in found if CUDA_FOLDER not in path.parents)


def headers() -> list[str]:
    """What a source distribution carries beside the units."""
    found = (path for path in (ROOT / "csrc").rglob("*") if path.suffix in HEADER_SUFFIXES)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def default_jobs() -> int:
    """All cores, but two units at least and no more than the memory carries at 1 GiB each."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(2, min(len(os.sched_getaffinity(0)), available // GIB))


def ninja_file(
    tools: Toolchain, torch: TorchInstall, cuda: Cuda, build_dir: Path, output: Path
) -> str:
    """The text of the ninja file. Paths of sources and objects are relative to the root."""

    def flags(*arguments: str) -> str:
        return shlex.join(arguments).replace("$", "$$")

    def escaped(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    torch_flags = list(TORCH_DEFINES)
    for directory in (*torch.include_dirs, tools.python_include):
        torch_flags += ["-isystem", str(directory)]
    libraries = flags(f"-L{torch.home / 'lib'}", *(f"-l{name}" for name in TORCH_LIBRARIES))
    from_environment = {name: os.environ.get(name, "") for name in ("CXXFLAGS", "LDFLAGS")}
    lines = [
        f"builddir = {escaped(build_dir)}",
        f"core_flags = {flags(*CXX_FLAGS)}",
        f"torch_flags = {flags(*torch_flags)}",
        *(f"{name} = {value.replace('$', '$$')}" for name, value in from_environment.items()),
        *compile_rule("core", tools.cxx, "$core_flags $CXXFLAGS"),
        *compile_rule("torch", tools.cxx, "$core_flags $torch_flags $CXXFLAGS"),
        "rule link",
        f"  command = {tools.cxx} -shared -pthread $CXXFLAGS $in -o $out {libraries} $LDFLAGS",
        "  description = link $out",
    ]
    objects = []
    for source in sources():
        kind = "torch" if source.parts[1] in TORCH_FOLDERS else "core"
        objects.append(escaped(build_dir / source.with_suffix(".o")))
        lines.append(f"build {objects[-1]}: {kind} {escaped(source)}")
    lines.append(f"build {escaped(output)}: link {' '.join(objects)}")
    lines.append(f"default {escaped(output)}")
    if cuda.nvcc is not None:
        lines += cuda_rules(cuda.nvcc, flags(*cuda.flags))
        objects = [escaped(build_dir / "csrc/base/error.o")]
        for source in cuda_sources():
            objects.append(escaped(build_dir / source.with_suffix(".o")))
            lines.append(f"build {objects[-1]}: cuda {escaped(source)}")
        library = escaped(build_dir / CUDA_LIBRARY)
        lines.append(f"build {library}: cuda_link {' '.join(objects)}")
        lines.append(f"default {library}")
    return "\n".join([*lines, ""])


def cuda_rules(nvcc: str, flags: str) -> list[str]:
    return [
        f"cuda_flags = {flags}",
        "rule cuda",
        f"  command = {nvcc} $cuda_flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        # The runtime is linked in: where there is no driver the library still loads, and says so.
        "rule cuda_link",
        f"  command = {nvcc} -shared -cudart static $in -o $out",
        "  description = link $out",
    ]


def compile_rule(name: str, cxx: str, flags: str) -> list[str]:
    return [
        f"rule {name}",
        f"  command = {cxx} {flags} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
    ]


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


class NinjaBuild(build_ext):
    """Compiles with ninja and leaves `_build.py`, the record of the build, beside the extension."""

    def build_extension(self, ext: Extension) -> None:
        tools, torch = Toolchain.find(), TorchInstall.find()
        cuda = Cuda.find(torch)
        tag = f"{sys.implementation.cache_tag}-torch{torch.version}"
        build_dir = Path("build") / tag
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        built = build_dir / target.name
        ninja = ROOT / build_dir / "build.ninja"
        write_if_changed(ninja, ninja_file(tools, torch, cuda, build_dir, built))
        jobs = os.environ.get("MAX_JOBS") or str(default_jobs())
        command = [tools.ninja, "-C", str(ROOT), "-f", str(ninja), "-j", jobs]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("pycoll was not built: the compiler's messages are above.")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(ROOT / built), str(target))
        self._cuda_library = ROOT / build_dir / CUDA_LIBRARY if cuda.nvcc is not None else None
        self._place_cuda_library(target.parent)
        self._build_record = (
            '"""Written by setup.py: what this build of pycoll was made with."""\n\n'
            f'TORCH_VERSION = "{torch.version}"\n'
            f'COMPILER = "{tools.description}"\n'
            f'CUDA = "{cuda.description}"\n'
        )
        write_if_changed(target.parent / "_build.py", self._build_record)

    def _place_cuda_library(self, folder: Path) -> None:
        """Or takes away the one of a build before."""
        if self._cuda_library is None:
            (folder / CUDA_LIBRARY).unlink(missing_ok=True)
        else:
            self.copy_file(str(self._cuda_library), str(folder / CUDA_LIBRARY))

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        write_if_changed(ROOT / "pycoll/_build.py", self._build_record)
        self._place_cuda_library(ROOT / "pycoll")


setup(
    ext_modules=[Extension("pycoll._C", [str(path) for path in sources()], depends=headers())],
    cmdclass={"build_ext": NinjaBuild},
    # The wheel says which torch it was compiled for, so that pip reports a later mismatch.
    install_requires=[TorchInstall.find().requirement],
)
