"""How each PTX instruction becomes C++. A translator takes the function and the instruction, and emits a statement."""

from __future__ import annotations

from collections.abc import Callable

from translate import C_TYPES, Function, Instruction, UnknownPtxError, vector

ORDERS = {
    "acquire": "kAcquire",
    "release": "kRelease",
    "relaxed": "kRelaxed",
    "volatile": "kRelaxed",
}
SYMBOLS = {
    "and": "&",
    "or": "|",
    "xor": "^",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "rem": "%",
}
COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
UNORDERED = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def bits_of(kind: str) -> int:
    return int(kind[1:])


def unsigned(kind: str) -> str:
    """Arithmetic that may wrap is done without a sign: C++ leaves the other undefined."""
    return "u" + kind[1:] if kind[0] == "s" else kind


def arithmetic(f: Function, i: Instruction) -> None:
    if i.type == "pred":
        i.allow_only()
        a, b = (f.value(operand, "pred") for operand in i.operands[1:])
        return f.assign(i, "pred", f"{a} {SYMBOLS[i.name]} {b}")
    if i.name == "mul" and (i.has("wide") or i.has("hi")):
        return wide_product(f, i)
    # Fused or flushed results would be others: .ftz, .sat and .approx are not allowed.
    i.allow_only("lo", "rn")
    if (i.type[0] == "f" and i.name in ("and", "or", "xor", "rem")) or i.type == "f16":
        raise i.unknown()
    kind = i.type if i.name in ("div", "rem") else unsigned(i.type)
    a, b = (f.value(operand, kind) for operand in i.operands[1:])
    if kind[0] != "f" and i.name in ("div", "rem"):
        return f.assign(i, kind, f"ptx::{'quotient' if i.name == 'div' else 'remainder'}({a}, {b})")
    if i.name == "mul" and kind == "u16":
        a = f"uint32_t{{{a}}}"
    f.assign(i, kind, f"{a} {SYMBOLS[i.name]} {b}")


def wide_product(f: Function, i: Instruction) -> None:
    a, b = (f.value(operand, i.type) for operand in i.operands[1:])
    if i.has("wide"):
        i.allow_only("wide")
        wide = WIDER[i.type]
        return f.assign(i, wide, f"{C_TYPES[wide]}{{{a}}} * {C_TYPES[wide]}{{{b}}}")
    i.allow_only("hi")
    wide = {"s32": "int64_t", "u32": "uint64_t", "s64": "ptx::Int128", "u64": "ptx::UInt128"}[
        i.type
    ]
    f.assign(i, i.type, f"({wide}{{{a}}} * {wide}{{{b}}}) >> {bits_of(i.type)}")


def multiply_add(f: Function, i: Instruction) -> None:
    i.allow_only("lo", "wide")
    a, b = (f.value(operand, i.type) for operand in i.operands[1:3])
    if i.has("wide"):
        wide = WIDER[i.type]
        c = f.value(i.operands[3], unsigned(wide))
        product = f"{C_TYPES[wide]}{{{a}}} * {C_TYPES[wide]}{{{b}}}"
        return f.assign(i, wide, f"static_cast<{C_TYPES[unsigned(wide)]}>({product}) + {c}")
    kind = unsigned(i.type)
    a, b, c = (f.value(operand, kind) for operand in i.operands[1:4])
    f.assign(i, kind, f"{a} * {b} + {c}")


def fused(f: Function, i: Instruction) -> None:
    i.allow_only("rn")
    a, b, c = (f.value(operand, i.type) for operand in i.operands[1:4])
    f.assign(i, i.type, f"std::fma({a}, {b}, {c})")


def least_or_greatest(f: Function, i: Instruction) -> None:
    i.allow_only()
    if i.type[0] == "f":
        raise i.unknown()
    a, b = (f.value(operand, i.type) for operand in i.operands[1:])
    f.assign(i, i.type, f"std::{i.name}({a}, {b})")


def shift(f: Function, i: Instruction) -> None:
    i.allow_only()
    kind = i.type if i.name == "shr" else unsigned(i.type)
    a, by = f.value(i.operands[1], kind), f.value(i.operands[2], "u32")
    f.assign(i, kind, f"ptx::{'left' if i.name == 'shl' else 'right'}({a}, {by})")


