"""The translator from PTX to C++ (tests/ptx): what it does not know raises, and what it knows computes as PTX says."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "ptx"
sys.path.insert(0, str(FOLDER))
from translate import UnknownPtxError, translate  # noqa: E402

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u32 kernel_param_1
)
.reqntid 64
{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
"""


def translated(body: str) -> str:
    return translate(HEAD + body + "\nret;\n}\n", "kernel", 0).source


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.ftz.f32 %r1, %r2, %r3;",
        "mul.rn.f32x2 %rd1, %rd2, %rd3;",
        "div.full.f32 %r1, %r2, %r3;",
        "fma.rn.ftz.f32 %r1, %r2, %r3, %r4;",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r3;",
        "min.f32 %r1, %r2, %r3;",
        "atom.global.gpu.release.exch.b32 %r1, [ %rd1 + 0 ], %r2;",
        "atom.global.sys.release.cas.b32 %r1, [ %rd1 + 0 ], %r2, %r3;",
        "ld.global.gpu.acquire.b32 %r1, [ %rd1 + 0 ];",
        "ld.global.nc.b32 %r1, [ %rd1 + 0 ];",
        "ld.local.b32 %r1, [ %rd1 + 0 ];",
        "ld.b32 %r1, [ %rd1 + 0 ];",
        "bar.sync 1, 32;",
        "mov.u32 %r1, %clock;",
        "mov.u32 %r1, undeclared;",
        "cp.async.ca.shared.global [ %r1 ], [ %rd1 ], 16;",
        "fence.acq_rel.sys;",
        ".local .b8 depot[16];",
    ],
)
def test_what_is_unknown_raises(instruction: str) -> None:
    with pytest.raises(UnknownPtxError):
        translated(instruction)


def test_two_kernels_raise() -> None:
    with pytest.raises(UnknownPtxError, match="2 kernels"):
        translate((HEAD + "ret;\n}\n") * 2, "kernel", 0)


def test_parameters_lie_where_ptx_says() -> None:
    translation = translate(HEAD + "ret;\n}\n", "kernel", 0)
    assert [(it.offset, it.nbytes) for it in translation.parameters] == [(0, 8), (8, 4)]
    assert translation.num_threads == 64


def test_orders_are_kept() -> None:
    source = translated(
        "@%p1 atom.global.sys.release.exch.b64 %rd1, [ %rd2 + 8 ], %rd3;\n"
        "@!%p1 ld.global.sys.acquire.b64 %rd1, [ %rd2 + 0 ];\n"
        "atom.global.sys.relaxed.add.u32 %r1, [ %rd2 + 0 ], %r2;\n"
        "st.global.v2.b64 [ %rd2 + 16 ], { %rd1, %rd3 };"
    )
    assert "if (r_p1) " in source
    assert "if (!r_p1) " in source
    assert source.count("Order::kRelease") == 1
    assert source.count("Order::kAcquire") == 1
    assert source.count("Order::kRelaxed") == 1
    assert "store_plain(loop, " in source


