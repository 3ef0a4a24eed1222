"""The architecture, held by a test: who may include or import whom, sizes, documented variables.

Each rule is a function from a source tree to a list of complaints. The first half of the tests runs
the rules on this repository, the second on small trees with a planted fault, so that a rule that
sees nothing is seen.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Bottom first: a folder of csrc includes itself and the folders before it.
CSRC_FOLDERS = (
    "base",
    "topology",
    "bootstrap",
    "sync",
    "memory",
    "kernels",
    "lane",
    "collectives",
    "engine",
    "device",
    "torch",
    "bindings",
)
TORCH_FOLDERS = ("torch", "bindings")
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|(Python|pybind11)\.h$")
CPP_SUFFIXES = (".h", ".inl", ".cpp", ".cuh", ".cu")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# Bottom first: a module of pycoll imports those before it. `__init__` is the public face: it may
# import every module, and only the last layers may take names from it, as a user does. Private
# modules (_version, _build, _C) and errors lie below all of them and import only each other.
PYCOLL_MODULES = (
    "options",
    "tuning",
    "flight_recorder",
    "ops",
    "backend",
    "tags",
    "collectives",
    "groups",
    "symmetric",
    "reference",
    "testing",
    "bucket",
    "parallel",
    "triton_kernels",
    "bench",
    "cli",
    "examples",
)
FACE = "__init__"
USERS_OF_THE_FACE = ("bench", "cli", "examples")
WITHOUT_TORCH = ("__init__.py", "options.py")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

VARIABLE = re.compile(r"\bPYCOLL_[A-Z0-9_]*[A-Z0-9]\b")
MACRO = re.compile(r"^\s*#\s*define\s+(PYCOLL_\w+)|-D(PYCOLL_\w+)", re.MULTILINE)

Rule = Callable[[Path], list[str]]


# --- csrc: includes --------------------------------------------------------------------------------


def csrc_files(root: Path) -> list[Path]:
    return sorted(p for p in (root / "csrc").rglob("*") if p.suffix in CPP_SUFFIXES)


def includes(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, opening quote and name of every #include."""
    text = file.read_text(encoding="utf-8")
    for match in INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start(2)) + 1, match[1], match[2]


def include_order(root: Path) -> list[str]:
    """Own headers are named from csrc's root and lie in the same folder or one further down."""
    complaints = []
    for file in csrc_files(root):
        name = file.relative_to(root / "csrc")
        folder = name.parts[0]
        if folder not in CSRC_FOLDERS:
            complaints.append(f"csrc/{name}: lies in none of the folders {', '.join(CSRC_FOLDERS)}")
            continue
        allowed = CSRC_FOLDERS[: CSRC_FOLDERS.index(folder) + 1]
        for line, quote, header in includes(file):
            where = f"csrc/{name}:{line}: {header}"
            is_own = (root / "csrc" / header).is_file() and ".." not in header
            if quote == '"' and not is_own:
                complaints.append(f'{where}: "…" is for files of csrc, named from its root')
            elif quote == "<" and is_own:
                complaints.append(f'{where}: own headers are included with "…"')
            elif is_own and header.split("/")[0] not in allowed:
                complaints.append(f"{where}: {folder} lies below {header.split('/')[0]}")
    return complaints


def torch_stays_on_top(root: Path) -> list[str]:
    """torch and Python headers are included in csrc/torch and csrc/bindings, and by no device code."""
    complaints = []
    for file in csrc_files(root):
        name = file.relative_to(root / "csrc")
        is_device_code = file.suffix in (".cuh", ".cu")
        if name.parts[0] in TORCH_FOLDERS and not is_device_code:
            continue
        for line, quote, header in includes(file):
            is_torch_glue = quote == '"' and header.split("/")[0] in TORCH_FOLDERS
            if is_torch_glue or (quote == "<" and TORCH_HEADER.match(header)):
                complaints.append(
                    f"csrc/{name}:{line}: {header}: torch and Python stay out of here"
                )
    return complaints


# --- pycoll: imports -------------------------------------------------------------------------------


def pycoll_files(root: Path) -> list[Path]:
    return sorted((root / "pycoll").rglob("*.py"))


