"""A finding at warning or above is logged once, in one line, while training or when the watch closes."""

from __future__ import annotations

import logging

import pytest

from ampscope.probe import advice
from tests.cases import forward_overflow_activation, scaler_useless_with_bf16
from tests.casing import play
from tests.healthy import RUNS


def told(caplog):
    """Return the logged lines."""
    return [r.getMessage() for r in caplog.records if r.name == "ampscope"]


def test_a_fault_is_logged_once_in_one_line_with_the_command(caplog, tmp_path):
    """The line names step, place and rule, and the command that tells more."""
    with caplog.at_level(logging.WARNING):
        play(forward_overflow_activation.main, tmp_path)
    lines = told(caplog)
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "blocks.1.wo" in lines[0]
    assert "forward-overflow-activation" in lines[0]
    assert f"ampscope check {tmp_path}/case" in lines[0]


def test_a_healthy_run_logs_nothing(caplog, tmp_path):
    """No line, although steps were skipped at the start."""
    with caplog.at_level(logging.WARNING):
        play(lambda watch: RUNS["regression"](watch, 0), tmp_path)
    assert told(caplog) == []


def test_a_fault_without_a_skip_is_told_at_the_end(caplog, tmp_path):
    """Nothing suspicious happened on the way; the last look finds it."""
    with caplog.at_level(logging.WARNING):
        play(scaler_useless_with_bf16.main, tmp_path)
    assert [line for line in told(caplog) if "scaler-useless-with-bf16" in line]


def test_a_fault_is_told_while_training_goes_on(caplog, tmp_path, monkeypatch):
    """The look on another thread logs before the watch closes, and the last look does not repeat it."""
    monkeypatch.setattr(advice, "SETTLE", 0.0)
    monkeypatch.setattr(advice, "EVERY", 0.0)
    monkeypatch.setattr(advice, "PATIENCE", 2)
    seen = []

    def main(watch):
        handle = []

        def watched(scaler, model):
            handle.append(watch(scaler, model))
            return scaler

        import ampscope

        def spy(step):
            ampscope.handle(handle[0]).flush()
            observer = next(o for o in ampscope.handle(handle[0]).recorder.observers if isinstance(o, advice.Advice))
            if observer._thread is not None:
                observer._thread.join()
            seen.append(len(told(caplog)))

        forward_overflow_activation.main(watched, after=spy)

    with caplog.at_level(logging.WARNING):
        play(main, tmp_path)
    assert seen[-1] == 1
    assert len(told(caplog)) == 1


def test_a_folder_that_is_gone_ends_nothing(tmp_path):
    """Whatever the reader raises stays inside."""
    observer = advice.Advice(tmp_path / "nothing")
    observer._steps = 1
    observer.closed()


@pytest.fixture(autouse=True)
def _propagate(caplog):
    """Let caplog see the library's logger."""
    logging.getLogger("ampscope").propagate = True
