"""PTX to C++ for the simulator of tests/sim: the kernels that Triton really emits, instruction by instruction.

A register becomes a local variable, a label a label, an access to global memory a call that keeps its order and its
width (ptx_runtime.h). What is not known here raises: nothing is passed over in silence.

    translation = translate(ptx, "name")     # .source is a function void name(const std::byte* parameters)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

C_TYPES = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f16": "uint16_t",
    "f16x2": "uint32_t",
    "f32": "float",
    "f64": "double",
}
FIELDS = {
    **{f"{kind}{bits}": f"u{bits}" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"s{bits}" for bits in (8, 16, 32, 64)},
    "f16": "u16",
    "f16x2": "u32",
    "f32": "f32",
    "f64": "f64",
}
SPECIAL = {
    **{f"%tid.{d}": f"threadIdx.{d}" for d in "xyz"},
    **{f"%ctaid.{d}": f"blockIdx.{d}" for d in "xyz"},
    **{f"%ntid.{d}": f"blockDim.{d}" for d in "xyz"},
    **{f"%nctaid.{d}": f"gridDim.{d}" for d in "xyz"},
    "%laneid": "lane()",
    "%globaltimer": "ptx::clock_ns()",
    "WARP_SZ": "32",
}


class UnknownPtxError(Exception):
    """A directive, an instruction or an operand that is not translated."""


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    nbytes: int


@dataclass
class Translation:
    name: str
    parameters: list[Parameter]
    num_threads: int
    source: str


@dataclass
class Instruction:
    """`op` without its dots, its operands, and the condition under which it is executed."""

    text: str
    op: list[str]
    operands: list[str]
    guard: str = ""

    @property
    def name(self) -> str:
        return self.op[0]

    def has(self, modifier: str) -> bool:
        return modifier in self.op

    @property
    def types(self) -> list[str]:
        return [part for part in self.op if part in C_TYPES or part == "pred"]

    @property
    def type(self) -> str:
        if not self.types:
            raise self.unknown()
        return self.types[-1]

    def unknown(self) -> UnknownPtxError:
        return UnknownPtxError(f"not translated: {self.text}")

    def allow_only(self, *modifiers: str) -> None:
        for part in self.op[1:]:
            if part not in modifiers and part not in C_TYPES and part != "pred":
                raise UnknownPtxError(f"modifier .{part} is not translated: {self.text}")


def split_operands(text: str) -> list[str]:
    """At commas that no bracket encloses."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def vector(operand: str) -> list[str]:
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


