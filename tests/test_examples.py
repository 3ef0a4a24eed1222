"""The examples: their arguments, their data, and that ranks learn what one process learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pycoll.bench.results import Comparison, Row, Sample
from pycoll.examples import demo, train_gpt
from pycoll.examples.gpt import GPT, PRESETS, GPTConfig, generate
from pycoll.examples.text import (
    VOCABULARY,
    Corpus,
    decode,
    encode,
    standard_library_text,
)
from pycoll.examples.train_gpt import LOSS_TOLERANCE, Job, Trainer

BACKEND = os.environ.get("PYCOLL_TEST_BACKEND", "pycoll")
TINY = ("--model", "tiny", "--steps", "3", "--warmup-steps", "1", "--share-pairs", "1")


@pytest.fixture(scope="module")
def corpus():
    return Corpus.from_text(standard_library_text(), context=32)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and lose much on cores that others want."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- arguments ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def not_under_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def refusal(parse, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--steps", "many"], "invalid int value"),
        (["--batch-size", "-8"], "--batch-size must be positive, got -8"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0 and up to 1, got nan"),
        (["--learning-rate", "1e38"], "--learning-rate must be above 0 and up to 1, got 1e+38"),
        (["--threads", "0"], "--threads must be positive"),
        (["--warmup-steps", "-1"], "--warmup-steps must be 0 to"),
        (["--share-pairs", "-1"], "--share-pairs must be 0 to"),
        (["--seed", str(1 << 40)], "--seed must be 0 to"),
        (["--world-size", "0"], "--world-size must be at least 1, got 0"),
        (["--world-size", "2"], "torchrun --nproc-per-node 2 -m pycoll.examples.train_gpt"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--context", "65"], "--context must be 1 to 64, the positions of --model small, got 65"),
        (["--model", "tiny", "--context", "33"], "1 to 32, the positions of --model tiny"),
        (["--context", "0"], "--context must be 1 to 64"),
        (["--backend", "no_such_backend"], "unknown backend 'no_such_backend'"),
        (["--wrapper", "torch"], "--wrapper torch, but one process needs none"),
        (["--text", "/no/such/file"], "/no/such/file"),
        (["--text", os.devnull], "not enough text: 0 characters"),
        (["--json", "/dev/null/result.json"], "/dev/null"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(arguments, message, capsys):
    assert message in refusal(train_gpt.parse, arguments, capsys)


def test_too_little_text_says_how_much_is_needed(tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("x" * 640)
    error = refusal(train_gpt.parse, ["--text", str(text)], capsys)
    assert "not enough text: 640 characters, context 64 needs about 651" in error
    text.write_text("x" * 651)
    train_gpt.parse(["--text", str(text)])


def test_arguments_are_held_against_the_launcher(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    error = refusal(train_gpt.parse, ["--backend", "gloo"], capsys)
    assert "--batch-size 8 is not a multiple of world size 3" in error
    error = refusal(train_gpt.parse, ["--backend", "gloo", "--world-size", "2"], capsys)
    assert "--world-size 2, but 3 was started" in error
    arguments = ["--backend", "gloo", "--world-size", "3", "--batch-size", "6"]
    _, job, _ = train_gpt.parse(arguments)
    assert (job.backend, job.wrapper, job.rank, job.world_size) == ("gloo", "torch", 0, 3)
    error = refusal(train_gpt.parse, [*arguments, "--wrapper", "pycoll"], capsys)
    assert "--wrapper pycoll needs --backend pycoll, got gloo" in error
    _, job, _ = train_gpt.parse(["--batch-size", "6"])
    assert (job.backend, job.wrapper) == ("pycoll", "pycoll")


def test_only_rank_0_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        train_gpt.parse(["--steps", "0"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "no_such_backend"], "unknown backend 'no_such_backend'"),
        (["--backends", ""], "unknown backend ''"),
        (["--backends", "gloo", "--ranks", "0"], "--ranks must be positive, got 0"),
        (["--backends", "gloo", "--steps", "-1"], "--steps must be positive"),
        (["--backends", "gloo", "--model", "huge"], "invalid choice: 'huge'"),
        (["--backends", "gloo", "--ranks", "3"], "--ranks 3 does not divide"),
        (["--backends", "gloo", "--out", "/dev/null/out"], "/dev/null"),
    ],
)
def test_bad_arguments_of_the_demo_are_one_line_and_code_2(arguments, message, capsys):
    assert message in refusal(demo.parse, arguments, capsys)


@pytest.mark.slow
def test_the_module_exits_with_code_2():
    command = [sys.executable, "-m", "pycoll.examples.train_gpt", "--steps", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "train_gpt: error: --steps must be positive, got 0\n"


# --- data -----------------------------------------------------------------------------------------


def test_text_is_the_same_every_time_and_survives_encoding():
    text = standard_library_text()
    assert text == standard_library_text()
    assert len(text) > 500_000
    assert decode(encode("def f(x):\n\treturn '~'")) == "def f(x):\n    return '~'"
    assert decode(encode("naïve")) == "na" + VOCABULARY[-1] + "ve"
    assert int(encode(text).max()) < len(VOCABULARY)


def test_validation_text_is_held_out(corpus):
    whole = encode(standard_library_text())
    assert torch.equal(torch.cat([corpus.train, corpus.validation]), whole)
    assert len(corpus.validation) == len(whole) // 10


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [0, 1, 399])
def test_the_ranks_batches_joined_are_the_single_process_batch(corpus, world_size, step):
    whole = corpus.batch(step, seed=5, batch_size=8, context=32)
    parts = [
        corpus.batch(step, 5, 8, 32, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert whole.inputs.shape == (8, 32)
    assert torch.equal(whole.inputs[:, 1:], whole.targets[:, :-1])


def test_batches_depend_on_step_and_seed(corpus):
    batches = [corpus.batch(step, seed, 8, 32).inputs for step in (0, 1) for seed in (0, 1)]
    for index, batch in enumerate(batches):
        assert not any(torch.equal(batch, other) for other in batches[:index])
    with pytest.raises(ValueError, match="batch size 8 is not a multiple of world size 3"):
        corpus.batch(0, 0, 8, 32, rank=0, world_size=3)


def test_validation_windows_are_shared_out_without_loss_or_repetition():
    corpus = Corpus.from_text("".join(chr(97 + i % 26) for i in range(2000)), context=10)
    whole = corpus.validation_batch(7, 10)
    parts = [corpus.validation_batch(7, 10, rank=rank, world_size=3).inputs for rank in range(3)]
    assert [len(part) for part in parts] == [3, 2, 2]
    joined = torch.cat(parts)
    assert sorted(joined.tolist()) == sorted(whole.inputs.tolist())
    assert torch.equal(whole.targets[-1], corpus.validation[-10:])
    assert len(corpus.validation_batch(2, 10, rank=2, world_size=3).inputs) == 0


# --- model ----------------------------------------------------------------------------------------


def test_positions_see_only_what_comes_before():
    model = GPT(PRESETS["tiny"], len(VOCABULARY), seed=0)
    tokens = torch.arange(32)[None] % len(VOCABULARY)
    changed = tokens.clone()
    changed[0, 20] = 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20], after[0, 20])
    with pytest.raises(ValueError, match="33 characters do not fit the model's 32 positions"):
        model(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match="width 30 is not a multiple of heads 4"):
        GPT(GPTConfig(layers=1, heads=4, width=30, positions=8), 10, seed=0)


def test_equal_seeds_give_equal_weights_and_equal_text():
    models = [GPT(PRESETS["tiny"], len(VOCABULARY), seed) for seed in (3, 3, 4)]
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    # Longer than the model's positions, so that the window slides.
    texts = [decode(generate(model, encode("def "), 40, seed=1)) for model in models]
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert len(texts[0]) == 44


# --- training -------------------------------------------------------------------------------------


def job(**changes):
    tiny = Job(None, None, 0, 1, "tiny", 3, 8, 32, 1.5e-3, 1, 0, 0)
    return replace(tiny, **changes)


def test_the_tolerance_tells_averaged_gradients_from_others(corpus):
    whole = Trainer(job(), corpus)
    halves = [Trainer(job(rank=rank, world_size=2), corpus) for rank in range(2)]
    apart = []
    for step in range(3):
        joined = sum(half.step(step) for half in halves) / 2
        apart.append(abs(whole.step(step) - joined))
    # The same weights to begin with, and then each half on its own.
    assert apart[0] <= LOSS_TOLERANCE / 10
    assert max(apart) > 3 * LOSS_TOLERANCE


def test_a_loss_that_is_not_finite_is_an_error(corpus):
    with pytest.raises(FloatingPointError, match=r"the loss of step 2 is nan"):
        train_gpt.train(job(learning_rate=1e30), corpus)


def test_the_result_in_one_process(corpus):
    result = train_gpt.train(job(), corpus)
    assert len(result["losses"]) == 3
    assert result["communication"] is None
    assert result["perplexity"]["after"] < result["perplexity"]["before"] < 120
    assert result["sample"].startswith("def ")
    assert result["job"]["model"] == "tiny"
    text = train_gpt.summary(json.loads(json.dumps(result)))
    assert "held-out perplexity" in text


def test_losses_on_other_text_are_not_compared():
    one = {"corpus_sha256": "a", "losses": [3.0, 2.0]}
    same = {"corpus_sha256": "a", "losses": [3.0, 2.25]}
    trainings = demo.compare_losses({"gloo": same, demo.ONE_PROCESS: one})
    assert [training.largest_difference for training in trainings] == [0.25, 0.0]
    with pytest.raises(demo.DemoError, match="another text"):
        demo.compare_losses({"gloo": {**same, "corpus_sha256": "b"}, demo.ONE_PROCESS: one})
    with pytest.raises(ValueError, match="zip"):
        demo.compare_losses({"gloo": {**same, "losses": [3.0]}, demo.ONE_PROCESS: one})


@pytest.mark.parametrize(("apart", "code", "said"), [(1e-5, 0, "agree"), (2e-4, 1, "DISAGREE")])
def test_the_demo_fails_if_losses_disagree(apart, code, said, tmp_path, monkeypatch, capsys):
    def run_training(backend, options):
        losses = [3.0, 2.0 + (apart if backend else 0.0)]
        return {
            "corpus_sha256": "a",
            "losses": losses,
            "world_size": 2,
            "tokens_per_second": 1e4,
            "communication": {"share": 0.1} if backend else None,
            "perplexity": {"before": 90.0, "after": 9.0},
        }

    row = Row("all_reduce", 8, "float32", False, 2, "gloo", (Sample(1e-4, 1e-4, None, 10, 0),))
    comparison = Comparison(("gloo",), (row,), {"rounds": 1})
    monkeypatch.setattr(demo, "run_training", run_training)
    monkeypatch.setattr(demo, "time_collectives", lambda options, console: comparison)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert demo.main(["--backends", "gloo", "--out", str(tmp_path / "out")]) == code
    output = capsys.readouterr().out
    assert f"losses {said}: over 300 steps" in output
    for name in ("loss.png", "all_reduce.png"):
        assert (tmp_path / "out" / name).is_file()
        assert f"wrote {tmp_path / 'out' / name}" in output


def run_module(arguments, path, ranks=None):
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-m", *(launcher if ranks else [])]
    command += ["pycoll.examples.train_gpt", *TINY, *arguments, "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(path.read_text()), ended


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(tmp_path):
    joined, ended = run_module(["--backend", BACKEND], tmp_path / "ranks.json", ranks=2)
    alone, _ = run_module(["--world-size", "1"], tmp_path / "one.json")
    assert (joined["backend"], joined["wrapper"]) == (BACKEND, "pycoll")
    assert joined["world_size"] == 2
    assert alone["backend"] is None
    differences = [abs(a - b) for a, b in zip(joined["losses"], alone["losses"], strict=True)]
    assert max(differences) <= LOSS_TOLERANCE
    assert joined["perplexity"] == pytest.approx(alone["perplexity"], rel=LOSS_TOLERANCE)
    assert joined["communication"]["pairs"] == 1
    # Rank 0 alone reports.
    assert ended.stdout.count("share of communication") == 1
    assert ended.stdout.count("sample:") == 1


# --- the demo's children --------------------------------------------------------------------------

PARENT = """
import sys
from pycoll.examples.demo import run_child
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
run_child([sys.executable, "-c", child])
"""


def test_a_childs_exit_code_is_returned():
    assert demo.run_child([sys.executable, "-c", "raise SystemExit(7)"]) == 7


@pytest.mark.slow
def test_an_interrupted_demo_ends_its_child():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGINT)
        try:
            parent.wait(30)
        finally:
            parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_a_failing_training_fails_the_demo(tmp_path, capfd):
    options = demo.parse(["--backends", "gloo", "--out", str(tmp_path), "--model", "tiny"])
    with pytest.raises(
        demo.DemoError, match="training over no_such_backend failed with exit code 2"
    ):
        demo.run_training("no_such_backend", options)
    assert "unknown backend 'no_such_backend'" in capfd.readouterr().err
