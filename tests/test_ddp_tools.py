"""DistributedDataParallel beside gradients: uneven inputs, timeline, errors with names, optimizers in backward,
compile."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_model import (
    assert_close_to_alone,
    batch,
    equal_on_all_ranks,
    loss_of,
    make_model,
    make_optimizer,
    train,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pycoll
from pycoll.bucket import ParameterSpec, assign_buckets, bucket_caps
from pycoll.parallel.arguments import devices_of
from pycoll.testing import RankPool, run_ranks

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]
MIB = 1 << 20
CPU = torch.device("cpu")


# --- assignment ------------------------------------------------------------------------------------


def test_caps() -> None:
    assert bucket_caps() == [MIB, 25 * MIB]
    assert bucket_caps(25) == [25 * MIB]  # a cap that is given holds for the first bucket too
    assert bucket_caps(None, [1, 2.5]) == [MIB, 5 * MIB // 2]
    assert bucket_caps(10, None, 0.5) == [MIB // 2, 10 * MIB]
    assert bucket_caps(None, None, 2) == [2 * MIB, 25 * MIB]
    assert bucket_caps(None, [4, 5, 6], 1) == [MIB, 5 * MIB, 6 * MIB]
    for wrong in ({"cap_mb": 0}, {"cap_mb_list": []}, {"first_cap_mb": -1.0}):
        with pytest.raises(ValueError, match=r"bucket"):
            bucket_caps(**wrong)


def specs_of(*nbytes: int, sparse: tuple[int, ...] = ()) -> list[ParameterSpec]:
    kind = (torch.float32, CPU)
    return [ParameterSpec(f"p{i}", size, kind, i in sparse) for i, size in enumerate(nbytes)]


def test_assignment() -> None:
    specs = specs_of(40, 40, 40, 400, 0, 40, 40)
    # The parameter that reaches the cap is still inside.
    assert assign_buckets(specs, [60]) == [[0, 1], [2, 3], [4, 5, 6]]
    assert assign_buckets(specs, [1, 100]) == [[0], [1, 2, 3], [4, 5, 6]]
    assert assign_buckets(specs, [1 << 40]) == [[0, 1, 2, 3, 4, 5, 6]]
    assert assign_buckets(specs, [60], [6, 5, 4, 3, 2, 1, 0]) == [[6, 5], [4, 3], [2, 1], [0]]
    assert assign_buckets(specs_of(40, 40, 40, sparse=(1,)), [1 << 40]) == [[1], [0, 2]]
    assert assign_buckets([], [1]) == []


# --- uneven inputs ---------------------------------------------------------------------------------


def uneven(
    batches: list[int], by_all: bool, as_view: bool, accumulate: bool
) -> tuple[list[float], bool]:
    """The gradient at each step of this rank, and whether all ranks hold the same model at the end."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False).eval())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    ddp = pycoll.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    model[1].eval()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    seen = []
    with ddp.join(divide_by_initial_world_size=by_all):
        for _ in range(batches[rank]):
            optimizer.zero_grad()
            if accumulate:
                with ddp.no_sync():
                    ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
            seen.append(round(model[0].weight.grad.item(), 3))
            optimizer.step()
    return seen, equal_on_all_ranks([*ddp.parameters(), *(b.float() for b in ddp.buffers())])


@pytest.mark.parametrize("as_view", [False, True])
def test_uneven_inputs(pool: Pools, as_view: bool) -> None:
    by_all = pool(3).run(uneven, [1, 3, 2], True, as_view, False)
    # 1 + 2 + 3 over three ranks, then 2 + 3, then 2.
    assert by_all == [([2.0], True), ([2.0, 1.667, 0.667], True), ([2.0, 1.667], True)]
    by_active = pool(3).run(uneven, [1, 3, 2], False, as_view, False)
    assert by_active == [([2.0], True), ([2.0, 2.5, 2.0], True), ([2.0, 2.5], True)]
    accumulated = pool(2).run(uneven, [0, 2], True, as_view, True)
    assert accumulated == [([], True), ([2.0, 2.0], True)]


