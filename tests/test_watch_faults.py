"""Errors reach the user unchanged; faults of ampscope's own never do."""

import traceback
import warnings

import numpy as np
import pytest
import torch

import ampscope
from ampscope.probe.observer import Observer
from ampscope.probe.recorder import Recorder
from ampscope.run.find import find_runs
from tests.loops import batch, forward, net
from tests.test_watch_api import make, only_run, train

# GradScaler's own errors


def unscale_twice(model, opt, scaler):
    """Unscale twice."""
    scaler.scale(forward(model, *batch(0))).backward()
    scaler.unscale_(opt)
    scaler.unscale_(opt)


def step_twice(model, opt, scaler):
    """Step twice."""
    scaler.scale(forward(model, *batch(0))).backward()
    scaler.step(opt)
    scaler.step(opt)


def step_before_scale(model, opt, scaler):
    """Step before any scale()."""
    scaler.step(opt)


def no_gradients(model, opt, scaler):
    """No gradient anywhere."""
    scaler.scale(forward(model, *batch(0)))
    scaler.step(opt)


def update_without_step(model, opt, scaler):
    """Nothing was checked for inf."""
    scaler.scale(forward(model, *batch(0)))
    scaler.update()


def closure(model, opt, scaler):
    """Closures are not supported."""
    scaler.scale(forward(model, *batch(0))).backward()
    scaler.step(opt, closure=lambda: 0.0)


def half_gradients(model, opt, scaler):
    """FP16 parameters."""
    model.half()
    scaler.scale(model(batch(0)[0].half()).float().sum()).backward()
    scaler.step(opt)


def scale_a_string(model, opt, scaler):
    """Not a tensor."""
    scaler.scale([1])


def wrong_arguments(model, opt, scaler):
    """A call with arguments the method does not take."""
    scaler.unscale_()


def optimizer_raises(model, opt, scaler):
    """The optimizer's own error."""
    opt.step = lambda: {}["gone"]
    scaler.scale(forward(model, *batch(0))).backward()
    scaler.step(opt)


BAD = [
    unscale_twice, step_twice, step_before_scale, no_gradients, update_without_step, closure, half_gradients, scale_a_string,
    wrong_arguments, optimizer_raises,
]  # fmt: skip


def outcome(use, watched, tmp_path):
    """Return (type, arguments) of the error, the state of the scaler, and the innermost line of the traceback."""
    model, opt, scaler = make()
    if watched:
        ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (compared below)
        use(model, opt, scaler)
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None
    line = traceback.extract_tb(error.__traceback__)[-1]
    state = scaler.state_dict(), {k: v["stage"] for k, v in scaler._per_optimizer_states.items()}.values()
    if watched:
        assert ampscope.handle(scaler).recorder.enabled
        ampscope.unwatch(scaler)
    return (
        (type(error), error.args),
        state[0],
        list(state[1]),
        (line.filename, line.lineno) if "torch" in line.filename else None,
    )


@pytest.mark.parametrize("use", BAD, ids=lambda f: f.__name__)
def test_scaler_errors_reach_the_user_unchanged(use, tmp_path, recwarn):
    """Type, arguments, place, and what they left behind."""
    want, *rest = outcome(use, False, tmp_path)
    got, *same = outcome(use, True, tmp_path)
    if use is wrong_arguments:  # Python's own message names the function that was called
        assert got[0] is want[0] is TypeError
        assert rest[:2] == same[:2]
    else:
        assert got == want
        assert rest == same
    assert not [w for w in recwarn if "ampscope" in str(w.message)]


def test_the_loop_may_go_on_after_an_error(tmp_path):
    """The error is caught, `update()` comes, and the next record is whole."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    for step in range(4):
        opt.zero_grad()
        scaler.scale(forward(model, *batch(step))).backward()
        scaler.unscale_(opt)
        with pytest.raises(RuntimeError):
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert np.isfinite(run.metric("grad_norm")).all()


# Loops that do not update


def test_a_loop_that_never_updates_is_recorded_until_the_scaler_refuses(tmp_path):
    """Records close at the next scale() after a step; what is open closes at unwatch."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    scaler.scale(forward(model, *batch(0, spike=(0,)) if False else batch(0))).backward()
    scaler.step(opt)
    opt.zero_grad()
    loss = forward(model, *batch(1))
    scaler.scale(loss).backward()
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(opt)
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1]
    assert run.scalar("micro_steps").tolist() == [1.0, 1.0]
    np.testing.assert_allclose(run.scalar("loss")[1], loss.item(), rtol=1e-6)
    assert run.scalar("skipped").tolist() == [0.0, 0.0]


def test_a_skip_without_update_is_seen_once(tmp_path):
    """The flag belongs to the record in which the step was skipped, not to the one after it."""
    model, opt, scaler = make(init_scale=2.0**15)
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    x, y = batch(0)
    scaler.scale(forward(model, x, y + 1e6)).backward()
    scaler.step(opt)
    opt.zero_grad()
    scaler.scale(forward(model, x, y)).backward()
    with pytest.raises(RuntimeError):
        scaler.step(opt)
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).scalar("skipped").tolist() == [1.0, 0.0]


def test_an_exception_before_update_loses_nothing(tmp_path):
    """The half step is a record too."""
    model, opt, scaler = make()
    with pytest.raises(ZeroDivisionError), ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False):
        train(model, opt, scaler, 2)
        opt.zero_grad()
        scaler.scale(forward(model, *batch(2))).backward()
        scaler.step(opt)
        raise ZeroDivisionError
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2]
    assert np.isfinite(run.metric("grad_norm")[2]).all()
    assert run.finished


