"""Compiles the CUDA kernels and looks at what the compiler made of them: no GPU is needed.

    python tools/cuda_check.py --archs sm_80,sm_90a,sm_100

For each kernel: registers, spilled bytes, stack, shared memory, and how wide its accesses to global
memory are. Wrong, and the exit status 1, are

- a spill;
- a plain access of less than 8 bytes in a loop, unless it comes from a function that is there for
  edges (EDGE_FILES): a loop over data moves 16 bytes at once;
- a kernel that moves data and has no access of 16 bytes in a loop.

Accesses with an order of their own (signals, packets, lines) are not plain.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import re
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc/kernels/cuda"
DEFAULT_ARCHS = ("sm_80", "sm_90a", "sm_100")
FLAGS = ("-std=c++20", "-O3", "-lineinfo", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}")
# Files whose functions move what vectors do not reach, and functions of others that do.
EDGE_FILES = {"edges.cuh"}
EDGE_FUNCTIONS = {
    "float_io.cuh": (
        "load_scalar",
        "store_scalar",
        "load_run",
        "store_run",
        "load_scale",
        "store_scale",
    )
}
NARROW_BYTES = 8
VECTOR_BYTES = 16
# These move no data of users.
WITHOUT_VECTORS = ("BarrierKernel",)
# No kernels in it.
WITHOUT_KERNELS = {"driver", "library"}
# Sources that need an architecture of at least so much.
NEEDS_ARCH = {"multimem": 90}


@dataclass
class Kernel:
    """What is known of one kernel for one architecture."""

    name: str
    registers: int = 0
    spills: int = 0  # bytes stored and loaded
    stack: int = 0
    shared: int = 0
    # Of plain accesses in loops, in bytes: those of edges, and the others.
    edge_widths: set[int] = field(default_factory=set)
    body_widths: set[int] = field(default_factory=set)
    ordered_widths: set[int] = field(default_factory=set)
    narrow: list[str] = field(default_factory=list)

    @property
    def family(self) -> str:
        return self.name.split("<")[0]

    def complaints(self) -> list[str]:
        found = [f"{self.name}: {where}" for where in self.narrow]
        if self.spills:
            found.append(f"{self.name}: {self.spills} bytes spilled")
        moves_vectors = VECTOR_BYTES in self.body_widths | self.ordered_widths
        if not moves_vectors and self.family not in WITHOUT_VECTORS:
            found.append(f"{self.name}: no access of 16 bytes in a loop")
        return found


# --- compiling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    source: Path
    cubin: Path
    messages: str


def compile_source(source: Path, arch: str, folder: Path) -> Compiled:
    cubin = folder / f"{source.stem}.cubin"
    done = subprocess.run(
        ["nvcc", *FLAGS, f"-arch={arch}", "-cubin", "-o", str(cubin), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{source.name} for {arch}:\n{done.stderr}")
    return Compiled(source, cubin, done.stderr)


def cpu_seconds() -> float:
    """Of all compilers so far: unlike the clock's, they do not depend on what else the machine does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resources(messages: str) -> dict[str, Kernel]:
    """Kernels by mangled name, from what ptxas says of them."""
    kernels: dict[str, Kernel] = {}
    name = ""
    for line in messages.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
            kernels[name] = Kernel(name)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) .* stores, (\d+) .* loads", line):
            kernels[name].stack = int(match[1])
            kernels[name].spills = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            kernels[name].registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name].shared = int(shared[1]) if shared else 0
    return kernels


# --- the machine code -----------------------------------------------------------------------------


def nvdisasm() -> str:
    """From PATH, or from the triton package, which brings it."""
    if found := shutil.which("nvdisasm"):
        return found
    try:
        import triton
    except ImportError:
        raise SystemExit("nvdisasm is neither in PATH nor in a triton package") from None
    path = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not path.is_file():
        raise SystemExit(f"no {path}: another triton, or nvdisasm in PATH, is needed")
    return str(path)


@dataclass(frozen=True)
class Access:
    address: int
    nbytes: int
    is_ordered: bool
    origin: tuple[tuple[str, int], ...]  # file and line, innermost first

    @property
    def is_edge(self) -> bool:
        return any(
            file in EDGE_FILES or line in edge_lines().get(file, ()) for file, line in self.origin
        )


