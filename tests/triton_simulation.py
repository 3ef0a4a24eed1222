"""Launches of Triton kernels as cases for the simulator: their PTX, translated to C++ (tests/ptx), under seeds.

with Arena() as arena:
    case = Case(arena, world_size=3, config=config)
    with case.launches_of(rank):
        all_reduce(case.groups[rank], x[rank], y[rank])
    case.expect(y[rank], sum_of_all)
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import cuda_sim_programs
import native_programs
import torch
from native_programs import Outcome
from torch import Tensor
from triton_compiler import ROOT, Specification, compile_all, specification

from pycoll.triton_kernels.group import Layout, TritonGroup
from pycoll.triton_kernels.launching import Launch, LaunchConfig, started_by

FOLDER = ROOT / "tests/ptx"
sys.path.insert(0, str(FOLDER))
from translate import Translation, translate  # noqa: E402

# ThreadSanitizer lets programs map memory there.
ARENA_ADDRESS = 0x10_0000_0000
ARENA_BYTES = 8 << 20
GAP_BYTES = 128
SIMULATOR_OBJECTS = (
    *(
        f"simulator/{name}.o"
        for name in ("accesses", "fiber", "rendezvous", "scheduler", "simulation", "weak_memory")
    ),
    "base/error.o",
)
_FIXED_NOREPLACE = 0x100000


class Arena:
    """Memory at one address in this process and in the simulator's: pointers in it hold in both."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "arena"
        self.buffers: list[tuple[int, int]] = []
        self._end = GAP_BYTES
        with self.path.open("wb+") as file:
            file.truncate(ARENA_BYTES)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [
                ctypes.c_void_p,
                ctypes.c_size_t,
                *[ctypes.c_int] * 3,
                ctypes.c_long,
            ]
            flags = mmap.MAP_SHARED | _FIXED_NOREPLACE
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            at = libc.mmap(ARENA_ADDRESS, ARENA_BYTES, protection, flags, file.fileno(), 0)
        if at != ARENA_ADDRESS:
            raise OSError(ctypes.get_errno(), f"cannot map memory at {ARENA_ADDRESS:#x}")
        self._libc = libc
        raw = (ctypes.c_char * ARENA_BYTES).from_address(ARENA_ADDRESS)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8)

    def allocate(self, nbytes: int, shift: int = 0) -> Tensor:
        """Zeros that begin `shift` bytes behind a multiple of 128. Kernels may touch them, and nothing around them."""
        begin = self._end + shift
        self._end = -(-(begin + nbytes) // GAP_BYTES) * GAP_BYTES + GAP_BYTES
        if self._end > ARENA_BYTES:
            raise MemoryError(f"the arena has {ARENA_BYTES} bytes; raise ARENA_BYTES")
        self.buffers.append((ARENA_ADDRESS + begin, nbytes))
        return self.bytes[begin : begin + nbytes]

    def tensor(self, values: Tensor, shift: int = 0) -> Tensor:
        """A copy of `values`, a whole number of elements behind a multiple of 128 bytes."""
        flat = self.allocate(values.numel() * values.element_size(), shift * values.element_size())
        # A view of another dtype wants its offset to be a multiple; frombuffer does not.
        raw = (ctypes.c_char * max(1, flat.numel())).from_address(flat.data_ptr())
        count = values.numel()
        if count == 0:
            return torch.empty(values.shape, dtype=values.dtype)
        whole = torch.frombuffer(raw, dtype=values.dtype, count=count)
        return whole.view(values.shape).copy_(values)

    def close(self) -> None:
        self._libc.munmap(ctypes.c_void_p(ARENA_ADDRESS), ctypes.c_size_t(ARENA_BYTES))
        self.path.unlink()


@contextmanager
def arena_in(folder: Path) -> Iterator[Arena]:
    arena = Arena(folder)
    try:
        yield arena
    finally:
        arena.close()


@dataclass(frozen=True)
class RecordedLaunch:
    rank: int
    what: Specification
    num_blocks: int
    arguments: tuple[tuple[str, int], ...]  # type and value of each parameter


@dataclass
class Case:
    """Launches of some ranks, on memory of an arena, and what it shall hold afterwards."""

    arena: Arena
    world_size: int
    launches: list[RecordedLaunch] = field(default_factory=list)
    checks: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def groups(
        self, config: LaunchConfig, timeout_s: float | None = None, **sizes: int
    ) -> list[TritonGroup]:
        layout = Layout(self.world_size, config, **sizes)
        bases = [self.arena.allocate(layout.nbytes()).data_ptr() for _ in range(self.world_size)]
        return [
            TritonGroup(
                rank,
                layout,
                bases,
                torch.device("cpu"),
                timeout_s=timeout_s,
                allocate=self.arena.allocate,
            )
            for rank in range(self.world_size)
        ]

    @contextmanager
    def launches_of(self, rank: int) -> Iterator[None]:
        def record(launch: Launch) -> None:
            what = specification(launch)
            arguments = []
            for name, kind in what.signature:
                value = launch.arguments[name]
                if kind != "constexpr":
                    value = value.data_ptr() if isinstance(value, Tensor) else value
                    arguments.append((kind, value))
            self.launches.append(RecordedLaunch(rank, what, launch.num_blocks, tuple(arguments)))

        with started_by(record):
            yield

    def expect(self, tensor: Tensor, values: Tensor) -> None:
        self.checks.append((tensor, values.to(tensor.dtype)))

    def specifications(self) -> dict[str, Specification]:
        return {name_of(launch.what): launch.what for launch in self.launches}

    def write(self, folder: Path) -> Path:
        """The case as run_case.cpp reads it; the arena as it is now, and as it is expected."""
        image, expected = folder / "image", folder / "expected"
        image.write_bytes(self.arena.bytes.numpy().tobytes())
        lines = [
            f"arena {ARENA_ADDRESS} {ARENA_BYTES} {image} {expected}",
            f"ranks {self.world_size}",
            *(f"buffer {address} {nbytes}" for address, nbytes in self.arena.buffers if nbytes),
        ]
        for tensor, values in self.checks:
            tensor.copy_(values)
            if tensor.numel():
                lines.append(f"check {tensor.data_ptr()} {tensor.numel() * tensor.element_size()}")
        expected.write_bytes(self.arena.bytes.numpy().tobytes())
        for launch in self.launches:
            parameters = b"".join(packed(launch.arguments))
            lines.append(
                f"launch {launch.rank} {name_of(launch.what)} {launch.num_blocks} {parameters.hex()}"
            )
        path = folder / "case"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def packed(arguments: Iterable[tuple[str, int]]) -> Iterator[bytes]:
    """The bytes of a kernel's parameters, with what Triton appends: two pointers to scratch memory that is not used."""
    end = 0
    for kind, value in [*arguments, ("i64", 0), ("i64", 0)]:
        letter = "i" if kind == "i32" else "q" if kind == "i64" else "Q"
        nbytes = struct.calcsize(letter)
        yield b"\0" * (-end % nbytes) + struct.pack(letter, value)
        end += -end % nbytes + nbytes


def name_of(what: Specification) -> str:
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:12]
    return f"{what.kernel}_{digest}"


