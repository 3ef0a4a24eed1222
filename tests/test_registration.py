"""How a program comes to pycoll: the entry point, the names of devices, options, wrong versions."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from scripts import assert_codes, run_script

import pycoll

SUM = "x = torch.full((5,), rank + 1.0); dist.all_reduce(x); say('sum', x[0].item())"


def test_import_torch_alone_registers_and_loads_nothing() -> None:
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "assert dist.Backend.PYCOLL == 'pycoll'\n"
        "assert 'pycoll._C' not in sys.modules\n"
        "print('registered')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "registered\n"), done.stderr


def test_import_pycoll_does_not_import_torch() -> None:
    code = "import sys, pycoll; pycoll.Options(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.slow
def test_autoload_switched_off_still_works_by_hand(tmp_path: Path) -> None:
    script = f"import pycoll.backend; pycoll.backend.register(); init(); {SUM}"
    ended = run_script(script, 2, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert_codes(ended, 0, 0)
    assert all("sum 3.0" in rank.out for rank in ended)


def test_a_mixed_string_with_nccl_is_understood() -> None:
    """Making such a group needs a build of torch with nccl; what the string means does not."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import BackendConfig

    config = BackendConfig(dist.Backend("cpu:pycoll,cuda:nccl"))
    assert config.get_device_backend_map() == {"cpu": "pycoll", "cuda": "nccl"}


@pytest.mark.parametrize("backend", ["pycoll", "cpu:pycoll", "cpu:gloo,cuda:pycoll"])
def test_backend_strings(backend: str, tmp_path: Path) -> None:
    script = f"""
        init({backend!r})
        {SUM}
        kind = type(dist.group.WORLD._get_backend(torch.device('cpu'))).__name__
        say('kind', kind)
        dist.destroy_process_group()
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    kind = "ProcessGroupGloo" if "cpu:gloo" in backend else "ProcessGroupPycoll"
    for rank in ended:
        assert "sum 3.0" in rank.out
        assert f"kind {kind}" in rank.out


@pytest.mark.slow
def test_options_of_a_group(tmp_path: Path) -> None:
    script = """
        import pycoll
        init(pg_options=pycoll.Options(algorithm="ring", timeout=seconds(7)))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.algorithm == "ring"
        x = torch.ones(10); dist.all_reduce(x)
        assert pycoll.events()[-1]["algorithm"] == "ring"
        group = dist.new_group(pg_options=pycoll.Options(algorithm="two_shot"))
        dist.all_reduce(x, group=group)
        assert pycoll.events(group)[-1]["algorithm"] == "two_shot"
        assert x.tolist() == [4.0] * 10
        text, _ = raised(lambda: dist.new_group(pg_options=pycoll.Options(algorithm="tree")))
        say(text)
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    for rank in ended:
        assert rank.out.startswith("ValueError: pycoll: algorithm 'tree' is unknown; use one of")


@pytest.mark.slow
def test_ranks_that_disagree_about_options_raise(tmp_path: Path) -> None:
    script = """
        import pycoll
        name = "ring" if rank == 1 else "auto"
        text, took = raised(lambda: init(pg_options=pycoll.Options(algorithm=name)))
        say(text)
        assert took < 10
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, 0, 0)
    for rank in ended:
        assert "ranks disagree about the group that they make" in rank.out
        assert "auto on rank 0 and ring on rank 1" in rank.out


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        pycoll.Options(timeout=timedelta(seconds=-1))
    with pytest.raises(ValueError, match="'LOUD', but must be one of OFF, WARN"):
        pycoll.Options(debug="LOUD")


def test_foreign_options_are_refused(tmp_path: Path) -> None:
    script = """
        text, _ = raised(lambda: init(pg_options={"algorithm": "ring"}))
        say(text)
    """
    ended = run_script(script, 1, tmp_path)
    assert_codes(ended, 0)
    assert (
        "TypeError: pg_options is a dict; the pycoll backend takes pycoll.Options" in ended[0].out
    )


@pytest.mark.slow
def test_environment_is_checked(tmp_path: Path) -> None:
    script = "text, _ = raised(init); say(text)"
    ended = run_script(script, 1, tmp_path, PYCOLL_PAYLOAD_BYTES="lots")
    assert_codes(ended, 0)
    assert "PYCOLL_PAYLOAD_BYTES=lots is not a whole number from 64 to 1048576" in ended[0].out


@pytest.mark.slow
def test_debug_option_logs_to_stderr(tmp_path: Path) -> None:
    script = """
        import pycoll
        init(pg_options=pycoll.Options(debug="INFO"))
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    for number, rank in enumerate(ended):
        assert f"INFO] rank {number} of 2: group made, algorithm auto" in rank.err