_EDGE_LINES: dict[str, set[int]] = {}


def edge_lines() -> dict[str, set[int]]:
    """The lines of EDGE_FUNCTIONS, by file."""
    if not _EDGE_LINES:
        for file, functions in EDGE_FUNCTIONS.items():
            lines = (SOURCES / file).read_text(encoding="utf-8").splitlines()
            found: set[int] = set()
            for function in functions:
                begin = next(i for i, line in enumerate(lines) if f" {function}(" in line)
                end = next(i for i in range(begin, len(lines)) if lines[i] == "}")
                found.update(range(begin + 1, end + 2))
            _EDGE_LINES[file] = found
    return _EDGE_LINES


SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
LABEL = re.compile(r"^(\.L_x_\d+):")
ORIGIN = re.compile(r'File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?')
GLOBAL_ACCESS = re.compile(r"^(LDG|STG|LD|ST)\b")


def width_of(opcode: str) -> int:
    parts = opcode.split(".")
    for text, nbytes in (("256", 32), ("128", 16), ("64", 8)):
        if text in parts:
            return nbytes
    if {"U8", "S8"} & set(parts):
        return 1
    return 2 if {"U16", "S16"} & set(parts) else 4


@dataclass
class Function:
    """What is read of one function: its accesses, and its loops as ranges of addresses."""

    accesses: list[Access] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branches: list[tuple[int, str]] = field(default_factory=list)

    def loops(self) -> list[tuple[int, int]]:
        targets = ((self.labels.get(label, at + 1), at) for at, label in self.branches)
        return [(begin, end) for begin, end in targets if begin <= end]

    def accesses_in_loops(self) -> list[Access]:
        loops = self.loops()
        return [a for a in self.accesses if any(b <= a.address <= e for b, e in loops)]


