"""Sizes and durations as people write them. Sizes are binary (1 KiB = 1024 B); bandwidths are
decimal (1 GB = 1e9 B).
"""

from __future__ import annotations

import re

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NBYTES = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_nbytes(text: str) -> int:
    """ "8", "64K" and "16 MiB" to bytes. Raises ValueError for anything else and for zero."""
    match = _NBYTES.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(
            f"{text!r} is not a size: write bytes, or a number with K, M or G, such as 64K"
        )
    return int(match[1]) * _FACTORS[match[2].upper()]


def format_nbytes(nbytes: int) -> str:
    """16777216 to "16 MiB"; a number that is no whole multiple of a unit stays in the next smaller
    one.
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    """Three significant digits in µs, ms or s, whichever leaves a number from 1 to 999 (below a µs:
    µs).
    """
    microseconds = seconds * 1e6
    for unit, factor in (("µs", 1.0), ("ms", 1e3)):
        if microseconds < 999.5 * factor:
            return f"{_three_digits(microseconds / factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_gbps(gbps: float) -> str:
    """GB/s (1e9 bytes) with three significant digits; 1e-5 and less as it is."""
    return _three_digits(gbps) if gbps >= 0.001 else f"{gbps:.1e}" if gbps else "0"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}" if value >= 0.0995 or value == 0 else f"{value:.3g}"
