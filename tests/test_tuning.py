"""The table of algorithms: read, refused, agreed on, and really used by the selector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycoll import tuning
from pycoll.testing import RankError, RankPool
from pycoll.tuning import Row


def algorithms_taken(sizes: list[int]) -> list[tuple[str, str]]:
    """On a rank: the algorithm of an all_reduce and an all_gather of so many bytes a rank."""
    from pycoll import events

    taken = []
    for nbytes in sizes:
        x = torch.full((nbytes // 4,), dist.get_rank() + 1.0)
        gathered = torch.empty(dist.get_world_size() * len(x))
        dist.all_gather_into_tensor(gathered, x)
        dist.all_reduce(x)
        total = dist.get_world_size() * (dist.get_world_size() + 1) / 2
        assert x.eq(total).all()
        ours = [e["algorithm"] for e in events() if e["operation"] in ("all_gather", "all_reduce")]
        taken.append((ours[-1], ours[-2]))
    return taken


def saved(path: Path, *rows: Row) -> str:
    tuning.save(rows, path)
    return str(path)


TABLE = (
    Row(2, "all_reduce", "two_shot", 1024),
    Row(2, "all_reduce", "one_shot", 262_144),
    Row(2, "all_gather", "ring", None),
    Row(3, "all_reduce", "one_shot", None),
)


def test_the_selector_takes_what_the_table_says(tmp_path: Path) -> None:
    sizes = [1024, 1028, 262_144, 262_148]
    with RankPool(
        2, "pycoll", env={"PYCOLL_TUNING": saved(tmp_path / "table.json", *TABLE)}
    ) as pool:
        expected = [(a, "ring") for a in ("two_shot", "one_shot", "one_shot", "two_shot")]
        assert pool.run(algorithms_taken, sizes) == [expected] * 2
    with RankPool(2, "pycoll", env={"PYCOLL_TUNING": "off"}) as pool:
        expected = [(a, "direct") for a in ("one_shot", "one_shot", "two_shot", "two_shot")]
        assert pool.run(algorithms_taken, sizes) == [expected] * 2


def in_a_subgroup(nbytes: int) -> str | None:
    """On a rank of three: the algorithm in a group of the first two, whose rows are their own."""
    from pycoll import events

    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    dist.all_reduce(torch.zeros(nbytes // 4), group=group)
    return str(events(group)[-1]["algorithm"])


def test_groups_of_other_sizes_have_other_rows(tmp_path: Path) -> None:
    with RankPool(
        3, "pycoll", env={"PYCOLL_TUNING": saved(tmp_path / "table.json", *TABLE)}
    ) as pool:
        assert pool.run(algorithms_taken, [1 << 20])[0] == [("one_shot", "direct")]
        assert pool.run(in_a_subgroup, 512) == ["two_shot", "two_shot", None]


def use_own_table(folder: str, rows_of_rank_1: list[Any]) -> str:
    """On a rank: makes a group with a table that differs from rank to rank; what it raises."""
    import os

    rows = TABLE[:1] if dist.get_rank() == 0 else [Row(*row) for row in rows_of_rank_1]
    path = Path(folder) / f"{dist.get_rank()}.json"
    tuning.save(rows, path)
    os.environ["PYCOLL_TUNING"] = str(path)
    try:
        dist.new_group([0, 1])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def test_ranks_with_other_tables_raise_one_error(tmp_path: Path) -> None:
    with RankPool(2, "pycoll") as pool:
        texts = pool.run(use_own_table, str(tmp_path), [(2, "all_reduce", "two_shot", 2048)])
    for text in texts:
        assert "the tuning table (PYCOLL_TUNING) is 2 all_reduce two_shot 1024 on rank 0" in text
        assert "2 all_reduce two_shot 2048 on rank 1; give all ranks the same file" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((2, "all_reduce", "ring", None), "order of additions depends on the place"),
        ((2, "all_reduce", "fast", None), "all_reduce has no such algorithm"),
        ((2, "all_sum", "ring", None), "names the collective 'all_sum'"),
        ((0, "all_reduce", "one_shot", None), "'0' where a positive number belongs"),
        ((2, "all_reduce", "one_shot", -8), "'-8' where a positive number belongs"),
    ],
)
def test_all_ranks_hear_of_a_table_that_one_cannot_use(
    tmp_path: Path, row: tuple[Any, ...], message: str
) -> None:
    with RankPool(2, "pycoll", timeout=30) as pool:
        mine, others = pool.run(use_own_table, str(tmp_path), [row])[::-1]
    assert message in mine
    assert mine.startswith("ValueError")
    assert "PYCOLL_TUNING=off" in mine
    assert "rank 1: " in others
    assert message in others


def test_rows_that_are_never_reached_are_refused(tmp_path: Path) -> None:
    rows = [(2, "all_reduce", "one_shot", None), (2, "all_reduce", "two_shot", 2048)]
    with RankPool(2, "pycoll", timeout=30) as pool:
        text = pool.run(use_own_table, str(tmp_path), rows)[1]
    assert "behind one that already covers its sizes" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no tuning table"),
        ('{"format": 2, "rows": [], "machine": {}}', "its format is 2, not 1"),
        ('{"format": 1, "machine": {}, "rows": [{"size": 8}]}', "is no tuning table"),
        (None, "cannot be read \\(No such file"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PYCOLL_TUNING", str(path))
    text = tuning.current()
    assert text.startswith("!")
    assert str(path) in text
    assert "PYCOLL_TUNING=off" in text
    with pytest.raises(RankError, match=message), RankPool(2, "pycoll", timeout=30) as pool:
        pool.run(algorithms_taken, [8])


def test_the_default_file_counts_on_the_machine_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYCOLL_TUNING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.current() == ""
    path = tuning.default_path()
    assert path.is_relative_to(tmp_path)
    tuning.save(TABLE[:2], path)
    assert tuning.current() == "2 all_reduce two_shot 1024; 2 all_reduce one_shot 262144"
    content = json.loads(path.read_text())
    content["machine"]["cpu"] = "another"
    path.write_text(json.dumps(content))
    assert tuning.current() == ""
    monkeypatch.setenv("PYCOLL_TUNING", str(path))  # named: used whatever the machine
    assert tuning.current().startswith("2 all_reduce two_shot")
    monkeypatch.setenv("PYCOLL_TUNING", "off")
    assert tuning.current() == ""
    assert tuning.load(path)[0] == list(TABLE[:2])


DEVICE_ROW = {
    "architecture": 90,
    "world_size": None,
    "collective": "all_reduce",
    "algorithm": "one_shot",
    "num_blocks": 8,
    "most_nbytes": 65536,
}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ({"a": 1}, "rows is dict, and not a list"),
        ([DEVICE_ROW, 3], "rows[1] has int, and not ['algorithm', 'architecture'"),
        ([{"architecture": 90}], "rows[0] has ['architecture'], and not "),
        ([{**DEVICE_ROW, "more": 1}], "rows[0] has "),
        ([{**DEVICE_ROW, "world_size": 2.5}], "world_size is 2.5, and not a whole number or null"),
        ([{**DEVICE_ROW, "world_size": -1}], "rows[0].world_size is -1"),
        ([{**DEVICE_ROW, "most_nbytes": -5}], "rows[0].most_nbytes is -5"),
        ([{**DEVICE_ROW, "num_blocks": None}], "num_blocks is None, and not a whole number"),
        ([{**DEVICE_ROW, "num_blocks": True}], "rows[0].num_blocks is True"),
        ([{**DEVICE_ROW, "collective": "all reduce; x"}], "rows[0].collective is 'all reduce; x'"),
    ],
)
def test_a_table_for_devices_is_read_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: object, named: str
) -> None:
    path = tmp_path / "device.json"
    monkeypatch.setenv("PYCOLL_CUDA_TUNING", str(path))
    path.write_text(json.dumps({"format": 1, "rows": [DEVICE_ROW]}))
    assert tuning.current_for_devices() == "90 any all_reduce one_shot 8 65536"
    path.write_text(json.dumps({"format": 1, "rows": rows}))
    text = tuning.current_for_devices()
    assert text.startswith(f"!PYCOLL_CUDA_TUNING={path} is no tuning table")
    assert named in text
    assert text.endswith("; measure it anew, or unset it")
