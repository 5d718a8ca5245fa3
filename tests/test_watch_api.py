"""`watch`, `unwatch`, `handle`, `Watch`: arguments, life time, copies and pickles.

One file: every test is of the same three functions.
"""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.run.find import find_runs
from tests.loops import batch, forward, net


def make(**kwargs):
    """Return a model, its optimizer and a scaler."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **kwargs})
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), scaler


def train(model, opt, scaler, steps=3, first=0):
    """Train a plain loop."""
    for step in range(first, first + steps):
        opt.zero_grad()
        scaler.scale(forward(model, *batch(step))).backward()
        scaler.step(opt)
        scaler.update()


def only_run(folder):
    """Return the one run of a folder."""
    (run,) = find_runs(folder)
    return run


# Arguments


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": None}, "model must be a torch.nn.Module"),
        ({"model": []}, "model is empty"),
        ({"model": [1]}, "model[0] must be a torch.nn.Module"),
        ({"scaler": None}, "with scaler=None pass optimizer="),
        ({"scaler": nn.Linear(1, 1)}, "the call is watch(scaler, model)"),
        ({"scaler": torch.amp.GradScaler}, "is a class"),
        ({"scaler": object()}, "must be a torch.amp.GradScaler or None, not object"),
        ({"every": 0}, "every must be an integer of at least 1, not 0"),
        ({"every": True}, "every must be an integer"),
        ({"every": 1.5}, "every must be an integer"),
        ({"exponents_every": -1}, "exponents_every must be an integer of at least 1, not -1"),
        ({"probe_every": -1}, "probe_every must be an integer of at least 0, not -1"),
        ({"activations": 3}, "activations must be True or False, not 3"),
        ({"step": -1}, "step must be a non-negative integer or None, not -1"),
        ({"tensorboard": "yes"}, "tensorboard must be True, False or a SummaryWriter, not str"),
        ({"optimizer": 1}, "optimizer must be a torch.optim.Optimizer, not int"),
        ({"log_dir": 3}, "log_dir must be a path, not int"),
        ({"run": "a/b"}, "run must be a single folder name, not 'a/b'"),
        ({"run": ""}, "run must be a single folder name, not ''"),
    ],
)
def test_wrong_arguments_raise_one_line(change, text, tmp_path):
    """What, and what to do; nothing is installed and no folder is made."""
    model, _, scaler = make()
    arguments = {"scaler": scaler, "model": model, "log_dir": tmp_path / "logs", **change}
    with pytest.raises(ampscope.AmpscopeError) as caught:
        ampscope.watch(arguments.pop("scaler"), arguments.pop("model"), **arguments)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(scaler) is torch.amp.GradScaler
    assert not (tmp_path / "logs").exists()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    """With `scaler=None` its steps would say nothing of the model."""
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    with pytest.raises(ampscope.AmpscopeError, match="holds none of the model's parameters"):
        ampscope.watch(None, net(), optimizer=other, log_dir=tmp_path)


def test_a_second_watch_of_one_scaler_is_refused(tmp_path):
    """And the first goes on."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    with pytest.raises(ampscope.AmpscopeError, match=r"watched already; call ampscope.unwatch\(scaler\)"):
        ampscope.watch(scaler, model, log_dir=tmp_path)
    train(model, opt, scaler)
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).steps.tolist() == [0, 1, 2]
    ampscope.watch(
        scaler, model, log_dir=tmp_path, run="again", tensorboard=False
    )  # once unwatched it may be watched anew
    ampscope.unwatch(scaler)


