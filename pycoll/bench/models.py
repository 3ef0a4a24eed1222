"""Cost models of pycoll's algorithms: measured alone and beside a running matrix product, then fitted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycoll.backend import extension
from pycoll.bench.compare import Plan, Progress, Start, compare
from pycoll.bench.fit import Fit, as_entry, fit
from pycoll.bench.peers import PYCOLL, Peer
from pycoll.bench.results import Comparison, Row

LOADS = {"idle": False, "beside a matrix product": True}


@dataclass(frozen=True)
class CostModel:
    """Attributes:
    of: collective, place, dtype, ranks, backend, algorithm and load.
    model: the fitted one.
    slowdown: median over the sizes of time beside the product over time alone; None for the idle one.
    product_slowdown: how many times as long the product took beside the collective as alone.
    """

    of: dict[str, Any]
    model: Fit
    slowdown: float | None = None
    product_slowdown: float | None = None

    def entry(self) -> dict[str, Any]:
        """For `fit.save_fits`."""
        slow = {"slowdown": self.slowdown, "product_slowdown": self.product_slowdown}
        return as_entry(self.model, **self.of, **slow)


def with_algorithms(backends: Sequence[str], op: str) -> tuple[str, ...]:
    """The backends, with pycoll replaced by each of its algorithms for a collective."""
    names = [name for collective, name, _ in extension().algorithms() if collective == op]
    listed: list[str] = []
    for backend in backends:
        peer = Peer.parse(backend)
        chosen = [f"{backend}:{name}" for name in names] if peer.kind == PYCOLL else [backend]
        listed += chosen if peer.algorithm is None else [backend]
    return tuple(listed)


def measure_models(
    plan: Plan,
    on_progress: Progress = lambda done, total, what: None,
    start: Start | None = None,
) -> tuple[list[CostModel], dict[str, Any]]:
    """Models of every collective of the plan and every algorithm of its backends, and the facts of the run.

    Raises:
        ValueError: the plan has too few sizes for a fit.
        RankError: as `compare`.
    """
    models: list[CostModel] = []
    facts: dict[str, Any] = {}
    ops = dict.fromkeys(case.op for world in plan.worlds for case in world.cases)
    for op in ops:
        worlds = tuple(
            replace(world, cases=tuple(case for case in world.cases if case.op == op))
            for world in plan.worlds
        )
        part = replace(plan, backends=with_algorithms(plan.backends, op), worlds=worlds)
        measured = {
            load: compare(replace(part, beside_products=beside), on_progress, start)
            for load, beside in LOADS.items()
        }
        facts = measured["idle"].facts
        models += _models_of(measured)
    return models, facts


def _models_of(measured: dict[str, Comparison]) -> list[CostModel]:
    models = []
    idle = _curves(measured["idle"])
    for load, comparison in measured.items():
        for key, rows in _curves(comparison).items():
            seconds = [(row.nbytes, [sample.seconds for sample in row.samples]) for row in rows]
            first = rows[0]
            of = {
                "op": first.op,
                "place": first.place,
                "dtype": first.dtype,
                "world_size": first.world_size,
                "backend": first.backend.partition(":")[0],
                "algorithm": first.algorithm,
                "load": load,
            }
            model = CostModel(of, fit(seconds))
            if LOADS[load]:
                alone = {row.nbytes: row.seconds for row in idle.get(key, [])}
                ratios = [row.seconds / alone[row.nbytes] for row in rows if row.nbytes in alone]
                products = [row.product_slowdown for row in rows if row.product_slowdown]
                model = replace(
                    model,
                    slowdown=statistics.median(ratios) if ratios else None,
                    product_slowdown=statistics.median(products) if products else None,
                )
            models.append(model)
    return models


def _curves(comparison: Comparison) -> dict[tuple[Any, ...], list[Row]]:
    """Measured rows by everything but their size."""
    curves: dict[tuple[Any, ...], list[Row]] = {}
    for row in comparison.rows:
        if row.samples:
            curves.setdefault((*row.case[:-1], row.backend), []).append(row)
    return {key: sorted(rows, key=lambda row: row.nbytes) for key, rows in curves.items()}