@dataclass
class Function:
    """One kernel while it is translated."""

    name: str
    parameters: dict[str, Parameter]
    shared: dict[str, int]
    shared_nbytes: int
    registers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)  # so far
    branch_targets: set[str] = field(default_factory=set)

    # ---- operands

    def variable(self, register: str) -> str:
        if register not in self.registers:
            raise UnknownPtxError(f"{self.name}: {register} is not declared")
        return "r_" + re.sub(r"\W", "_", register.lstrip("%"))

    def value(self, operand: str, kind: str) -> str:
        """A C++ expression of `operand`, read as `kind`."""
        if operand.startswith("!"):
            return "!" + self.value(operand[1:], kind)
        if operand in self.registers:
            variable = self.variable(operand)
            return variable if self.registers[operand] == "pred" else f"{variable}.{FIELDS[kind]}"
        if operand in SPECIAL:
            return f"static_cast<{C_TYPES[kind]}>({SPECIAL[operand]})"
        if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", operand):
            bits = f"uint{4 * len(match[1])}_t{{0x{match[1]}ull}}"
            if kind[0] == "f":
                return f"std::bit_cast<{C_TYPES[kind]}>({bits})"
            return f"static_cast<{C_TYPES[kind]}>({bits})"
        if re.fullmatch(r"-?(\d+|0[xX][0-9a-fA-F]+)U?", operand):
            # The least 64-bit number has no literal.
            number = int(operand.rstrip("U"), 0) & (2**64 - 1)
            if kind == "pred":
                return "false" if number == 0 else "true"
            return f"static_cast<{C_TYPES[kind]}>({number}ull)"
        if operand in self.shared:
            return f"static_cast<{C_TYPES[kind]}>({self.shared[operand]})"
        raise UnknownPtxError(f"{self.name}: operand {operand!r}")

    def target(self, operand: str, kind: str) -> str:
        if operand == "_":
            return f"ignored.{FIELDS[kind]}"
        variable = self.variable(operand)
        return variable if self.registers[operand] == "pred" else f"{variable}.{FIELDS[kind]}"

    def loaded(self, operand: str, kind: str) -> str:
        """Where a load or a conversion goes: narrow ones fill the register, with zeros or the sign."""
        width = self.registers.get(operand, "64")
        if kind[0] == "f" or int(width) <= int(kind[1:]):
            return self.target(operand, kind)
        return self.target(operand, ("s" if kind[0] == "s" else "u") + width)

    def address(self, operand: str) -> tuple[Parameter | None, str]:
        """The parameter that is addressed, or None, and the address or offset."""
        match = re.fullmatch(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise UnknownPtxError(f"{self.name}: address {operand}")
        base, offset = match[1], int(match[2] or "0", 0)
        if base in self.parameters:
            return self.parameters[base], str(offset)
        wide = base in self.shared or self.registers.get(base) == "64"
        value = self.value(base, "u64" if wide else "u32")
        return None, f"(uint64_t{{{value}}} + {offset & (2**64 - 1)}ull)"

    # ---- statements

    def emit(self, instruction: Instruction, code: str) -> None:
        guard = f"if ({instruction.guard}) " if instruction.guard else ""
        self.lines.append(f"  {guard}{{ {code} }}")

    def assign(self, instruction: Instruction, kind: str, code: str) -> None:
        target = self.target(instruction.operands[0], kind)
        if kind != "pred":
            code = f"static_cast<{C_TYPES[kind]}>({code})"
        self.emit(instruction, f"{target} = {code};")

    def declare(self, text: str) -> None:
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        if match is None:
            raise UnknownPtxError(f"{self.name}: directive {text}")
        kind = "pred" if match[1] == "pred" else re.sub(r"\D", "", match[1])
        for name in match[2].split(","):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name.strip())
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
            self.registers.update(dict.fromkeys(names, kind))

    def label(self, name: str) -> str:
        return "L_" + re.sub(r"\W", "_", name)

    def statement(self, text: str) -> None:
        if match := re.fullmatch(r"(\$?[\w$]+):", text):
            self.labels.add(match[1])
            if match[1] in self.branch_targets:  # the others are for debuggers
                self.lines.append(f"{self.label(match[1])}:;")
        elif text.startswith("."):
            self.declare(text)
        else:
            self.instruction(text)

    def instruction(self, text: str) -> None:
        from instructions import TRANSLATORS

        guard, rest = "", text
        if match := re.match(r"@(!?)(%[\w$]+)\s+(.*)", text):
            guard, rest = match[1] + self.variable(match[2]), match[3]
        op, _, operands = rest.partition(" ")
        instruction = Instruction(text, op.split("."), split_operands(operands), guard)
        translator: Callable[[Function, Instruction], None] | None = TRANSLATORS.get(
            instruction.name
        )
        if translator is None:
            raise instruction.unknown()
        translator(self, instruction)

    def text(self) -> str:
        declarations = []
        for register, kind in self.registers.items():
            variable = self.variable(register)
            is_predicate = kind == "pred"
            declarations.append(
                f"  [[maybe_unused]] {'bool' if is_predicate else 'ptx::Register'} {variable}{{}};"
            )
        head = [
            f"void {self.name}([[maybe_unused]] const std::byte* parameters) {{",
            f"  [[maybe_unused]] const ptx::SharedMemory shared({self.shared_nbytes});",
            "  [[maybe_unused]] ptx::Loop loop;",
            "  [[maybe_unused]] ptx::Register ignored{};",
        ]
        return "\n".join([*head, *declarations, *self.lines, "}", ""])


# ---- the file


def _without_comments(ptx: str) -> str:
    ptx = re.sub(r"/\*.*?\*/", " ", ptx, flags=re.DOTALL)
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", ptx, flags=re.MULTILINE)
    return ptx.split(".section")[0]


def _parameters(text: str) -> dict[str, Parameter]:
    parameters, end = {}, 0
    for part in split_operands(text):
        match = re.fullmatch(
            r"\.param \.(\w\d+)(?: \.ptr(?: \.\w+)*(?: \.align \d+)?)? (\w+)",
            " ".join(part.split()),
        )
        if match is None:
            raise UnknownPtxError(f"parameter {part}")
        nbytes = int(match[1][1:]) // 8
        begin = -(-end // nbytes) * nbytes
        parameters[match[2]] = Parameter(match[2], begin, nbytes)
        end = begin + nbytes
    return parameters


def _body(ptx: str, begin: int) -> str:
    depth, at = 1, begin
    while depth:
        depth += {"{": 1, "}": -1}.get(ptx[at], 0)
        at += 1
    return ptx[begin : at - 1]


def translate(ptx: str, name: str, shared_nbytes: int) -> Translation:
    """The only kernel of a file. `shared_nbytes`: of its dynamic shared memory.

    Raises:
        UnknownPtxError: something that this translator does not know.
    """
    ptx = _without_comments(ptx)
    shared = {match[1]: 0 for match in re.finditer(r"\.extern \.shared [^;]*?(\w+)\[\];", ptx)}
    entries = list(re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(.*?)\{", ptx, re.DOTALL))
    if len(entries) != 1 or re.search(r"\.func\b", ptx):
        raise UnknownPtxError(f"{name}: {len(entries)} kernels, or functions, in one file")
    entry = entries[0]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    if threads is None:
        raise UnknownPtxError(f"{name}: the number of threads is not said")
    function = Function(name, _parameters(entry[2]), shared, shared_nbytes)
    body = re.sub(r"^\s*(\$?[\w$]+):", r"\1:;", _body(ptx, entry.end()), flags=re.MULTILINE)
    function.branch_targets = set(re.findall(r"\bbra(?:\.uni)?\s+(\$?[\w$]+)", body))
    for text in body.split(";"):
        if statement := " ".join(text.split()):
            function.statement(statement)
    return Translation(name, list(function.parameters.values()), int(threads[1]), function.text())
