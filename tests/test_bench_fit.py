"""Cost models: synthetic times whose parameters are known, and the table that is chosen from times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pycoll.bench import fit as fit_module
from pycoll.bench.extras import MissingExtra
from pycoll.bench.fit import Fit, as_entry, fit, load_fits, save_fits
from pycoll.bench.results import Comparison, Row, Sample
from pycoll.bench.tune import cheapest_path, choose
from pycoll.tuning import Row as TunedRow

SIZES = [8 * 2**step for step in range(22)]


def times(
    alpha: float, beta: float, sizes: list[int], noise: float = 0.02, seed: int = 0
) -> list[tuple[int, list[float]]]:
    """Rounds of α + β S with a relative error."""
    draw = random.Random(seed)
    return [
        (size, [(alpha + beta * size) * (1 + draw.gauss(0, noise)) for _ in range(5)])
        for size in sizes
    ]


def test_one_line_is_recovered_within_its_interval() -> None:
    models = [fit(times(4e-6, 0.1e-9, SIZES, seed=seed)) for seed in range(20)]
    whole = [model.pieces[0] for model in models if len(model.pieces) == 1]
    assert len(whole) >= 17  # a cut that noise suggests is rare
    inside = 0
    for piece in whole:
        assert (piece.begin, piece.end) == (SIZES[0], SIZES[-1])
        assert piece.alpha.value == pytest.approx(4e-6, rel=0.05)
        assert piece.beta.value == pytest.approx(0.1e-9, rel=0.05)
        assert piece.residual < 0.05
        inside += piece.alpha.low <= 4e-6 <= piece.alpha.high
        inside += piece.beta.low <= 0.1e-9 <= piece.beta.high
    # 95 % are expected; of 34 or more, fewer than 80 % would be chance once in ten thousand times.
    assert inside >= 0.8 * 2 * len(whole)


def test_two_lines_are_told_apart_where_they_meet() -> None:
    small, large = SIZES[:12], SIZES[12:]
    model = fit(times(3e-6, 0.5e-9, small) + times(40e-6, 0.11e-9, large, seed=1))
    assert [(piece.begin, piece.end) for piece in model.pieces] == [
        (small[0], small[-1]),
        (large[0], large[-1]),
    ]
    assert model.pieces[0].alpha.value == pytest.approx(3e-6, rel=0.05)
    assert model.pieces[1].beta.value == pytest.approx(0.11e-9, rel=0.05)
    assert model.pieces[1].alpha.low < 40e-6 < model.pieces[1].alpha.high
    assert model.seconds(100) == pytest.approx(3.05e-6, rel=0.05)
    assert model.seconds(1 << 30) == pytest.approx(0.118, rel=0.05)
    assert max(abs(error) for _, error in model.residuals) < 0.06
    assert [size for size, _ in model.residuals] == SIZES


def test_an_outlier_of_one_round_does_not_bend_the_line() -> None:
    samples = times(4e-6, 0.1e-9, SIZES)
    samples[3][1][2] *= 100
    assert fit(samples).pieces[0].alpha.value == pytest.approx(4e-6, rel=0.05)


def test_what_cannot_be_fitted_is_named() -> None:
    with pytest.raises(ValueError, match="3 sizes cannot be fitted; measure 4 or more"):
        fit(times(1e-6, 0, [8, 16, 32]))
    with pytest.raises(ValueError, match="sizes must increase"):
        fit(times(1e-6, 0, [8, 16, 16, 32]))
    with pytest.raises(ValueError, match="times are positive"):
        fit([*times(1e-6, 0, [8, 16, 32]), (64, [])])


def test_a_missing_library_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("pycoll.bench.extras.importlib.import_module", missing)
    with pytest.raises(MissingExtra) as raised:
        fit_module.fit(times(1e-6, 0, SIZES))
    assert str(raised.value) == (
        "--fit needs scipy, which is not installed: pip install 'pycoll[bench]'"
    )


def test_fits_are_written_and_read(tmp_path: Path) -> None:
    model = fit(times(4e-6, 0.1e-9, SIZES))
    path = tmp_path / "made" / "fits.json"
    save_fits(path, {"cpu": "x"}, [as_entry(model, op="all_reduce", slowdown=1.5)])
    assert load_fits(path) == [({"op": "all_reduce", "slowdown": 1.5}, model)]
    assert isinstance(load_fits(path)[0][1], Fit)
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match="format 7, not 1"):
        load_fits(path)


# --- the selector's table ---------------------------------------------------------------------------


def test_the_table_changes_where_another_algorithm_pays() -> None:
    curves = {
        size: {"one_shot": 3e-6 + 0.4e-9 * size, "two_shot": 9e-6 + 0.1e-9 * size}
        for size in (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
    }
    # They cross at 20,000 bytes, between 16 and 64 KiB.
    assert cheapest_path(curves) == [("one_shot", 32 << 10), ("two_shot", None)]


def test_noise_does_not_change_the_algorithm_back_and_forth() -> None:
    even = {size: {"a": 1.0, "b": 1.0} for size in (1, 2, 4, 8, 16)}
    even[4] = {"a": 1.05, "b": 1.0}
    assert cheapest_path(even) == [("b", None)]
    even = {size: {"a": 1.0, "b": 1.3} for size in (1, 2, 4, 8, 16)}
    even[4] = {"a": 2.0, "b": 1.0}
    assert cheapest_path(even) == [("a", 2), ("b", 5), ("a", None)]


def test_rows_speak_of_the_selectors_size() -> None:
    """The selector counts a rank's tensor, S all of them where a collective gathers."""

    def row(nbytes: int, name: str, seconds: float) -> Row:
        sample = Sample(seconds, seconds, None, 10, 0)
        return Row(
            "all_gather", nbytes, "float32", False, 4, f"pycoll:{name}", (sample,), place="out"
        )

    rows = (
        row(400, "direct", 1.0),
        row(400, "ring", 2.0),
        row(1600, "direct", 4.0),
        row(1600, "ring", 2.0),
    )
    comparison = Comparison(("pycoll:direct", "pycoll:ring"), rows, {})
    assert choose(comparison, "all_gather") == [
        TunedRow(4, "all_gather", "direct", 200),
        TunedRow(4, "all_gather", "ring", None),
    ]