# Instructions, the registers before, and what %rd8 holds afterwards.
COMPUTED = [
    ("mov.b32 %r1, 0f43E00000; cvt.u64.u32 %rd8, %r1;", 0x43E00000),
    ("mov.b32 %r1, -8; shr.s32 %r2, %r1, 1; cvt.s64.s32 %rd8, %r2;", -4),
    ("mov.b32 %r1, -8; shr.u32 %r2, %r1, 28; cvt.u64.u32 %rd8, %r2;", 15),
    ("mov.b32 %r1, 1; shl.b32 %r2, %r1, 32; cvt.u64.u32 %rd8, %r2;", 0),
    ("mov.b32 %r1, 2147483647; add.s32 %r2, %r1, 1; cvt.s64.s32 %rd8, %r2;", -(2**31)),
    ("mov.b32 %r1, -7; rem.s32 %r2, %r1, 3; cvt.s64.s32 %rd8, %r2;", -1),
    ("mov.b32 %r1, -7; div.s32 %r2, %r1, 2; cvt.s64.s32 %rd8, %r2;", -3),
    ("mov.b32 %r1, -2; mul.wide.s32 %rd8, %r1, 3;", -6),
    ("mov.b32 %r1, -2; mul.wide.u32 %rd8, %r1, 3;", 3 * (2**32 - 2)),
    ("mov.b32 %r1, -2; mov.b64 %rd1, 100; mad.wide.s32 %rd8, %r1, 8, %rd1;", 84),
    ("mov.b64 %rd1, -3; mul.hi.u64 %rd8, %rd1, 2;", 1),
    ("mov.b32 %r1, 240; bfe.s32 %r2, %r1, 4, 4; cvt.s64.s32 %rd8, %r2;", -1),
    ("mov.b32 %r1, 240; bfe.u32 %r2, %r1, 4, 3; cvt.u64.u32 %rd8, %r2;", 7),
    ("mov.b32 %r1, 5; mov.b32 %r2, 0; bfi.b32 %r3, %r1, %r2, 8, 2; cvt.u64.u32 %rd8, %r3;", 256),
    ("mov.b32 %r1, 16909060; prmt.b32 %r2, %r1, 0, 291; cvt.u64.u32 %rd8, %r2;", 0x04030201),
    ("mov.b16 %rs1, -1; cvt.u32.u16 %r1, %rs1; cvt.u64.u32 %rd8, %r1;", 65535),
    ("mov.b16 %rs1, -1; cvt.s32.s16 %r1, %rs1; cvt.s64.s32 %rd8, %r1;", -1),
    (
        "mov.b32 %r1, 0f3F800001; cvt.rn.f16x2.f32 %r2, %r1, 0fC0000000; cvt.u64.u32 %rd8, %r2;",
        0x3C00C000,
    ),
    ("mov.b32 %r1, 0f7FC00000; setp.neu.f32 %p1, %r1, %r1; selp.b64 %rd8, 1, 2, %p1;", 1),
    ("mov.b32 %r1, 0f7FC00000; setp.lt.f32 %p1, %r1, %r1; selp.b64 %rd8, 1, 2, %p1;", 2),
    ("mov.b32 %r1, 0f40600000; cvt.rzi.s32.f32 %r2, %r1; cvt.s64.s32 %rd8, %r2;", 3),
    ("setp.lt.s32 %p1|%p2, -1, 0; selp.b64 %rd8, 1, 2, %p2;", 2),
    ("mov.b32 %r1, 7; mov.b32 %r2, 9; mov.b64 %rd8, {%r1, %r2};", 9 << 32 | 7),
    ("ld.param.s32 %rd8, [kernel_param_1];", -5),
    ("ld.param.u32 %rd8, [kernel_param_1];", 2**32 - 5),
]


def test_instructions_compute(tmp_path: Path) -> None:
    """Each as a function, that stores %rd8 where its first parameter points to: built once, called for all."""
    parts = ['#include "ptx_runtime.h"\n', "namespace pycoll::sim {\n"]
    for i, (body, _) in enumerate(COMPUTED):
        text = HEAD + body.replace("; ", ";\n") + "\nret;\n}\n"
        parts.append(translate(text, f"compute_{i}", 0).source.replace("  return", "  "))
        end = parts[-1].rindex("}")
        store = "std::memcpy(*reinterpret_cast<void* const*>(parameters), &r_rd8, 8);\n"
        parts[-1] = parts[-1][:end].replace("{ return; }", "").rstrip() + "\n" + store + "}\n"
        parts.append(f'extern "C" void call_{i}(const std::byte* p) {{ compute_{i}(p); }}\n')
    source, library = tmp_path / "computed.cpp", tmp_path / "computed.so"
    source.write_text("\n".join([*parts, "}"]), encoding="utf-8")
    include = [
        f"-iquote{FOLDER}",
        f"-iquote{FOLDER.parent}/sim",
        f"-iquote{FOLDER.parent}/sim/replace",
    ]
    include += [f"-iquote{FOLDER.parents[1]}/csrc"]
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-w",
        "-fPIC",
        "-shared",
        "-Wl,--unresolved-symbols=ignore-all",
    ]
    subprocess.run([*command, *include, str(source), "-o", str(library)], check=True, timeout=300)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL | 1)
    for i, (body, expected) in enumerate(COMPUTED):
        result = ctypes.c_int64(0)
        parameters = (ctypes.c_char * 16)()
        ctypes.memmove(parameters, (ctypes.c_uint64 * 1)(ctypes.addressof(result)), 8)
        ctypes.memmove(ctypes.addressof(parameters) + 8, (ctypes.c_int32 * 1)(-5), 4)
        getattr(loaded, f"call_{i}")(parameters)
        assert result.value == (expected + 2**63) % 2**64 - 2**63, body