def module_of(name: str) -> str:
    """The entry of PYCOLL_MODULES that a dotted name such as pycoll.parallel.ddp belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else FACE


def is_foundation(module: str) -> bool:
    return module == "errors" or (module.startswith("_") and module != FACE)


def is_module(root: Path, name: str) -> bool:
    path = root.joinpath(*name.split("."))
    return (
        path.is_dir() or path.with_suffix(".py").is_file() or name in ("pycoll._C", "pycoll._build")
    )


def imported_names(root: Path, file: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted module of every import, wherever it stands in the file."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield node.lineno, inner if is_module(root, inner) else origin
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            literals = [arg for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(literal.value)) for literal in literals)


def import_complaint(importer: str, imported: str) -> str | None:
    if importer in (FACE, imported) or is_foundation(imported):
        return None
    if imported == FACE:
        if importer in USERS_OF_THE_FACE:
            return None
        return "names are imported from the module that defines them, not from pycoll itself"
    if imported not in PYCOLL_MODULES:
        return f"{imported} has no place among {', '.join(PYCOLL_MODULES)}"
    order = PYCOLL_MODULES.index
    if is_foundation(importer) or order(imported) > order(importer):
        return f"{importer} lies below {imported}"
    return None


def import_order(root: Path) -> list[str]:
    """A module imports those below it; imports within functions count."""
    complaints = []
    for file in pycoll_files(root):
        name = file.relative_to(root)
        importer = name.with_suffix("").parts[1]
        if importer not in (FACE, *PYCOLL_MODULES) and not is_foundation(importer):
            complaints.append(f"{name}: {importer} has no place among {', '.join(PYCOLL_MODULES)}")
            continue
        for line, dotted in imported_names(root, file, ast.parse(file.read_text(encoding="utf-8"))):
            if dotted.split(".")[0] != "pycoll":
                continue
            if complaint := import_complaint(importer, module_of(dotted)):
                complaints.append(f"{name}:{line}: {dotted}: {complaint}")
    return complaints


def statements_run_at_import(body: list[ast.AST]) -> Iterator[ast.AST]:
    """What a module executes when it is imported: not its functions, not `if TYPE_CHECKING`."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        for field in ("body", "orelse", "handlers", "finalbody"):
            yield from statements_run_at_import(getattr(statement, field, []))


def torch_is_imported_late(root: Path) -> list[str]:
    """`import pycoll` and its options cost no import of torch."""
    complaints = []
    for file in (root / "pycoll" / name for name in WITHOUT_TORCH):
        if not file.is_file():
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for statement in statements_run_at_import(tree.body):
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                names = imported_names(root, file, statement)
                if any(name.split(".")[0] == "torch" for _, name in names):
                    complaints.append(f"pycoll/{file.name}:{statement.lineno}: imports torch")
    return complaints


# --- sizes and variables ---------------------------------------------------------------------------


def sizes(root: Path) -> list[str]:
    """Files and functions that one can read in one go."""
    complaints = []
    for file in csrc_files(root) + pycoll_files(root):
        name = file.relative_to(root)
        text = file.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            complaints.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    complaints.append(
                        f"{name}:{node.lineno}: {node.name} has {lines} lines, "
                        f"at most {MAX_FUNCTION_LINES}"
                    )
    return complaints


def documented_variables(root: Path) -> list[str]:
    """Every PYCOLL_… variable stands in the table of csrc/base/env.h or in docs/."""
    sources = csrc_files(root) + pycoll_files(root)
    texts = {file: file.read_text(encoding="utf-8") for file in sources}
    setup = root / "setup.py"
    defining = [*texts.values(), *([setup.read_text(encoding="utf-8")] if setup.is_file() else [])]
    macros = {name for text in defining for match in MACRO.findall(text) for name in match}
    prose = [file.read_text(encoding="utf-8") for file in (root / "docs").rglob("*.md")]
    table = texts.get(root / "csrc/base/env.h", "")
    # A row of the table, or a line of a comment, begins with the name's surroundings, never with code.
    prose += [line for line in table.splitlines() if line.lstrip().startswith(("//", '{"PYCOLL_'))]
    documented = {name for text in prose for name in VARIABLE.findall(text)}
    return [
        f"{file.relative_to(root)}: {name} is documented neither in csrc/base/env.h nor in docs/"
        for file, text in texts.items()
        for name in sorted(set(VARIABLE.findall(text)) - macros - documented)
    ]


CSRC_RULES: tuple[Rule, ...] = (include_order, torch_stays_on_top)
PYCOLL_RULES: tuple[Rule, ...] = (import_order, torch_is_imported_late)
COMMON_RULES: tuple[Rule, ...] = (sizes, documented_variables)


# --- this repository -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", CSRC_RULES, ids=lambda rule: rule.__name__)
def test_csrc(rule: Rule) -> None:
    files = csrc_files(ROOT)
    if not files:
        pytest.skip("csrc/ has no sources yet")
    assert any(quote == '"' for file in files for _, quote, _ in includes(file))
    assert rule(ROOT) == []


@pytest.mark.parametrize("rule", PYCOLL_RULES, ids=lambda rule: rule.__name__)
def test_pycoll(rule: Rule) -> None:
    assert pycoll_files(ROOT)
    assert rule(ROOT) == []