def uneven_raising() -> str:
    ddp = pycoll.DistributedDataParallel(make_model())
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in range(3 + dist.get_rank()):
                loss_of(ddp, batch(step, 0)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_uneven_inputs_that_are_to_raise(pool: Pools) -> None:
    exhausted, detected = pool(2).run(uneven_raising)
    assert "exhausted all inputs" in exhausted
    assert "Detected at least one rank" in detected


# --- errors with names -----------------------------------------------------------------------------


def not_finite() -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp = pycoll.DistributedDataParallel(model, check_nan=True)
    ddp(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        model[0].bias.register_hook(lambda grad: grad / 0)
    try:
        ddp(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_that_are_not_finite(pool: Pools) -> None:
    for text in pool(2).run(not_finite):
        assert "'0.bias'" in text
        assert "rank 1" in text


def never_comes() -> str:
    group = dist.new_group(timeout=timedelta(seconds=5))
    ddp = pycoll.DistributedDataParallel(make_model(), process_group=group, bucket_cap_mb=1e-6)
    x = batch(0, dist.get_rank())
    loss_of(ddp, x).backward()
    try:
        loss = loss_of(ddp, x)
        if dist.get_rank() == 1:
            time.sleep(8.0)
            return "late"
        loss.backward()
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_a_timeout_names_rank_bucket_and_parameters() -> None:
    text, _ = run_ranks(never_comes, 2, timeout=30)
    assert "rank 0 could not reduce the gradients of bucket 0" in text
    assert "4.bias" in text
    assert "rank 1" in text


def other_passes() -> str:
    """Rank 1 is a backward pass behind: equal sizes, another meaning."""
    group = dist.new_group()
    ddp = pycoll.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    x = torch.ones(1, 2)
    ddp(x).sum().backward()
    if dist.get_rank() == 1:
        ddp.reducer._num_passes += 1
    try:
        ddp(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_in_other_passes_are_told_apart() -> None:
    for text in run_ranks(other_passes, 2, timeout=30):
        assert "DDP pass 2" in text
        assert "DDP pass 3" in text


def wrong_arguments() -> list[str]:
    model = nn.Linear(2, 2)
    wrong: list[dict[str, Any]] = [
        {"device_ids": [0]},
        {"bucket_cap_mb": -1},
        {"mixed_precision": object()},
        {"device_mesh": object(), "process_group": dist.group.WORLD},
    ]
    texts = []
    for how in wrong:
        try:
            pycoll.DistributedDataParallel(model, **how)
        except (ValueError, RuntimeError, TypeError) as error:
            texts.append(str(error))
    return texts


def test_wrong_arguments(pool: Pools) -> None:
    (texts,) = pool(1).run(wrong_arguments)
    for text, word in zip(
        texts, ["device_ids", "cap", "mixed_precision", "device_mesh"], strict=True
    ):
        assert word in text


def test_devices_are_those_of_the_model() -> None:
    """With fakes, which have devices but no data."""

    def on(*devices: str) -> nn.Module:
        return nn.ParameterList(nn.Parameter(torch.empty(2, device=device)) for device in devices)

    with FakeTensorMode():
        on_cpu, on_one, on_two = on("cpu"), on("cuda:1", "cuda:1"), on("cuda:1", "cuda:0")
        on_both, nowhere = on("cuda:1", "cpu"), on("meta")
    assert devices_of(on_cpu, None, None) == (None, None)
    assert devices_of(on_two, None, None) == devices_of(on_one, [], None) == (None, None)
    one = torch.device("cuda", 1)
    for ids in ([1], [one], ["cuda:1"], ["cuda"]):
        assert devices_of(on_one, ids, None) == ([1], 1)  # type: ignore[arg-type]
    assert devices_of(on_one, [1], 0) == ([1], 0)
    for module, ids, output, words in (
        (on_cpu, [0], None, "with modules on a single GPU"),
        (on_cpu, None, 0, "output_device 0, and a module on ['cpu']"),
        (on_two, [0], None, "a module on ['cuda:0', 'cuda:1']"),
        (on_one, [0], None, "device_ids is [0], but the module is on cuda:1; move it"),
        (on_one, [0, 1], None, "a process drives one GPU"),
        (on_both, None, None, "['cpu', 'cuda:1']; move them all to the CPU, or all to GPUs"),
        (nowhere, None, None, "['meta']; pycoll moves tensors of CPUs and of CUDA devices"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            devices_of(module, ids, output)


# --- timeline --------------------------------------------------------------------------------------


def times(folder: str) -> tuple[str, str, Any]:
    ddp = pycoll.DistributedDataParallel(make_model(), bucket_cap_mb=1e-3)
    for step in range(3):
        loss_of(ddp, batch(step, dist.get_rank())).backward()
    timeline = ddp.timeline()
    path = timeline.save_chrome_trace(Path(folder) / f"trace{dist.get_rank()}.json")
    return str(timeline), timeline.json(), json.loads(path.read_text())


def test_timeline(pool: Pools, tmp_path: Path) -> None:
    names = [name for name, _ in make_model().named_parameters()]
    for rank, (table, text, trace) in enumerate(pool(2).run(times, str(tmp_path))):
        content = json.loads(text)
        assert content["rank"] == rank
        assert [each["number"] for each in content["passes"]] == [1, 2, 3]
        for each in content["passes"]:
            assert sorted(p["name"] for b in each["buckets"] for p in b["parameters"]) == sorted(
                names
            )
            assert sum(b["nbytes"] for b in each["buckets"]) == 4 * (
                13 * 31 + 31 + 31 * 17 + 17 + 54
            )
            for bucket in each["buckets"]:
                last = max(p["ready_ms"] for p in bucket["parameters"])
                assert 0 <= bucket["ready_ms"] == last
                assert bucket["ready_ms"] <= bucket["start_ms"] <= bucket["end_ms"]
                assert bucket["end_ms"] <= each["total_ms"]
                assert bucket["exposed_ms"] >= 0
            exposed = sum(bucket["exposed_ms"] for bucket in each["buckets"])
            assert each["exposed_ms"] == pytest.approx(exposed)
        assert "4.bias" in table
        assert "exposed" in table
        kinds = {event["tid"] for event in trace["traceEvents"]}
        assert kinds == {"backward", "reduction", "gradients"}


def order_of_buckets() -> tuple[list[str], list[str]]:
    """Registered in another order than they are used."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x))

    ddp = pycoll.DistributedDataParallel(Backwards(), bucket_cap_mb=1e-6)
    before = [name for bucket in ddp.reducer.buckets for name in bucket.names]
    ddp(torch.ones(1, 3)).sum().backward()
    return before, [name for bucket in ddp.reducer.buckets for name in bucket.names]


def test_buckets_follow_the_order_of_the_first_pass(pool: Pools) -> None:
    for before, after in pool(2).run(order_of_buckets):
        assert before == ["early.weight", "late.weight"]
        assert after == ["late.weight", "early.weight"]


# --- optimizers in backward, compile ---------------------------------------------------------------


def optimizer_in_backward(as_view: bool, find_unused: bool) -> bool:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = make_model()
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-2})
    ddp = pycoll.DistributedDataParallel(
        model,
        bucket_cap_mb=1e-3,
        gradient_as_bucket_view=as_view,
        find_unused_parameters=find_unused,
    )
    for step in range(4):
        loss_of(ddp, batch(step, dist.get_rank())).backward()
        assert all(p.grad is None for p in ddp.parameters())
    assert_close_to_alone(ddp.parameters(), 4)
    return equal_on_all_ranks(ddp.parameters())


@pytest.mark.parametrize("as_view", [False, True])
def test_optimizer_in_backward(pool: Pools, as_view: bool) -> None:
    assert all(pool(2).run(optimizer_in_backward, as_view, False))
    assert all(pool(3).run(optimizer_in_backward, as_view, True))


def train_compiled(static: bool) -> bool:
    ddp = pycoll.DistributedDataParallel(make_model(), bucket_cap_mb=1e-3, static_graph=static)
    compiled = torch.compile(ddp, backend="aot_eager")
    train(compiled, make_optimizer(ddp.parameters()), 4)
    assert_close_to_alone(ddp.parameters(), 4)
    return equal_on_all_ranks(ddp.parameters())


@pytest.mark.slow
def test_compile(pool: Pools) -> None:
    assert all(pool(2).run(train_compiled, False, timeout=120))
    assert all(pool(2).run(train_compiled, True, timeout=120))


def nested_outputs() -> list[float]:
    """Outputs in containers: which forward a backward pass belongs to is found through them."""
    import dataclasses

    @dataclasses.dataclass
    class Output:
        value: Tensor
        others: dict[str, Any]

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: float) -> Any:
            return [Output(self.weight * x, {"twice": (self.weight * 2 * x,)}), "text", None]

    ddp = pycoll.DistributedDataParallel(Nested())
    scale = dist.get_rank() + 1.0
    seen = []
    for inside in (True, False):
        ddp.zero_grad()
        if inside:
            with ddp.no_sync():
                output = ddp(scale)[0]
        else:
            output = ddp(scale)[0]
        output.others["twice"][0].backward()
        seen.append(ddp.module.weight.grad.item())
    return seen


def test_outputs_in_containers(pool: Pools) -> None:
    assert pool(2).run(nested_outputs) == [[2.0, 3.0], [4.0, 3.0]]


def subgroup() -> float | None:
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        return None
    ddp = pycoll.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return ddp.module.weight.grad.item()


def test_a_group_of_some_ranks(pool: Pools) -> None:
    assert pool(3).run(subgroup) == [2.0, None, 2.0]