def negated(f: Function, i: Instruction) -> None:
    i.allow_only()
    if i.name == "not":
        if i.type == "pred":
            return f.assign(i, "pred", f"!{f.value(i.operands[1], 'pred')}")
        return f.assign(i, i.type, f"~{f.value(i.operands[1], i.type)}")
    kind = unsigned(i.type)
    f.assign(i, kind, f"-{f.value(i.operands[1], kind)}")


def magnitude(f: Function, i: Instruction) -> None:
    i.allow_only()
    f.assign(i, i.type, f"std::abs({f.value(i.operands[1], i.type)})")


def selected(f: Function, i: Instruction) -> None:
    i.allow_only()
    a, b = (f.value(operand, i.type) for operand in i.operands[1:3])
    f.assign(i, i.type, f"{f.value(i.operands[3], 'pred')} ? {a} : {b}")


def compared(f: Function, i: Instruction) -> None:
    comparison, kind = i.op[1], i.type
    a, b = (f.value(operand, kind) for operand in i.operands[1:3])
    if comparison in ("nan", "num"):
        code = f"{'' if comparison == 'nan' else '!'}(std::isnan({a}) || std::isnan({b}))"
    elif comparison in UNORDERED:
        code = f"!({a} {UNORDERED[comparison]} {b})"
    elif comparison == "ne" and kind[0] == "f":
        code = f"({a} < {b} || {a} > {b})"
    elif comparison in COMPARISONS:
        code = f"({a} {COMPARISONS[comparison]} {b})"
    else:
        raise i.unknown()
    if (combination := i.op[2]) in ("and", "or", "xor"):
        code = f"({code} {SYMBOLS[combination]} {f.value(i.operands[3], 'pred')})"
    elif len(i.op) != 3:
        raise i.unknown()
    first, *second = i.operands[0].split("|")
    opposite = f" {f.target(second[0], 'pred')} = !{f.target(first, 'pred')};" if second else ""
    f.emit(i, f"{f.target(first, 'pred')} = {code};{opposite}")


def moved(f: Function, i: Instruction) -> None:
    i.allow_only()
    kind = i.type
    if i.operands[0].startswith("{"):
        parts = vector(i.operands[0])
        width = bits_of(kind) // len(parts)
        code = "".join(
            f"{f.target(part, f'b{width}')} = static_cast<uint{width}_t>(whole >> {width * at}); "
            for at, part in enumerate(parts)
        )
        return f.emit(i, f"const auto whole = {f.value(i.operands[1], kind)}; {code}")
    if i.operands[1].startswith("{"):
        parts = vector(i.operands[1])
        width = bits_of(kind) // len(parts)
        terms = [
            f"static_cast<{C_TYPES[kind]}>(static_cast<uint{width}_t>({f.value(part, f'b{width}')})) << {width * at}"
            for at, part in enumerate(parts)
        ]
        return f.assign(i, kind, " | ".join(terms))
    f.assign(i, kind, f.value(i.operands[1], kind))


def converted(f: Function, i: Instruction) -> None:
    if i.op == ["cvt", "rn", "f16x2", "f32"]:
        high, low = (f.value(operand, "f32") for operand in i.operands[1:])
        return f.assign(i, "b32", f"uint32_t{{half_of_float({high})}} << 16 | half_of_float({low})")
    if len(i.types) < 2:
        raise i.unknown()
    to, of = i.types[-2:]
    x = f.value(i.operands[1], of)
    rounding = [part for part in i.op[1:] if part not in (to, of)]
    if to[0] != "f" and of[0] != "f" and not rounding:
        target = f.loaded(i.operands[0], to)
        return f.emit(i, f"{target} = static_cast<{C_TYPES[to]}>({x});")
    known = {
        ("f32", "f16", ""): f"half_to_float({x})",
        ("f16", "f32", "rn"): f"float_to_half({x})",
        ("f64", "f32", ""): f"double{{{x}}}",
        ("f32", "f64", "rn"): f"static_cast<float>({x})",
    }
    code = known.get((to, of, "".join(rounding)))
    if code is None and to[0] == "f" and of[0] in "us" and rounding == ["rn"] and to != "f16":
        code = f"static_cast<{C_TYPES[to]}>({x})"
    if code is None and to[0] in "us" and of in ("f32", "f64") and rounding == ["rzi"]:
        code = f"ptx::truncated<{C_TYPES[to]}>({x})"
    if code is None:
        raise i.unknown()
    code = code.replace("half_to_float", "float_of_half").replace("float_to_half", "half_of_float")
    f.assign(i, to, code)


