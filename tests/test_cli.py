"""`pycoll info` and `pycoll doctor`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pycoll import cli
from pycoll.cli import doctor, info


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pycoll.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", **env},
    )


def test_info_shows_versions_and_every_variable() -> None:
    done = run("info", PYCOLL_SPIN_US="17")
    assert done.returncode == 0, done.stderr
    shown = info.facts()
    assert shown["torch"].split("+")[0] in done.stdout
    assert "one_shot, two_shot, ring" in done.stdout
    from pycoll.backend import extension

    rows = extension().environment()
    assert len(rows) >= 9
    for name, default, _, _ in rows:
        line = next(line for line in done.stdout.splitlines() if name in line)
        assert default in line
    assert "17" in next(line for line in done.stdout.splitlines() if "PYCOLL_SPIN_US" in line)


def test_info_and_doctor_need_no_rich() -> None:
    """A plain installation has none, and these are what one calls when something is wrong with it."""
    hidden = "import sys; sys.modules['rich'] = None; from pycoll import cli; sys.exit(cli.main(sys.argv[1:]))"
    for command, shown in (("info", "vector instructions"), ("doctor", "8 bytes take ")):
        done = subprocess.run(
            [sys.executable, "-c", hidden, command], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout


def test_doctor_finds_this_machine_fit() -> None:
    assert [check().verdict for check in doctor.CHECKS].count("fails") == 0
    finding = doctor.trial(3)
    assert finding.verdict in ("ok", "slow"), finding
    assert finding.seen.startswith("right; 8 bytes take ")


def test_doctor_names_what_fails_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setenv("COLUMNS", "200")  # or the table breaks the message into lines
    monkeypatch.setattr(doctor, "trial", lambda ranks: doctor.Finding("trial", "ok", str(ranks)))
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "No space left on device" in " ".join(shown.split())
    assert "fails" in shown


@pytest.mark.parametrize("ranks", ["1", "65"])
def test_bad_arguments_are_one_line(ranks: str) -> None:
    done = run("doctor", "-n", ranks)
    assert done.returncode == 2
    assert done.stderr == f"pycoll doctor: --ranks is {ranks}, but must be 2 to 64\n"
