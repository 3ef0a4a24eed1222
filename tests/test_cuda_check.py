"""What the compiler makes of the CUDA kernels (tools/cuda_check.py), where nvcc and nvdisasm are."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools/cuda_check.py"
ARCH = "sm_90a"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cuda_check = load_script()

MESSAGES = """
ptxas info    : Compiling entry function 'kernel_a' for 'sm_90a'
ptxas info    : Function properties for kernel_a
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 576 bytes smem
ptxas info    : Compiling entry function 'kernel_b' for 'sm_90a'
ptxas info    : Function properties for kernel_b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers
"""

# As nvdisasm writes it. The loop goes from 0x10 to 0x50.
DISASSEMBLY = """
\t.section\t.text.kernel_a,"ax",@progbits
.text.kernel_a:
\t//## File "/x/bucket.cuh", line 7
        /*0000*/                   LDG.E.U8 R0, desc[UR4][R2.64] ;
.L_x_1:
\t//## File "/x/peer_access.cuh", line 9 inlined at "/x/edges.cuh", line 40
        /*0010*/                   LDG.E.U16 R0, desc[UR4][R2.64] ;
\t//## File "/x/peer_access.cuh", line 9 inlined at "/x/ring.cuh", line 41
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 STG.E desc[UR4][R2.64], R4 ;
        /*0040*/                   LDG.E.64.STRONG.SYS R8, desc[UR4][R2.64] ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_resources_are_read() -> None:
    kernels = cuda_check.resources(MESSAGES)
    first, second = kernels["kernel_a"], kernels["kernel_b"]
    assert (first.registers, first.spills, first.stack, first.shared) == (42, 20, 16, 576)
    assert (second.registers, second.spills, second.stack, second.shared) == (30, 0, 0, 0)
    assert any("20 bytes spilled" in text for text in first.complaints())


def test_narrow_accesses_in_loops_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=DISASSEMBLY)
    monkeypatch.setattr(cuda_check, "nvdisasm", lambda: "nvdisasm")
    monkeypatch.setattr(cuda_check.subprocess, "run", lambda *_, **__: done)
    function = cuda_check.functions_of(Path("any.cubin"))["kernel_a"]
    assert function.loops() == [(0x10, 0x50)]
    kernel = cuda_check.Kernel("Any")
    cuda_check.note_accesses(kernel, function)
    assert kernel.edge_widths == {2}
    assert kernel.body_widths == {16, 4}
    assert kernel.ordered_widths == {8}
    # The byte before the loop and the edge are allowed; the store of 4 bytes is not.
    assert len(kernel.narrow) == 1
    assert "ring.cuh:41" in kernel.narrow[0]


def test_a_loop_without_vectors_is_found() -> None:
    kernel = cuda_check.Kernel("SomeKernel<Float32>", body_widths={8})
    assert any("no access of 16 bytes" in text for text in kernel.complaints())
    assert not cuda_check.Kernel("BarrierKernel").complaints()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not in PATH")
@pytest.mark.parametrize(("archs", "named"), [("sm_90a,sm_99", "sm_99"), ("90a", "90a"), (",", "")])
def test_unknown_architectures_are_refused(
    archs: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cuda_check.py", "--archs", archs])
    monkeypatch.setattr(cuda_check, "check_arch", lambda *_: pytest.fail("it compiles"))
    with pytest.raises(SystemExit, match="2"):
        cuda_check.main()
    said = capsys.readouterr().err
    assert f"--archs names {named!r}; this nvcc compiles for " in said
    assert "sm_80" in said
    cuda_check.check_archs(["sm_80", "sm_90a", "sm_100"])


@pytest.mark.slow
def test_the_kernels(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not in PATH: CUDA kernels are not compiled")
    try:
        cuda_check.nvdisasm()
    except SystemExit as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--archs", ARCH, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "AllReduceRingKernel" in done.stdout
    assert "0 complaints" in done.stdout