def bit_field(f: Function, i: Instruction) -> None:
    i.allow_only()
    kind = i.type
    if i.name == "bfe":
        a, at, length = f.value(i.operands[1], kind), *(f.value(o, "u32") for o in i.operands[2:])
        return f.assign(i, kind, f"ptx::field({a}, {at}, {length})")
    a, b = (f.value(operand, kind) for operand in i.operands[1:3])
    at, length = (f.value(operand, "u32") for operand in i.operands[3:])
    f.assign(i, kind, f"ptx::with_field({b}, {a}, {at}, {length})")


def permuted(f: Function, i: Instruction) -> None:
    i.allow_only()
    a, b, selector = (f.value(operand, "b32") for operand in i.operands[1:4])
    f.assign(i, "b32", f"ptx::permuted({a}, {b}, {selector})")


def funnel_shift(f: Function, i: Instruction) -> None:
    i.allow_only("l", "r", "wrap")
    a, b, by = (f.value(operand, "b32") for operand in i.operands[1:4])
    f.assign(i, "b32", f"ptx::funnel_{'left' if i.has('l') else 'right'}({a}, {b}, {by})")


# ---- control


def branch(f: Function, i: Instruction) -> None:
    i.allow_only("uni")
    # A loop that has only polled waits.
    back = "loop.back(); " if i.operands[0] in f.labels else ""
    f.emit(i, f"{back}goto {f.label(i.operands[0])};")


def returned(f: Function, i: Instruction) -> None:
    i.allow_only()
    f.emit(i, "return;")


# ---- memory


def order_of(i: Instruction) -> str | None:
    orders = [ORDERS[part] for part in i.op if part in ORDERS]
    if orders and not i.has("sys") and not i.has("volatile"):
        raise UnknownPtxError(f"an ordered access without system scope: {i.text}")
    return f"Order::{orders[0]}" if orders else None


def space_of(i: Instruction) -> str:
    spaces = [part.split("::")[0] for part in i.op[1:]]
    for space in ("global", "shared", "param"):
        if space in spaces:
            return space
    raise UnknownPtxError(f"memory of no known space: {i.text}")


def load_or_store(f: Function, i: Instruction) -> None:
    plain = [part.split("::")[0] for part in i.op[1:]]
    i.op[1:] = plain
    i.allow_only("global", "shared", "param", "sys", "v2", "v4", *ORDERS)
    is_load = i.name == "ld"
    parts = vector(i.operands[0 if is_load else 1])
    kind, space = i.type, space_of(i)
    if len(parts) != (4 if i.has("v4") else 2 if i.has("v2") else 1):
        raise i.unknown()
    parameter, address = f.address(i.operands[1 if is_load else 0])
    c_type, n = C_TYPES[kind], len(parts)
    if (parameter is not None) != (space == "param"):
        raise i.unknown()
    order = order_of(i)
    if parameter is not None:
        call = f"ptx::load_parameter(parameters + {parameter.offset} + {address}, x);"
    elif space == "shared":
        call = f"shared.{'load' if is_load else 'store'}({address}, x);"
    elif order is None:
        call = f"ptx::{'load' if is_load else 'store'}_plain(loop, {address}, x);"
    else:
        call = f"ptx::{'load' if is_load else 'store'}_ordered(loop, {address}, x, {order});"
    if is_load:
        results = "".join(f" {f.loaded(part, kind)} = x[{at}];" for at, part in enumerate(parts))
        f.emit(i, f"{c_type} x[{n}]; {call}{results}")
    else:
        values = ", ".join(f.value(part, kind) for part in parts)
        f.emit(i, f"const {c_type} x[{n}] = {{{values}}}; {call}")


UPDATES = {"exch": "b", "add": "before + b", "max": "std::max(before, b)", "min": "std::min(before, b)",
           "or": "before | b", "and": "before & b", "xor": "before ^ b"}  # fmt: skip


def atomic(f: Function, i: Instruction) -> None:
    i.allow_only("global", "sys", "gpu", *UPDATES, "acquire", "release", "relaxed")
    updates = [part for part in i.op if part in UPDATES]
    kind, order = unsigned(i.type) if i.has("add") or i.has("exch") else i.type, order_of(i)
    if len(updates) != 1 or order is None or kind[0] == "f":
        raise i.unknown()
    _, address = f.address(i.operands[1])
    c_type = C_TYPES[kind]
    update = f"[b]({c_type} before) -> {c_type} {{ return {UPDATES[updates[0]]}; }}"
    if updates[0] == "exch":
        update = f"[b]({c_type}) -> {c_type} {{ return b; }}"
    f.emit(
        i,
        f"const {c_type} b = {f.value(i.operands[2], kind)}; "
        f"{f.target(i.operands[0], kind)} = ptx::update<{c_type}>(loop, {address}, {order}, {update});",
    )


