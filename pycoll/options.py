"""What a group can be told when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Options:
    """Options of one group, for ``init_process_group(pg_options=...)`` and ``new_group(pg_options=...)``.

    Every rank of the group passes equal ones (the timeout excepted); ranks that disagree raise while
    the group is made.

    Attributes:
        algorithm: ``"auto"``, or the name of an algorithm (``pycoll.algorithm_names()``) for those
            collectives that have one of that name; the others keep their own choice. ``"ring"``
            gives up the fixed order of additions. None: ``PYCOLL_ALGORITHM``, else ``"auto"``.
        timeout: how long an operation may take before it raises. None: the group's, as torch was told.
        debug: ``"OFF"``, ``"WARN"``, ``"INFO"`` or ``"DETAIL"``: what is logged to stderr by the
            whole process from now on. None: ``PYCOLL_DEBUG``, else ``"WARN"``.

    Raises:
        ValueError: an attribute is out of its range.
        TypeError: an attribute is of another type.
    """

    algorithm: str | None = None
    timeout: timedelta | None = None
    debug: str | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None and not isinstance(self.algorithm, str):
            raise TypeError(f"algorithm is {self.algorithm!r}, but must be a name, such as 'ring'")
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"timeout is {self.timeout!r}, but must be a datetime.timedelta, "
                "such as timedelta(seconds=30)"
            )
        if self.timeout is not None and self.timeout < timedelta(0):
            raise ValueError(f"timeout is {self.timeout}, but must not be negative")
        levels = ("OFF", "WARN", "INFO", "DETAIL")
        if self.debug is not None and self.debug not in levels:
            raise ValueError(f"debug is {self.debug!r}, but must be one of {', '.join(levels)}")