def test_a_run_that_is_being_written_is_refused(tmp_path):
    """A live process is not written over; a scaler that is garbage does not count as one."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    with pytest.raises(ampscope.AmpscopeError, match="is being written by a live process"):
        ampscope.watch(make()[2], model, log_dir=tmp_path, run="r")
    train(model, opt, scaler)
    scaler = torch.amp.GradScaler("cpu")  # as when a notebook's cell runs again
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    train(model, opt, scaler, 2)
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).steps.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["file", "unwritable", "newer"])
def test_an_unusable_log_folder_warns_once_and_training_goes_on(kind, tmp_path):
    """The handle works, and says so by `run_dir` None."""
    folder = tmp_path / "logs"
    run = None
    if kind == "file":
        folder.write_text("")
    elif kind == "unwritable":
        if os.geteuid() == 0:
            folder = "/proc/ampscope"
        else:
            folder.mkdir(mode=0o500)
    else:
        pytest.importorskip("pyarrow")
        model, opt, scaler = make()
        ampscope.watch(scaler, model, log_dir=folder, run="r", tensorboard=False)
        train(model, opt, scaler)
        ampscope.unwatch(scaler)
        for path in (folder / "r").glob("*.arrows"):
            data = path.read_bytes()
            assert b'"version": 1' in data
            path.write_bytes(data.replace(b'"version": 1', b'"version": 9'))
        run = "r"
    model, opt, scaler = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ampscope.watch(scaler, model, log_dir=folder, run=run) is scaler
        train(model, opt, scaler)
        made = ampscope.handle(scaler)
        assert made.run_dir is None
        assert made.step == 3
        made.log(x=1.0)
        made.flush()
        ampscope.unwatch(scaler)
    ours = [w for w in caught if "ampscope" in str(w.message)]
    assert len(ours) == 1, [str(w.message) for w in ours]
    assert "\n" not in str(ours[0].message)
    assert ours[0].filename == __file__
    assert type(scaler) is torch.amp.GradScaler


# Life time


def test_watch_returns_the_same_scaler_of_the_same_class(tmp_path):
    """`isinstance`, names and methods' signatures stay."""
    import inspect

    model, _, scaler = make()
    same = ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    assert same is scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    assert type(scaler).__name__ == "GradScaler"
    assert inspect.signature(scaler.step) == inspect.signature(torch.amp.GradScaler("cpu").step)
    assert scaler.step.__doc__ == torch.amp.GradScaler.step.__doc__
    ampscope.unwatch(scaler)
    assert type(scaler) is torch.amp.GradScaler
    ampscope.unwatch(scaler)  # harmless
    with pytest.raises(ampscope.AmpscopeError, match="not watched"):
        ampscope.handle(scaler)
    with pytest.raises(ampscope.AmpscopeError, match="not a watched scaler"):
        ampscope.unwatch(3)


def test_the_context_manager_closes_also_on_an_exception(tmp_path):
    """What was recorded is on disk, the scaler has its class back, the exception goes on."""
    model, opt, scaler = make()
    with pytest.raises(ZeroDivisionError):
        with ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False) as entered:
            assert entered is scaler
            train(model, opt, scaler)
            raise ZeroDivisionError
    assert type(scaler) is torch.amp.GradScaler
    run = only_run(tmp_path)
    assert run.finished
    assert run.steps.tolist() == [0, 1, 2]


def test_a_watch_without_a_scaler_is_a_handle(tmp_path):
    """It is returned, closes in `with`, and lives as long as its optimizer though nobody keeps it."""
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    with ampscope.watch(None, model, optimizer=opt, log_dir=tmp_path / "a", tensorboard=False) as made:
        assert isinstance(made, ampscope.Watch)
        assert ampscope.handle(made) is made
        forward(model, *batch(0), dtype=torch.bfloat16).backward()
        opt.step()
        assert made.step == 1
    assert not opt._optimizer_step_pre_hooks
    ampscope.watch(None, model, optimizer=opt, log_dir=tmp_path / "b", tensorboard=False)
    gc.collect()
    opt.step()
    folder = only_run(tmp_path / "b").path
    del opt, made
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "ampscope-close":
            thread.join()
    run = ampscope.open_run(folder)
    assert run.finished
    assert run.steps.tolist() == [0]
    assert run.scalar("loss_scale").tolist() == [1.0]