# ---- threads together


def barrier(f: Function, i: Instruction) -> None:
    if i.op[1:] == ["warp", "sync"]:
        return f.emit(i, f"meet::warp_barrier({f.value(i.operands[0], 'u32')});")
    if i.op[1:] not in (["sync"], ["sync", "aligned"], ["cta", "sync"]) or i.operands != ["0"]:
        raise i.unknown()
    f.emit(i, 'meet::block_barrier("bar.sync");')


def shuffled(f: Function, i: Instruction) -> None:
    i.allow_only("sync", "idx", "bfly", "up", "down")
    kinds = [part for part in i.op if part in ("idx", "bfly", "up", "down")]
    target, *valid = i.operands[0].split("|")
    value = f.value(i.operands[1], "b32")
    by, clamp, mask = (f.value(operand, "u32") for operand in i.operands[2:5])
    flag = f" {f.target(valid[0], 'pred')} = is_valid;" if valid else ""
    f.emit(
        i,
        f"bool is_valid; {f.target(target, 'b32')} = "
        f"ptx::shuffle(ptx::Shuffle::{kinds[0]}, {value}, {by}, {clamp}, {mask}, is_valid);{flag}",
    )


def voted(f: Function, i: Instruction) -> None:
    i.allow_only("sync", "ballot", "any", "all")
    condition, mask = f.value(i.operands[1], "pred"), f.value(i.operands[2], "u32")
    if i.has("ballot"):
        return f.assign(i, "b32", f"meet::ballot({mask}, {condition})")
    code = f"meet::ballot({mask}, {condition}) != 0"
    if i.has("all"):
        code = f"meet::ballot({mask}, !{condition}) == 0"
    f.assign(i, "pred", code)


def reduced(f: Function, i: Instruction) -> None:
    i.allow_only("sync", "max", "min")
    kind, name = i.type, "max" if i.has("max") else "min"
    value, mask = f.value(i.operands[1], kind), f.value(i.operands[2], "u32")
    f.assign(
        i,
        kind,
        f"ptx::reduced({value}, {mask}, [](auto a, auto b) {{ return std::{name}(a, b); }})",
    )


def matrix(f: Function, i: Instruction) -> None:
    """8 x 8 matrices of 16-bit elements between registers and shared memory."""
    i.allow_only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared")
    is_load = i.name == "ldmatrix"
    parts = vector(i.operands[0 if is_load else 1])
    _, address = f.address(i.operands[1 if is_load else 0])
    transposed = "true" if i.has("trans") else "false"
    n = len(parts)
    if is_load:
        results = "".join(f" {f.target(part, 'b32')} = x[{at}];" for at, part in enumerate(parts))
        return f.emit(
            i, f"uint32_t x[{n}]; ptx::load_matrices(shared, {address}, x, {transposed});{results}"
        )
    values = ", ".join(f.value(part, "b32") for part in parts)
    f.emit(
        i,
        f"const uint32_t x[{n}] = {{{values}}}; ptx::store_matrices(shared, {address}, x, {transposed});",
    )


def converted_address(f: Function, i: Instruction) -> None:
    i.allow_only("to", "global", "shared")
    f.assign(i, i.type, f.value(i.operands[1], i.type))


TRANSLATORS: dict[str, Callable[[Function, Instruction], None]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "and", "or", "xor"), arithmetic),
    **dict.fromkeys(("min", "max"), least_or_greatest),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("neg", "not"), negated),
    **dict.fromkeys(("bfe", "bfi"), bit_field),
    **dict.fromkeys(("ld", "st"), load_or_store),
    **dict.fromkeys(("ldmatrix", "stmatrix"), matrix),
    **dict.fromkeys(("bar", "barrier"), barrier),
    "mad": multiply_add,
    "fma": fused,
    "abs": magnitude,
    "selp": selected,
    "setp": compared,
    "mov": moved,
    "cvt": converted,
    "cvta": converted_address,
    "prmt": permuted,
    "shf": funnel_shift,
    "bra": branch,
    "ret": returned,
    "atom": atomic,
    "shfl": shuffled,
    "vote": voted,
    "redux": reduced,
}
