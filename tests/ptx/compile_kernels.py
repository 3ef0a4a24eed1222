"""Compiles kernels of pycoll.triton_kernels without a GPU: a program, so that another Triton than this process's can
do it.

    python compile_kernels.py FOLDER < specifications.json

A specification: name (of the files), module and kernel, signature (a type for each argument, "constexpr" for
constants), constants, aligned (arguments that are multiples of 16), num_warps, arch. FOLDER gets NAME.ptx, NAME.cubin
and NAME.json (bytes of shared memory, Triton's version).
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def compile_one(what: dict[str, Any], folder: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(what["module"]), what["kernel"])
    signature = what["signature"]
    names = list(signature)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=what["constants"],
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in what["aligned"]},
    )
    options = {"num_warps": what["num_warps"], "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", what["arch"], 32), options=options)
    (folder / f"{what['name']}.ptx").write_text(compiled.asm["ptx"], encoding="utf-8")
    (folder / f"{what['name']}.cubin").write_bytes(compiled.asm["cubin"])
    facts = {"shared": compiled.metadata.shared, "triton": triton.__version__}
    (folder / f"{what['name']}.json").write_text(json.dumps(facts), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    for what in json.load(sys.stdin):
        compile_one(what, folder)


if __name__ == "__main__":
    main()