def test_handle(tmp_path):
    """Folder, step, flush."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    made = ampscope.handle(scaler)
    assert made.run_dir == tmp_path / "r"
    assert made.step == 0
    train(model, opt, scaler)
    assert made.step == 3
    made.flush()
    assert ampscope.open_run(tmp_path / "r").steps.tolist() == [0, 1, 2]
    made.close()
    made.close()
    assert type(scaler) is torch.amp.GradScaler
    made.log(after=1.0)  # too late, and harmless


def test_scalars_of_the_users(tmp_path):
    """They go with the open step; the later of two wins; what is no number warns once and is left out."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    made = ampscope.handle(scaler)
    for step in range(3):
        made.log(a=step, b=torch.tensor(float(step)), c=np.float32(0.5))
        made.log(a=step + 10)
        train(model, opt, scaler, 1)
    with pytest.warns(RuntimeWarning, match="needs a number") as caught:
        made.log(bad="x")
        made.log(bad="y", many=torch.ones(2))
    assert len(caught) == 2
    made.log(final=0.75)  # after the last step
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2]
    assert run.scalar("a").tolist() == [10.0, 11.0, 12.0]
    assert run.scalar("b").tolist() == [0.0, 1.0, 2.0]
    assert run.scalar("c").tolist() == [0.5] * 3
    assert run.scalar("final")[-1] == 0.75
    assert "bad" not in run.scalars
    assert len([e for e in run.events if e.kind == "skip"]) == 0


def test_nothing_is_kept_alive(tmp_path):
    """A dropped scaler goes, with its model, and its run is closed."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    train(model, opt, scaler)
    gone = [weakref.ref(x) for x in (scaler, model, opt)]
    del model, opt, scaler
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "ampscope-close":
            thread.join()
    gc.collect()
    assert [x() for x in gone] == [None] * 3
    run = only_run(tmp_path)
    assert run.finished
    assert run.steps.tolist() == [0, 1, 2]


def test_an_optimizer_made_anew_goes_on_under_its_name(tmp_path):
    """As in loops that make one an epoch; its state is not kept alive."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    for _ in range(3):
        opt = torch.optim.Adam(model.parameters())
        train(model, opt, scaler, 2)
        gone = weakref.ref(opt)
        del opt
        gc.collect()
        assert gone() is None
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, other, scaler, 1)
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert {x.optimizer for x in run.layers} == {"SGD.1"}
    assert run.scalar("skipped/Adam.0")[:6].tolist() == [0.0] * 6
    assert len(run.steps) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_not_write_its_parents_log(tmp_path):
    """It may train, and exit; the parent goes on."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    train(model, opt, scaler, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process that has threads
        child = os.fork()
    if child == 0:
        try:
            train(model, opt, scaler, 2)
            ampscope.unwatch(scaler)
            os._exit(0 if type(scaler) is torch.amp.GradScaler else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    train(model, opt, scaler, 2, 2)
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert run.finished
    assert not run.damage


def test_training_in_another_thread(tmp_path):
    """Than the one that called watch()."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    thread = threading.Thread(target=train, args=(model, opt, scaler, 4))
    thread.start()
    thread.join()
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).steps.tolist() == [0, 1, 2, 3]


def test_memory_stays_flat(tmp_path):
    """A thousand steps leave no object behind."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    counts = []
    for first in (0, 300, 1300):
        train(model, opt, scaler, 300 if first == 0 else 1000 if first == 300 else 1, first)
        ampscope.handle(scaler).flush()
        gc.collect()
        counts.append(len(gc.get_objects()))
    ampscope.unwatch(scaler)
    assert counts[1] - counts[0] < 300


def test_the_interpreters_exit_loses_nothing(tmp_path):
    """A script that never unwatches."""
    script = f"""