@pytest.mark.parametrize("rule", COMMON_RULES, ids=lambda rule: rule.__name__)
def test_everywhere(rule: Rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize("module", ["pycoll", "pycoll.options"])
def test_importing_does_not_load_torch(module: str) -> None:
    if not is_module(ROOT, module):
        pytest.skip(f"{module} is not there yet")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- planted faults --------------------------------------------------------------------------------

SOUND_TREE = {
    "csrc/base/env.h": "// | PYCOLL_SPIN_US | 50 | longest spin |\n#define PYCOLL_CHECK(x) (x)\n",
    "csrc/base/env.cpp": '#include "base/env.h"\n#include <cstdlib>\nauto x = "PYCOLL_SPIN_US";\n',
    "csrc/memory/segment.h": '#include <memory>\n#include "base/env.h"\n',
    "csrc/kernels/cuda/copy.cuh": '#include "base/env.h"\n#include <cuda_runtime.h>\n',
    "csrc/torch/work.cpp": '#include "memory/segment.h"\n#include <torch/csrc/Export.h>\n',
    "csrc/bindings/module.cpp": "#include <pybind11/pybind11.h>\n",
    "docs/memory.md": "PYCOLL_LIMIT: the limit\n",
    "pycoll/__init__.py": "from pycoll._version import __version__\n",
    "pycoll/_version.py": "__version__ = '1'\n",
    "pycoll/options.py": "import os\nlimit = os.environ.get('PYCOLL_LIMIT')\n",
    "pycoll/ops.py": "import torch\nfrom pycoll import options\nfrom pycoll.options import limit\n",
    "pycoll/parallel/ddp.py": "from pycoll.ops import x\nfrom . import buckets\n",
    "pycoll/parallel/buckets.py": "",
    "pycoll/examples/demo.py": "import pycoll\nfrom pycoll.parallel.ddp import y\n",
}

# rule, file, its planted text, what the complaint has to name
FAULTS = [
    (include_order, "csrc/base/up.cpp", '#include "memory/segment.h"\n', "base lies below memory"),
    (include_order, "csrc/memory/near.cpp", '#include "segment.h"\n', "named from its root"),
    (include_order, "csrc/torch/far.cpp", '#include "../base/env.h"\n', "named from its root"),
    (include_order, "csrc/base/far.cpp", '#include "tests/sim/peer.h"\n', "named from its root"),
    (include_order, "csrc/memory/angle.cpp", "  #  include <base/env.h>\n", 'with "…"'),
    (include_order, "csrc/util/new.h", "", "none of the folders"),
    (include_order, "csrc/loose.h", "", "none of the folders"),
    (torch_stays_on_top, "csrc/base/t.h", "#include <c10/util/Half.h>\n", "csrc/base/t.h:1"),
    (torch_stays_on_top, "csrc/engine/p.h", "\n#include <Python.h>\n", "csrc/engine/p.h:2"),
    (torch_stays_on_top, "csrc/torch/k.cuh", "#include <ATen/ATen.h>\n", "csrc/torch/k.cuh:1"),
    (import_order, "pycoll/options.py", "from pycoll.ops import x\n", "options lies below ops"),
    (import_order, "pycoll/bucket.py", "def f():\n    import pycoll.cli\n", "bucket.py:2"),
    (import_order, "pycoll/bucket.py", "def f():\n    from .bench import x\n", "below bench"),
    (import_order, "pycoll/parallel/dp.py", "from ..cli import x\n", "parallel lies below cli"),
    (import_order, "pycoll/ops.py", "from pycoll import examples\n", "ops lies below examples"),
    (import_order, "pycoll/ops.py", "from pycoll import all_reduce\n", "that defines them"),
    (import_order, "pycoll/ops.py", "import_module('pycoll.cli')\n", "ops lies below cli"),
    (import_order, "pycoll/_version.py", "import pycoll.options\n", "_version lies below options"),
    (import_order, "pycoll/helpers.py", "", "helpers has no place"),
    (torch_is_imported_late, "pycoll/__init__.py", "import torch\n", "__init__.py:1"),
    (
        torch_is_imported_late,
        "pycoll/options.py",
        "try:\n    0\nexcept E:\n    from torch import x\n",
        ":4",
    ),
    (sizes, "csrc/base/long.cpp", "\n" * 501, "501 lines"),
    (sizes, "pycoll/ops.py", "x = 1\n" * 501, "501 lines"),
    (sizes, "pycoll/ops.py", "class A:\n  def f(self):\n" + "    x = 1\n" * 60, "f has 61 lines"),
    (documented_variables, "csrc/base/v.cpp", 'getenv("PYCOLL_NEW")\n', "PYCOLL_NEW"),
    (documented_variables, "pycoll/ops.py", "'set PYCOLL_OTHER=1'\n", "PYCOLL_OTHER"),
    (documented_variables, "csrc/base/env.h", 'getenv("PYCOLL_SPIN_US")\n', "PYCOLL_SPIN_US"),
]


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "rule", [*CSRC_RULES, *PYCOLL_RULES, *COMMON_RULES], ids=lambda rule: rule.__name__
)
def test_a_sound_tree_passes(rule: Rule, tmp_path: Path) -> None:
    plant(tmp_path, SOUND_TREE)
    assert rule(tmp_path) == []


@pytest.mark.parametrize(
    ("rule", "file", "text", "named"),
    FAULTS,
    ids=[f"{rule.__name__}: {named}" for rule, _, _, named in FAULTS],
)
def test_a_planted_fault_is_caught(
    rule: Rule, file: str, text: str, named: str, tmp_path: Path
) -> None:
    plant(tmp_path, SOUND_TREE | {file: text})
    complaints = rule(tmp_path)
    assert complaints, "the planted fault was not seen"
    assert any(named in complaint for complaint in complaints), complaints
