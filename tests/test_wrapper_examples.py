"""The examples that train with pycoll's wrappers, on real data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pycoll.examples import train_cnn, train_ddp, train_fsdp
from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]

TINY = ["--model", "tiny", "--steps", "12", "--batch-size", "6"]


def losses(arguments: list[str]) -> list[float]:
    return train_ddp.train(train_ddp.parse([*TINY, *arguments]))


def test_train_ddp_learns_the_same_on_any_number_of_ranks(pool: Pools) -> None:
    (alone,) = pool(1).run(losses, [])
    assert alone[-1] < alone[0] - 0.1
    for world_size in (2, 3):
        for mine in pool(world_size).run(losses, []):
            assert mine == pytest.approx(alone, abs=1e-3)


def test_train_ddp_with_everything(pool: Pools, tmp_path: Path) -> None:
    plain = pool(2).run(losses, ["--accumulate", "2"])[0]
    for wire in ("int8", "fp8"):
        how = ["--accumulate", "2", "--zero", "--wire", wire, "--timeline", f"{tmp_path}/trace"]
        assert pool(2).run(losses, how)[0] == pytest.approx(plain, abs=0.05)
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace{rank}.json").read_text())
        assert {event["pid"] for event in trace["traceEvents"]} == {rank}


def sharded_losses(arguments: list[str]) -> list[float]:
    return train_fsdp.train(train_fsdp.parse([*TINY, *arguments]))


def test_train_fsdp_resumes_on_another_number_of_ranks(pool: Pools, tmp_path: Path) -> None:
    folder = ["--save", str(tmp_path / "checkpoint"), "--bf16"]
    begun = pool(3).run(sharded_losses, folder)[0]
    assert begun[-1] < begun[0] - 0.1
    resume = ["--resume", str(tmp_path / "checkpoint"), "--bf16", "--stage", "2"]
    (alone,) = pool(1).run(sharded_losses, resume)
    assert alone[0] < begun[-1] + 0.2
    assert alone[-1] < begun[-1]
    assert pool(2).run(sharded_losses, resume)[0] == pytest.approx(alone, abs=2e-2)


def test_train_fsdp_learns_what_ddp_learns(pool: Pools) -> None:
    rate = ["--learning-rate", "1.5e-3"]
    replicated = pool(2).run(losses, rate)[0]
    assert pool(2).run(sharded_losses, rate)[0] == pytest.approx(replicated, abs=1e-4)


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (train_ddp.parse, train_fsdp.parse, train_cnn.main):
        with pytest.raises(SystemExit):
            main(["--batch-size", "0"])
        assert "must be positive" in capsys.readouterr().err


def test_train_cnn_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        train_cnn.main([])


def digits_right() -> list[float]:
    return train_cnn.train(epochs=2, batch_size=64, learning_rate=0.05)


def test_train_cnn(pool: Pools) -> None:
    pytest.importorskip("sklearn", reason="it has the data")
    for seen in pool(2).run(digits_right, timeout=120):
        assert seen[0] < 0.3
        assert seen[-1] > 0.85