def functions_of(cubin: Path) -> dict[str, Function]:
    text = subprocess.run(
        [nvdisasm(), "-c", "-gi", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    functions: dict[str, Function] = {}
    function = Function()
    origin: list[tuple[str, int]] = []
    is_new_origin = True
    pending: list[str] = []  # labels whose address is that of the next instruction
    for line in text.splitlines():
        if match := SECTION.match(line):
            function = functions.setdefault(match[1], Function())
        elif match := ORIGIN.search(line):
            if is_new_origin:
                origin, is_new_origin = [], False
            origin.append((Path(match[1]).name, int(match[2])))
            if match[3]:
                origin.append((Path(match[3]).name, int(match[4])))
        elif match := LABEL.match(line):
            pending.append(match[1])
        elif match := INSTRUCTION.match(line):
            address = int(match[1], 16)
            function.labels.update(dict.fromkeys(pending, address))
            pending, is_new_origin = [], True
            note_instruction(function, address, match[2], match[3], tuple(origin))
    return functions


def note_instruction(
    function: Function, address: int, opcode: str, rest: str, origin: tuple[tuple[str, int], ...]
) -> None:
    if opcode.startswith("BRA"):
        if target := re.search(r"(\.L_x_\d+)", rest):
            function.branches.append((address, target[1]))
    elif GLOBAL_ACCESS.match(opcode):
        is_ordered = ".STRONG" in opcode or ".MMIO" in opcode
        function.accesses.append(Access(address, width_of(opcode), is_ordered, origin))
    elif opcode.startswith(("LDGMC", "STGMC", "REDG.MC", "MULTIMEM")):
        function.accesses.append(Access(address, VECTOR_BYTES, True, origin))


def note_accesses(kernel: Kernel, function: Function) -> None:
    for access in function.accesses_in_loops():
        if access.is_ordered:
            kernel.ordered_widths.add(access.nbytes)
        elif access.is_edge and access.nbytes < VECTOR_BYTES:
            kernel.edge_widths.add(access.nbytes)
        else:
            kernel.body_widths.add(access.nbytes)
            if access.nbytes < NARROW_BYTES:
                file, line = access.origin[-1] if access.origin else ("?", 0)
                first = access.origin[0] if access.origin else ("?", 0)
                kernel.narrow.append(
                    f"{access.nbytes} bytes at once in a loop, {file}:{line} ({first[0]}:{first[1]})"
                )


# --- reports --------------------------------------------------------------------------------------


def readable(names: list[str]) -> dict[str, str]:
    """Kernel types as they are written, from the mangled names of run_kernel<Kernel>."""
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    result = {}
    for mangled, name in zip(names, text.splitlines(), strict=True):
        inner = re.sub(r"pycoll::(cuda::)?", "", name)
        match = re.search(r"run_kernel<(.*)>\(", inner)
        short = match[1] if match else inner
        result[mangled] = re.sub(r"\((DType|Direction)\)(\d+)", r"\2", short).strip()
    return result


@dataclass
class Report:
    arch: str
    kernels: list[Kernel]
    seconds: float  # of processor time
    nbytes: int  # of machine code

    def complaints(self) -> list[str]:
        return [text for kernel in self.kernels for text in kernel.complaints()]


def check_arch(arch: str, jobs: int, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    number = int(re.sub(r"\D", "", arch))
    sources = [
        path
        for path in SOURCES.glob("*.cu")
        if path.stem not in WITHOUT_KERNELS and number >= NEEDS_ARCH.get(path.stem, 0)
    ]
    sources.sort(key=lambda path: -path.stat().st_size)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        begin = cpu_seconds()
        compiled = list(pool.map(lambda source: compile_source(source, arch, folder), sources))
        seconds = cpu_seconds() - begin
        disassembled = list(pool.map(lambda one: functions_of(one.cubin), compiled))
    kernels: list[Kernel] = []
    for one, functions in zip(compiled, disassembled, strict=True):
        by_name = resources(one.messages)
        names = readable(list(by_name))
        for mangled, kernel in by_name.items():
            kernel.name = names[mangled]
            note_accesses(kernel, functions[mangled])
            kernels.append(kernel)
    return Report(
        arch,
        kernels,
        seconds,
        sum(one.cubin.stat().st_size for one in compiled),
    )


def span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def widths(kernels: list[Kernel], attribute: str) -> str:
    return (
        ", ".join(map(str, sorted(set().union(*(getattr(k, attribute) for k in kernels))))) or "–"
    )


def table(report: Report) -> str:
    """One line for the instances of each kernel, as Markdown."""
    families: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in report.kernels:
        families[kernel.family].append(kernel)
    lines = [
        f"| {report.arch} | instances | registers | spilled bytes | stack | shared memory "
        "| vectors and other plain accesses in loops | edges | ordered |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kernels in sorted(families.items()):
        cells = [
            f"`{name}`",
            str(len(kernels)),
            span([k.registers for k in kernels]),
            span([k.spills for k in kernels]),
            span([k.stack for k in kernels]),
            span([k.shared for k in kernels]),
            widths(kernels, "body_widths"),
            widths(kernels, "edge_widths"),
            widths(kernels, "ordered_widths"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(
        f"\n{len(report.kernels)} kernels, {report.nbytes / 2**20:.1f} MiB of cubins, "
        f"{report.seconds:.0f} s of processor time to compile."
    )
    return "\n".join(lines)


def check_archs(archs: list[str]) -> None:
    """Raises ValueError if there are none, or nvcc does not know one. It lists them without the suffix of sm_90a."""
    listed = subprocess.run(
        ["nvcc", "--list-gpu-code"], check=True, capture_output=True, text=True
    ).stdout.split()
    for arch in archs or [""]:
        if re.sub(r"(?<=\d)[af]$", "", arch) not in listed:
            known = ", ".join(listed)
            raise ValueError(f"--archs names {arch!r}; this nvcc compiles for {known}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--archs", default=",".join(DEFAULT_ARCHS), help="such as sm_90a,sm_100")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/cuda-check")
    arguments = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc is not in PATH: no CUDA kernel can be compiled", file=sys.stderr)
        return 2
    archs = [arch for arch in arguments.archs.replace(" ", ",").split(",") if arch]
    try:
        check_archs(archs)
    except ValueError as error:
        parser.error(str(error))
    nvdisasm()
    complaints = []
    for arch in archs:
        report = check_arch(arch, arguments.jobs, arguments.folder / arch)
        print(table(report), flush=True)
        complaints += [f"{arch}: {text}" for text in report.complaints()]
    for text in complaints:
        print(f"WRONG {text}")
    print(f"{len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