import sys, torch, ampscope
sys.path.insert(0, {os.getcwd()!r})
from tests.test_watch_api import make, train
model, opt, scaler = make()
ampscope.watch(scaler, model, log_dir={str(tmp_path)!r})
train(model, opt, scaler, 5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    run = only_run(tmp_path)
    assert run.finished
    assert run.steps.tolist() == [0, 1, 2, 3, 4]


def test_importing_ampscope_does_not_import_torch():
    """Nor anything else that is heavy; in under 0.3 s."""
    script = (
        "import sys, time; t = time.perf_counter(); import ampscope; t = time.perf_counter() - t;"
        "print(t); assert not {'torch', 'pyarrow', 'numpy', 'dash', 'tensorboard', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


# Copies and pickles


class Subclass(torch.amp.GradScaler):
    """A user's scaler with an attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mine = [1, 2]


class Odd(torch.amp.GradScaler):
    """A scaler that needs arguments to be made."""

    def __new__(cls, name, *, word):
        """Need both."""
        made = super().__new__(cls)
        made.name, made.word = name, word
        return made

    def __init__(self, name, *, word):
        super().__init__("cpu")

    def __getnewargs_ex__(self):
        """Tell pickle."""
        return (self.name,), {"word": self.word}


class Reducing(torch.amp.GradScaler):
    """A scaler with a `__reduce__` of its own."""

    def __reduce__(self):
        """Forget everything but the class."""
        return type(self), ("cpu",)


SCALERS = {
    "plain": lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "subclass": lambda: Subclass("cpu", init_scale=64.0),
    "newargs": lambda: Odd("n", word="w"),
    "reduce": lambda: Reducing("cpu"),
}


@pytest.mark.parametrize("kind", SCALERS)
def test_copies_and_pickles_are_as_if_unwatched(kind, tmp_path):
    """Of the original class, with the same state, and free of the recorder."""
    model, opt, _ = make()
    scaler = SCALERS[kind]()
    original = type(scaler)
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    train(model, opt, scaler, 2)
    buffer = io.BytesIO()
    torch.save(scaler, buffer)
    buffer.seek(0)
    made = [
        *(pickle.loads(pickle.dumps(scaler, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(scaler),
        copy.deepcopy(scaler),
        torch.load(buffer, weights_only=False),
    ]
    step = ampscope.handle(scaler).step
    for other in made:
        assert type(other) is original
        assert other.__dict__.keys() == scaler.__dict__.keys()
        assert other.is_enabled() == scaler.is_enabled()
        train(model, opt, other, 1)
        with pytest.raises(ampscope.AmpscopeError):
            ampscope.handle(other)
    assert ampscope.handle(scaler).step == step
    ampscope.unwatch(scaler)


def test_state_dicts_and_pickled_bytes_are_those_of_an_unwatched_scaler(tmp_path):
    """No key more; a pickle names no ampscope class, so it loads where ampscope is not installed."""
    model, opt, scaler = make()
    model2, opt2, scaler2 = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    train(model, opt, scaler)
    train(model2, opt2, scaler2)
    assert scaler.state_dict() == scaler2.state_dict()
    assert set(model.state_dict()) == set(model2.state_dict())
    assert b"ampscope" not in pickle.dumps(scaler)
    assert b"ampscope" not in pickle.dumps(model)
    assert b"ampscope" not in pickle.dumps(opt)
    ampscope.unwatch(scaler)


def test_models_and_optimizers_copy_and_pickle_at_any_moment(tmp_path):
    """Before the first step, and later; the copies have no hooks and drive nothing."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    for first in range(3):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for module in other.modules():
                assert not module._forward_hooks
                assert not module._forward_pre_hooks
            for p in other.parameters():
                assert not p._post_accumulate_grad_hooks
                assert not p._backward_hooks
            o = torch.optim.SGD(other.parameters(), lr=1e-3)
            forward(other, *batch(0)).backward()
            o.step()
        copy.deepcopy(opt).step()
        pickle.dumps(opt)
        train(model, opt, scaler, 1, first)
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).steps.tolist() == [0, 1, 2]
    assert [x.name for x in only_run(tmp_path).layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]


# Sessions


@pytest.mark.parametrize("order", ["load_then_watch", "watch_then_load"])
def test_resuming_from_a_checkpoint_goes_on(order, tmp_path):
    """Steps go on, the scale is the checkpoint's, and both orders of loading do."""
    model, opt, scaler = make(growth_interval=3)
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    train(model, opt, scaler, 7)
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()})
    ampscope.unwatch(scaler)

    model, opt, scaler = make(growth_interval=3)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    if order == "load_then_watch":
        scaler.load_state_dict(saved["scaler"])
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    if order == "watch_then_load":
        scaler.load_state_dict(saved["scaler"])
    assert ampscope.handle(scaler).step == 7
    train(model, opt, scaler, 5, 7)
    ampscope.unwatch(scaler)

    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == list(range(12))
    assert run.scalar("loss_scale").tolist() == [2.0 ** (10 + s // 3) for s in range(12)]
    assert run.scalar("growth_tracker").tolist() == [float(s % 3) for s in range(12)]
    assert [(e.step, e.data["session"]) for e in run.events if e.kind == "session"] == [(7, 1)]
    assert [(s.first_step, s.last_step) for s in run.sessions] == [(0, 6), (7, 11)]
    assert not [e for e in run.events if e.kind == "settings"]


def test_a_session_may_begin_at_a_step_of_the_users(tmp_path):
    """Where steps overlap the later session wins."""
    for session, step in ((0, None), (1, 3)):
        model, opt, scaler = make(init_scale=2.0 ** (8 + session))
        ampscope.watch(scaler, model, log_dir=tmp_path, run="r", step=step, tensorboard=False)
        train(model, opt, scaler, 5)
        ampscope.unwatch(scaler)
    run = ampscope.open_run(tmp_path / "r")
    assert run.steps.tolist() == list(range(8))
    assert run.scalar("loss_scale").tolist() == [256.0] * 3 + [512.0] * 5
    assert run.session(0).scalar("loss_scale").tolist() == [256.0] * 5


# Scalers of the users' own


class Renaming(torch.amp.GradScaler):
    """Calls its arguments otherwise, and takes more of them."""

    def scale(self, loss, factor=1.0):
        """Scale."""
        return super().scale(loss * factor)

    def step(self, opt, verbose=False):
        """Step."""
        return super().step(opt)


class StepUpdates(torch.amp.GradScaler):
    """Updates at the end of its step."""

    def step(self, optimizer, *args, **kwargs):
        """Step and update."""
        out = super().step(optimizer, *args, **kwargs)
        self.update()
        return out


class Final(torch.amp.GradScaler):
    """A class that cannot be derived from."""

    def __init_subclass__(cls, **kwargs):
        raise TypeError("Final is final")


def test_a_subclass_may_name_its_arguments_as_it_likes(tmp_path):
    """Positional, by its names, and by GradScaler's."""
    model, opt, _ = make()
    scaler = ampscope.watch(Renaming("cpu"), model, log_dir=tmp_path, tensorboard=False)
    for k in range(3):
        opt.zero_grad()
        scaler.scale(loss=forward(model, *batch(k)), factor=0.5).backward()
        scaler.step(opt=opt, verbose=True)
        scaler.update(new_scale=None)
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2]
    assert np.isfinite(run.metric("grad_norm")).all()


def test_a_subclass_whose_step_updates(tmp_path):
    """One record a step."""
    model, opt, _ = make()
    scaler = ampscope.watch(StepUpdates("cpu"), model, log_dir=tmp_path, tensorboard=False)
    for k in range(4):
        opt.zero_grad()
        scaler.scale(forward(model, *batch(k))).backward()
        scaler.step(opt)
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert np.isfinite(run.metric("grad_norm")).all()
    assert (run.scalar("micro_steps") == 1).all()


def test_a_class_that_cannot_be_derived_from_is_refused(tmp_path):
    """In one line; the run's folder is free again, nothing listens."""
    from torch.optim import optimizer as module

    model, _, _ = make()
    before = len(module._global_optimizer_pre_hooks)
    with pytest.raises(ampscope.AmpscopeError, match="cannot watch a Final: Final is final"):
        ampscope.watch(Final("cpu"), model, log_dir=tmp_path, run="r", tensorboard=False)
    assert len(module._global_optimizer_pre_hooks) == before
    ampscope.unwatch(ampscope.watch(make()[2], model, log_dir=tmp_path, run="r", tensorboard=False))


def test_names_that_every_run_has_are_not_taken(tmp_path):
    """`log(lr=...)` is kept as `user/lr`; without a scaler `log(loss=...)` is the loss."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path / "a", tensorboard=False)
    ampscope.handle(scaler).log(lr=5.0, loss=7.0)
    train(model, opt, scaler, 1)
    ampscope.unwatch(scaler)
    run = only_run(tmp_path / "a")
    assert run.scalar("lr").tolist() == [1e-3]
    assert run.scalar("user/lr").tolist() == [5.0]
    assert run.scalar("loss")[0] != 7.0
    assert run.scalar("user/loss").tolist() == [7.0]
    with ampscope.watch(None, model, optimizer=opt, log_dir=tmp_path / "b", tensorboard=False) as made:
        loss = forward(model, *batch(0), dtype=torch.bfloat16)
        loss.backward()
        made.log(loss=loss)
        opt.step()
    np.testing.assert_allclose(only_run(tmp_path / "b").scalar("loss"), [loss.item()], rtol=1e-6)


def test_a_stray_call_of_scale_is_no_record(tmp_path):
    """A known way to read the scale; nothing is back-propagated."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    train(model, opt, scaler, 2)
    scaler.scale(torch.ones(()))
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).steps.tolist() == [0, 1]


