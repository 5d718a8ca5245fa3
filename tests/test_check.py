"""`ampscope check`: words, JSON, exit status, several runs, a run still going, a run that died before its first step."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

import ampscope
from ampscope.cli.main import main
from tests.cases import forward_overflow_activation, scaler_useless_with_bf16
from tests.casing import play
from tests.healthy import RUNS

KEYS = ["rule", "severity", "title", "phase", "layers", "op", "where", "steps", "evidence", "remedy"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return a folder with a healthy run, one with an error and, newest, one with a warning."""
    folder = tmp_path_factory.mktemp("logs")
    play(lambda watch: RUNS["regression"](watch, 0), folder / "healthy")
    play(forward_overflow_activation.main, folder / "broken")
    play(scaler_useless_with_bf16.main, folder / "bf16")
    now = time.time()
    for age, name in ((200, "healthy"), (100, "broken"), (0, "bf16")):
        for file in (folder / name / "case").iterdir():
            os.utime(file, (now - age, now - age))
    return folder


def check(capsys, *argv):
    """Return (exit status, stdout, stderr)."""
    status = main(["check", *map(str, argv)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_healthy_run_gets_one_reassuring_line_with_facts(capsys, logs):
    """Skips of the warm-up and the scale are told; the status is 0."""
    status, out, _ = check(capsys, logs / "healthy")
    assert status == 0
    head, line = out.strip().splitlines()
    assert head == "case: 40 steps, finished"
    assert line.startswith("Healthy: ")
    assert "skipped" in line
    assert "2^" in line


def test_an_error_is_told_in_words_and_fails(capsys, logs):
    """Rule, place, steps, evidence and remedy, within 80 columns and without escapes where output is piped."""
    status, out, _ = check(capsys, logs / "broken")
    assert status == 1
    for word in ("error", "forward-overflow-activation", "blocks.1.wo", "forward", "65504", "BF16"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize(("fail_on", "expected"), [("error", 0), ("warning", 1)])
def test_fail_on_sets_the_exit_status(capsys, logs, fail_on, expected):
    """A warning fails only if it is asked to."""
    assert check(capsys, logs / "bf16", "--fail-on", fail_on)[0] == expected


def test_json_has_the_shape_of_the_contract(capsys, logs):
    """The newest run by default; every key of a finding, in order; `steps` is first, last, count."""
    status, out, _ = check(capsys, logs / "broken", "--json")
    assert status == 1
    told = json.loads(out)
    assert list(told) == ["run", "findings"]
    (finding,) = told["findings"]
    assert list(finding) == KEYS
    assert finding["steps"] == [0, 7, 8]
    assert finding["layers"][0] == "blocks.1.wo"
    assert finding["evidence"]["summary"]


def test_the_newest_run_is_taken_or_all_or_one_by_name(capsys, logs):
    """`--all` prints a list; `--run` picks; both together are refused."""
    assert json.loads(check(capsys, logs, "--json")[1])["findings"][0]["rule"] == "scaler-useless-with-bf16"
    status, out, _ = check(capsys, logs, "--all", "--json")
    assert status == 1
    assert [f["rule"] for x in json.loads(out) for f in x["findings"]][:2] == [
        "scaler-useless-with-bf16",
        "forward-overflow-activation",
    ]
    assert len(json.loads(out)) == 3
    assert check(capsys, logs, "--run", "healthy/case")[0] == 0
    assert check(capsys, logs, "--run", "x", "--all")[0] == 2
    status, _, err = check(capsys, logs, "--run", "nothing")
    assert (status, len(err.strip().splitlines())) == (2, 1)


def test_unusable_input_is_one_line_and_status_2(capsys, tmp_path):
    """A folder that is not there, one without a run, a file."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none", tmp_path, tmp_path / "file"):
        status, out, err = check(capsys, path)
        assert (status, out) == (2, "")
        assert len(err.strip().splitlines()) == 1


def test_a_run_still_going_and_one_that_died_before_its_first_step(capsys, tmp_path):
    """Nothing is known of the first yet; the second cannot be judged."""
    model = torch.nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu")
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    try:
        ampscope.handle(scaler).flush()
        status, out, _ = check(capsys, tmp_path)
        assert status == 0
        assert "still running" in out
        assert "No step was recorded yet." in out
        folder = tmp_path / "r"
        old = time.time() - 7200
        for file in folder.iterdir():
            os.utime(file, (old, old))
        status, out, _ = check(capsys, tmp_path)
        assert status == 2
        assert "stopped without closing, last sign of life 2 h ago" in out
        assert json.loads(check(capsys, tmp_path, "--json")[1]) == {"run": "r", "findings": []}
    finally:
        ampscope.unwatch(scaler)


def test_hostile_names_do_not_reach_the_terminal(capsys, tmp_path):
    """Escapes and markup in a layer's name are shown, not obeyed."""

    def main_(watch):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"a\x1b[31m[bold]b": torch.nn.Linear(4, 4)})
        opt = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        watch(scaler, model)
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (next(iter(model.values()))(torch.ones(2, 4)) * 60000.0).mul(60.0).sum()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    play(main_, tmp_path)
    _, out, _ = check(capsys, tmp_path)
    assert "\x1b" not in out