# ---- programs


@dataclass
class Program:
    """Kernels of one Triton: compiled, and for each sanitizer translated and built with the simulator."""

    folder: Path

    def compile(
        self,
        specifications: dict[str, Specification],
        arch: int,
        triton: Path | None = None,
        root: Path = ROOT,
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        compile_all(specifications, arch, self.folder, triton, root)

    def translate(self, name: str) -> Translation:
        ptx = (self.folder / f"{name}.ptx").read_text(encoding="utf-8")
        facts = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return translate(ptx, name, facts["shared"])

    def build(self, sanitizer: str, names: Iterable[str]) -> None:
        sources = self.folder / sanitizer
        sources.mkdir(exist_ok=True)
        translations = [self.translate(name) for name in sorted(names)]
        texts = {f"{it.name}.cpp": _in_namespace(it.source) for it in translations}
        texts["table.cpp"] = _table(translations)
        for path in sources.glob("*.cpp"):
            if path.name not in texts:
                path.unlink()
        for name, text in texts.items():
            _write_if_other(sources / name, text)
        cuda_sim_programs.build(sanitizer, list(SIMULATOR_OBJECTS))
        command = [
            "make",
            "-j",
            native_programs.JOBS,
            f"SANITIZER={sanitizer}",
            f"FOLDER={sources}",
        ]
        done = subprocess.run(
            command,
            cwd=FOLDER,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=580,
        )
        assert done.returncode == 0, done.stdout[-5000:]

    def run(self, case: Path, sanitizer: str, memory: str, seeds: int) -> Outcome:
        program = str(self.folder / sanitizer / "run_case")
        return cuda_sim_programs.run_command(
            sanitizer, [program, str(case), "1", str(seeds), memory]
        )


def _write_if_other(path: Path, text: str) -> None:
    """So that make builds what has changed."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _in_namespace(source: str) -> str:
    return f'#include "ptx_runtime.h"\n\nnamespace pycoll::sim {{\n\n{source}\n}}  // namespace pycoll::sim\n'


def _table(translations: Iterable[Translation]) -> str:
    known = list(translations)
    declarations = "\n".join(f"void {it.name}(const std::byte*);" for it in known)
    rows = "\n".join(f'      {{"{it.name}", {it.num_threads}, {it.name}}},' for it in known)
    return (
        '#include "kernel_table.h"\n\nnamespace pycoll::sim {\n\n'
        f"{declarations}\n\nnamespace ptx {{\nconst std::vector<Kernel>& kernels() {{\n"
        f"  static const std::vector<Kernel> all = {{\n{rows}\n  }};\n  return all;\n}}\n"
        "}  // namespace ptx\n}  // namespace pycoll::sim\n"
    )
