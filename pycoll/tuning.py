"""The table of algorithms that was measured on this machine: where it lies, how it is read and written.

A JSON file: ``{"format": 1, "machine": {"cpu": …, "usable_cores": …}, "rows": [{"world_size": 2, "collective":
"all_reduce", "algorithm": "one_shot", "most_nbytes": 32768}, …]}``. For a group of ``world_size`` ranks the
first row of a collective whose ``most_nbytes`` (of a rank's tensor; null: any) is large enough says which
algorithm it takes; what has no row keeps the library's own choice. ``pycoll tune-collectives`` writes it.

``PYCOLL_TUNING`` names the file that is used, or is ``off``. Without it the file in the user's cache folder is
used if it was measured on such a machine. Ranks whose tables differ raise when they make a group.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PYCOLL_TUNING"
DEVICE_VARIABLE = "PYCOLL_CUDA_TUNING"
OFF = "off"
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One line of the table; `most_nbytes` None: any size.

    The class checks nothing: what the names mean is known to the compiled part, which refuses what it does not know
    when a group is made.
    """

    world_size: int
    collective: str
    algorithm: str
    most_nbytes: int | None

    def __str__(self) -> str:
        limit = "any" if self.most_nbytes is None else self.most_nbytes
        return f"{self.world_size} {self.collective} {self.algorithm} {limit}"


def default_path() -> Path:
    """``$XDG_CACHE_HOME/pycoll/tuning.json``, by default below ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "pycoll" / "tuning.json"


def machine() -> dict[str, Any]:
    """What a table is measured for."""
    return {"cpu": cpu_model(), "usable_cores": len(os.sched_getaffinity(0))}


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def save(rows: Sequence[Row], path: Path, **more: Any) -> None:
    """Writes the table, and what else is worth keeping of how it was measured. A reader never sees half of it."""
    whole = {"format": FORMAT, "machine": machine(), "rows": [asdict(row) for row in rows], **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a file, and the machine they were measured on.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table; the message names the file and the remedy.
    """
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
        if whole["format"] != FORMAT:
            raise ValueError(f"its format is {whole['format']!r}, not {FORMAT}")
        return [Row(**row) for row in whole["rows"]], dict(whole["machine"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no tuning table ({type(error).__name__}: {error}); measure it anew with "
            f"`pycoll tune-collectives`, or set {VARIABLE}={OFF}"
        ) from None


def as_text(rows: Sequence[Row]) -> str:
    """What csrc/collectives/tuning.h reads."""
    return "; ".join(str(row) for row in rows)


def current() -> str:
    """The table for groups that are made now, as text; empty without one. A problem is a text that begins with "!":
    the compiled part raises it on all ranks, where an exception here would leave the others waiting.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen == OFF:
        return ""
    path = Path(chosen) if chosen else default_path()
    try:
        if not chosen and not path.is_file():
            return ""
        rows, measured_on = load(path)
    except OSError as error:
        name = VARIABLE if chosen else "the tuning table"
        return f"!{name}={path} cannot be read ({error.strerror}); name a file, or set {VARIABLE}={OFF}"
    except ValueError as error:
        return f"!{error}"
    if not chosen and measured_on != machine():
        return ""
    return as_text(rows)


def current_for_devices() -> str:
    """The same for kernels of CUDA tensors: what csrc/device/selection.h reads.

    ``PYCOLL_CUDA_TUNING`` names a JSON file ``{"format": 1, "rows": [{"architecture": 90, "world_size": 8,
    "collective": "all_reduce", "algorithm": "one_shot", "num_blocks": 8, "most_nbytes": 65536}, …]}``; null as
    ``world_size`` or ``most_nbytes`` is any. Rows for other architectures do no harm.
    """
    chosen = os.environ.get(DEVICE_VARIABLE, "")
    if chosen in ("", OFF):
        return ""
    try:
        whole = json.loads(Path(chosen).read_text(encoding="utf-8"))
        if whole["format"] != FORMAT:
            raise ValueError(f"its format is {whole['format']!r}, not {FORMAT}")
        if not isinstance(whole["rows"], list):
            raise ValueError(f"rows is {type(whole['rows']).__name__}, and not a list")
        return "; ".join(_device_row(i, row) for i, row in enumerate(whole["rows"]))
    except OSError as error:
        return f"!{DEVICE_VARIABLE}={chosen} cannot be read ({error.strerror}); name a file, or unset it"
    except (ValueError, KeyError, TypeError) as error:
        return (
            f"!{DEVICE_VARIABLE}={chosen} is no tuning table ({type(error).__name__}: {error}); "
            "measure it anew, or unset it"
        )


# Of a row's numbers, whether null is one of their values.
_DEVICE_NUMBERS = {
    "architecture": False,
    "world_size": True,
    "num_blocks": False,
    "most_nbytes": True,
}
_DEVICE_NAMES = ("collective", "algorithm")


def _device_row(index: int, row: Any) -> str:
    """What the names mean is known to the compiled part."""
    columns = sorted((*_DEVICE_NUMBERS, *_DEVICE_NAMES))
    if not isinstance(row, dict) or sorted(row) != columns:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"rows[{index}] has {found}, and not {columns}")
    for key, may_be_null in _DEVICE_NUMBERS.items():
        value = row[key]
        if (value is None and may_be_null) or (type(value) is int and 0 <= value < 2**63):
            continue
        or_null = " or null" if may_be_null else ""
        raise ValueError(f"rows[{index}].{key} is {value!r}, and not a whole number{or_null}")
    for key in _DEVICE_NAMES:
        if not str(row[key]).isidentifier():
            raise ValueError(f"rows[{index}].{key} is {row[key]!r}, and not a name")
    values = {key: "any" if value is None else value for key, value in row.items()}
    return (
        f"{values['architecture']} {values['world_size']} {values['collective']} "
        f"{values['algorithm']} {values['num_blocks']} {values['most_nbytes']}"
    )