def test_a_run_this_process_writes_is_refused_in_its_own_words(tmp_path):
    """A notebook's cell that runs again while the old scaler is still at hand: what to call is said."""
    model = torch.nn.Linear(4, 1)
    old = ampscope.watch(torch.amp.GradScaler("cpu"), model, log_dir=tmp_path, run="r")
    with pytest.raises(ampscope.AmpscopeError, match=r"this one; call ampscope.unwatch\(\)"):
        ampscope.watch(torch.amp.GradScaler("cpu"), model, log_dir=tmp_path, run="r")
    ampscope.unwatch(old)
    ampscope.unwatch(ampscope.watch(torch.amp.GradScaler("cpu"), model, log_dir=tmp_path, run="r"))
    assert len(ampscope.open_run(tmp_path / "r").sessions) == 2


def test_parameters_changed_beneath_the_same_object_are_described_anew(tmp_path):
    """`param.data = ...` of another shape, `model.double()`: at the next step with histograms the layers say so, in a new part."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ampscope.watch(scaler, model, log_dir=tmp_path, exponents_every=2, tensorboard=False)
    for step in range(6):
        if step == 2:
            model[0].weight.data, model[0].bias.data = torch.randn(3, 4), torch.zeros(3)
            model[1].weight.data = torch.randn(1, 3)
        if step == 4:
            model.double()
        opt.zero_grad()
        scaler.scale(model(torch.ones(2, 4, dtype=model[0].weight.dtype)).mean()).backward()
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.steps.tolist() == list(range(6))
    assert run.layers[0].shape == (3, 4)
    assert run.layers[0].numel == 12
    assert {layer.dtype for layer in run.layers} == {"float64"}
    assert np.isfinite(run.metric("grad_norm")).all()
