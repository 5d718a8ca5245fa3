"""Every loop: recorded, unchanged bit for bit, no synchronisation added, nothing left behind."""

import gc

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import ampscope
from ampscope.run.find import find_runs
from tests.loops import LOOPS, UNSEEN


class Watching:
    """`watch` for a loop: watches into a folder, unwatches at the end."""

    def __init__(self, folder, **kwargs):
        self.folder, self.kwargs, self.watched = folder, kwargs, []

    def __call__(self, scaler, model, **kwargs):
        made = ampscope.watch(scaler, model, log_dir=self.folder, tensorboard=False, **{**self.kwargs, **kwargs})
        self.watched.append(made)
        return made

    def close(self):
        for made in self.watched:
            ampscope.unwatch(made)


def unwatched(scaler, model, **kwargs):
    """Watch nothing."""
    return scaler


class Ops(TorchDispatchMode):
    """Counts the operations that synchronise with a device."""

    SYNCING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero")

    @classmethod
    def ignore_compile_internals(cls):
        """Leave compiled models compiled."""
        return True

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.SYNCING:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOOPS)
def test_parameters_are_equal_bit_for_bit(name, tmp_path):
    """20 steps, watched and unwatched."""
    want = LOOPS[name](unwatched)
    watching = Watching(tmp_path)
    got = LOOPS[name](watching)
    watching.close()
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()  # NaN included


@pytest.mark.parametrize("name", [n for n in LOOPS if n not in UNSEEN])
def test_every_step_is_recorded(name, tmp_path, recwarn):
    """Steps count from 0, nothing is damaged, layer norms are there, and ampscope had nothing to warn of."""
    watching = Watching(tmp_path)
    LOOPS[name](watching, 20)
    watching.close()
    for run in find_runs(tmp_path):
        expected = 40 if name == "gan_two_updates" else 20
        assert run.steps.tolist() == list(range(expected))
        assert run.finished
        assert not run.damage
        assert np.isfinite(run.metric("grad_norm")).any()
        assert (run.scalar("overhead_seconds") >= 0).all()
    assert not [w for w in recwarn if "ampscope" in str(w.message)]


@pytest.mark.parametrize("name", LOOPS)
def test_watching_adds_no_synchronisation(name, tmp_path):
    """No item, no nonzero in the user's thread beyond those of the loop itself."""
    counts = []
    for watching in (unwatched, Watching(tmp_path)):
        with Ops() as ops:
            LOOPS[name](watching, 6)
        counts.append(ops.count)
    watching.close()
    assert counts[1] == counts[0]


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_left_after_unwatch(name, tmp_path):
    """No hook, no swapped class."""
    seen = []

    class Keep(Watching):
        def __call__(self, scaler, model, **kwargs):
            seen.append((scaler, type(scaler), model))
            return super().__call__(scaler, model, **kwargs)

    from torch.optim import optimizer as module

    before = len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks)
    watching = Keep(tmp_path)
    LOOPS[name](watching, 3)
    watching.close()
    assert len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks) == before
    for scaler, cls, model in seen:
        assert type(scaler) is cls
        for m in model.values() if isinstance(model, dict) else model if isinstance(model, list) else [model]:
            for sub in m.modules():
                assert not sub._forward_hooks
                assert not sub._forward_pre_hooks
                assert not sub._backward_hooks
            for p in m.parameters():
                assert not p._post_accumulate_grad_hooks
                assert not p._backward_hooks
    gc.collect()


@pytest.mark.parametrize("name", [n for n in LOOPS if n not in UNSEEN])
def test_what_learns_in_the_first_steps_is_gone_after_them(name, tmp_path):
    """After a dozen steps, still watched: no hook on a parameter, no dispatch mode on the stack."""
    models = []

    class Keep(Watching):
        def __call__(self, scaler, model, **kwargs):
            models.append(model)
            return super().__call__(scaler, model, **kwargs)

    watching = Keep(tmp_path)
    LOOPS[name](watching, 12)
    modes = _get_current_dispatch_mode_stack()
    hooked = [
        n
        for m in models
        for n, p in as_module(m).named_parameters()
        if p._post_accumulate_grad_hooks or p._backward_hooks
    ]
    watching.close()
    assert not modes
    assert not hooked
    assert not _get_current_dispatch_mode_stack()


def as_module(model):
    """Return a module of one, several or named modules."""
    if isinstance(model, dict):
        return torch.nn.ModuleDict(model)
    return torch.nn.ModuleList(model) if isinstance(model, list) else model