def test_bare_steps_beside_a_scaler_are_seen(tmp_path):
    """`optimizer.step()` on scaled gradients: records close at the next scale(), with statistics."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    other = torch.optim.SGD(net(3).parameters(), lr=0.1)
    for step in range(4):
        opt.zero_grad()
        scaler.scale(forward(model, *batch(step))).backward()
        opt.step()
        other.step()  # of no concern
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert np.isfinite(run.metric("grad_norm")).all()
    assert {x.optimizer for x in run.layers} == {"SGD.0"}


# Faults of ampscope's own


class Faulty(Observer):
    """Raises at one place."""

    def __init__(self, where):
        self.closed_times = 0

        def fault(*args):
            raise ValueError("broken")

        setattr(self, where, fault)

    def closed(self):
        """Count."""
        self.closed_times += 1


@pytest.mark.parametrize(
    "where",
    [
        "attached",
        "scaled",
        "before_unscale",
        "before_optimizer_step",
        "after_optimizer_step",
        "before_update",
        "after_update",
        "resolved",
    ],
)
def test_a_faulty_observer_is_switched_off_alone(where, tmp_path, monkeypatch):
    """One warning; recording and training go on."""
    observer = Faulty(where)
    monkeypatch.setattr("ampscope.probe.watch.default_observers", lambda **options: [observer])
    model, opt, scaler = make()
    with pytest.warns(RuntimeWarning, match="switched Faulty off") as caught:
        ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
        train(model, opt, scaler)
        ampscope.unwatch(scaler)
    assert len(caught) == 1
    assert observer.closed_times == 1
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2]
    assert [e.data["part"] for e in run.events if e.data.get("topic") == "switched_off"] == ["Faulty"]


@pytest.mark.parametrize(
    "method",
    [
        "before_scale",
        "after_scale",
        "before_unscale",
        "after_unscale",
        "before_step",
        "after_step",
        "before_update",
        "after_update",
        "_finish",
        "log",
    ],
)
def test_a_fault_of_the_recorder_ends_recording_not_training(method, tmp_path, monkeypatch):
    """One warning, the same parameters, no hook left, what was recorded is on disk; the handle still takes calls."""
    model, opt, scaler = make()
    train(model, opt, scaler, 6)
    want = [p.detach().clone() for p in model.parameters()]

    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    made = ampscope.handle(scaler)
    train(model, opt, scaler, 2)

    def fault(*args):
        raise KeyError("broken")

    monkeypatch.setattr(made.recorder, method, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.log(x=1.0)
        train(model, opt, scaler, 4, 2)
        ampscope.handle(scaler).log(x=1.0)
        made.flush()
    assert len([w for w in caught if "ampscope stopped recording (KeyError" in str(w.message)]) == 1
    for a, b in zip(want, model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    ampscope.unwatch(scaler)
    assert type(scaler) is torch.amp.GradScaler
    run = only_run(tmp_path)
    assert run.steps.tolist()[:2] == [0, 1]
    assert any(e.data.get("topic") == "stopped" for e in run.events)


def test_warnings_as_errors_do_not_reach_the_loop(tmp_path, monkeypatch, capsys):
    """With `-W error` the text goes to stderr."""
    monkeypatch.setattr("ampscope.probe.watch.default_observers", lambda **options: [Faulty("scaled")])
    model, opt, scaler = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
        train(model, opt, scaler)
        ampscope.unwatch(scaler)
    assert "switched Faulty off" in capsys.readouterr().err
    assert only_run(tmp_path).steps.tolist() == [0, 1, 2]


def test_the_log_folder_removed_midway(tmp_path):
    """Training goes on, without an exception in any thread."""
    import shutil

    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path / "logs", tensorboard=False)
    train(model, opt, scaler)
    ampscope.handle(scaler).flush()
    while (tmp_path / "logs").exists():
        shutil.rmtree(tmp_path / "logs", ignore_errors=True)  # the writer may make a file meanwhile
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, opt, scaler, 3, 3)
        ampscope.handle(scaler).flush()
        train(model, opt, scaler, 3, 6)
        ampscope.unwatch(scaler)
    assert all(issubclass(w.category, RuntimeWarning) for w in caught)
    assert len(caught) <= 2
    assert type(scaler) is torch.amp.GradScaler
    assert find_runs(tmp_path) is not None


def test_a_captured_cuda_graph_is_left_alone_and_said_once(tmp_path, monkeypatch):
    """While a stream is captured the scaler's own methods run and nothing else; before and after, records are made."""
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ampscope.watch(torch.amp.GradScaler("cpu", init_scale=4.0), model, log_dir=tmp_path, tensorboard=False)
    told = []
    monkeypatch.setattr("ampscope.probe.recorder.say", told.append)
    guarded = Recorder.guarded
    calls = []
    monkeypatch.setattr(Recorder, "guarded", lambda self, what, *args: (calls.append(what), guarded(self, what, *args)))
    for step in range(8):
        capturing[0] = 3 <= step < 6
        calls.clear()
        opt.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(opt)
        scaler.update()
        if capturing[0]:
            assert set(calls) == {"captured"}
    assert len(told) == 1
    assert "CUDA graph" in told[0]
    ampscope.unwatch(scaler)
    run = ampscope.find_runs(tmp_path)[0]
    assert run.steps.tolist() == list(range(5))
    assert [e.data["topic"] for e in run.events if e.data.get("topic") == "captured"] == ["captured"]
