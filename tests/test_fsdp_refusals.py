"""Sharded models: what is refused, by whom it is heard, and that nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from errors import text_of
from torch import Tensor, nn

import pycoll
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]


class Counting(nn.Module):
    """With state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.seen: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def sharded(device: str = "cpu", **options: Any) -> Any:
    torch.manual_seed(3)
    with torch.device(device):
        model = Counting()
    return pycoll.fully_shard(model, **options)


def given() -> dict[str, Any]:
    """A whole state, with values that a fresh model has not."""
    torch.manual_seed(11)
    model = Counting()
    model.seen = 42
    return dict(model.state_dict())


# --- whole states ----------------------------------------------------------------------------------


def load_wrong_states() -> dict[str, str]:
    rank = dist.get_rank()
    model, texts = sharded(), {}
    wrong: dict[str, Any] = {
        "text": {**given(), "linear.weight": "no tensor"},
        "parts": {**given(), "linear.weight": sharded().state_dict()["linear.weight"]},
        "nothing": None,
    }
    for name, state in wrong.items():
        texts[name] = text_of(lambda s=state: pycoll.load_full_state_dict(model, s))
        texts[f"{name} of rank 0"] = text_of(
            lambda s=state: pycoll.load_full_state_dict(
                model, s if rank == 0 else {}, from_rank0=True
            )
        )
    meta = sharded("meta")
    texts["meta"] = text_of(lambda: pycoll.load_full_state_dict(meta, given()))
    # Of one rank only: the others hear of it.
    either = meta if rank == 1 else model
    texts["meta of rank 1"] = text_of(
        lambda: pycoll.load_full_state_dict(either, given(), from_rank0=True)
    )
    return texts


def test_wrong_states_are_refused_on_all_ranks(pool: Pools) -> None:
    for texts in pool(2).run(load_wrong_states):
        for suffix in ("", " of rank 0"):
            assert (
                "'linear.weight' is a str in the state dict; give a whole" in texts[f"text{suffix}"]
            )
            assert "'linear.weight' is a DTensor in the state dict" in texts[f"parts{suffix}"]
            assert "state_dict is a NoneType" in texts[f"nothing{suffix}"]
        for name in ("meta", "meta of rank 1"):
            assert "is still on the meta device; call model.to_empty" in texts[name]
        assert all(text.startswith("ValueError") for text in texts.values())


def load_extra_state() -> list[Any]:
    seen = []
    for from_rank0 in (False, True):
        model = pycoll.FullyShardedDataParallel(Counting()) if from_rank0 else sharded()
        state = given() if dist.get_rank() == 0 or not from_rank0 else {}
        pycoll.load_full_state_dict(model, state, from_rank0=from_rank0)
        whole = pycoll.full_state_dict(model)
        for name, value in given().items():
            if isinstance(value, Tensor):
                assert torch.equal(whole[name], value), name
        seen.append(model.seen)
    return seen


def test_extra_state_is_loaded(pool: Pools) -> None:
    assert pool(2).run(load_extra_state) == [[42, 42]] * 2


# --- arguments -------------------------------------------------------------------------------------


def wrap_wrongly() -> dict[str, str]:
    model = sharded()
    weight = nn.Linear(5, 7).weight
    front: Any = pycoll.FullyShardedDataParallel
    anything: Any = 5
    calls: dict[str, Callable[[], object]] = {
        "ignored name": lambda: sharded(ignored_params=["weight"]),
        "ignored one": lambda: sharded(ignored_params=weight),
        "policy": lambda: front(Counting(), auto_wrap_policy=5),
        "classes": lambda: front(Counting(), auto_wrap_policy={5}),
        "group": lambda: front(Counting(), process_group=5),
        "norm": lambda: pycoll.clip_grad_norm_(model.parameters(), None),  # type: ignore[arg-type]
        "kind": lambda: pycoll.clip_grad_norm_(model.parameters(), 1.0, "two"),  # type: ignore[arg-type]
        "parameters": lambda: pycoll.clip_grad_norm_([anything], 1.0),
        "report": lambda: pycoll.memory_report(anything),
        "share": model.share_memory,
        "empty": lambda: sharded("meta", sync_module_states=True),
    }
    pycoll.clip_grad_norm_(model.parameters(), 1.0, "inf")  # type: ignore[arg-type]
    return {name: text_of(call) for name, call in calls.items()}


def test_wrong_arguments_are_named(pool: Pools) -> None:
    expected = {
        "ignored name": "TypeError: ignored_params is, or has, a str",
        "ignored one": "TypeError: ignored_params is, or has, a",
        "policy": "TypeError: auto_wrap_policy is a int",
        "classes": "TypeError: auto_wrap_policy has 5, which is no class",
        "group": "TypeError: process_group is a int",
        "norm": "TypeError: max_norm is None, a NoneType",
        "kind": "TypeError: norm_type is 'two', a str",
        "parameters": "TypeError: parameters has a int",
        "report": "TypeError: model is a int",
        "share": "RuntimeError: a sharded module cannot be moved to torch's shared memory",
        "empty": "ValueError: sync_module_states is to send",
    }
    for texts in pool(2).run(wrap_wrongly):
        for name, text in expected.items():
            assert text in texts[name], name


def receive_into_meta() -> bool:
    """Only the rank that sends needs values."""
    model = sharded("meta" if dist.get_rank() else "cpu", sync_module_states=True)
    torch.manual_seed(3)
    right = Counting().state_dict()
    whole = pycoll.full_state_dict(model)
    return all(torch.equal(whole[n], v) for n, v in right.items() if isinstance(v, Tensor))


def test_ranks_on_meta_receive(pool: Pools) -> None:
    assert pool(2).run(receive_into_meta) == [True] * 2
