"""On CUDA: nothing ampscope does synchronises, and records are those of a reference. Skipped without a GPU."""

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.probe.recorder import Recorder
from tests.test_watch_api import only_run

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Refusing:
    """Within it every synchronisation raises."""

    def __enter__(self):
        self.before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *exc):
        torch.cuda.set_sync_debug_mode(self.before)


def network():
    """Return a small network on the GPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()


def data(steps, spike=()):
    """Return one batch a step, on the GPU already."""
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, 16, generator=g).cuda(), (torch.randn(32, 1, generator=g) * (1e6 if s in spike else 1)).cuda())
        for s in range(steps)
    ]


def loss_of(model, x, y):
    """Return the loss under autocast."""
    with torch.autocast("cuda", dtype=torch.float16):
        return (model(x).float() - y).pow(2).mean()


def plain(model, opt, scaler, batches):
    """Scale, step, update."""
    for x, y in batches:
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(opt)
        scaler.update()


def clipped(model, opt, scaler, batches):
    """Unscale, clip."""
    for x, y in batches:
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()


def accumulated(model, opt, scaler, batches):
    """Two micro-batches, a list of losses, a generator of them."""
    for x, y in batches:
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        for scaled in scaler.scale([loss_of(model, x, y)]):
            scaled.backward()
        for scaled in scaler.scale(loss_of(model, x, y) for _ in range(1)):
            scaled.backward()
        scaler.step(opt)
        scaler.update()


LOOPS = {"plain": plain, "clipped": clipped, "accumulated": accumulated}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3, device="cuda"), capturable=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_synchronises_and_parameters_are_equal(loop, optimizer, tmp_path, monkeypatch):
    """Every part of ampscope on the training thread runs where a synchronisation would raise."""
    guarded, batches = Recorder.guarded, data(8, spike=(3,))
    results = []
    for watched in (False, True):
        model = network()
        opt = OPTIMIZERS[optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        if watched:
            with monkeypatch.context() as patch:

                def refusing(self, *args):
                    with Refusing():
                        guarded(self, *args)

                patch.setattr(Recorder, "guarded", refusing)
                ampscope.watch(scaler, model, log_dir=tmp_path, every=3, tensorboard=False)
                ampscope.handle(scaler).log(x=torch.ones((), device="cuda"))
                LOOPS[loop](model, opt, scaler, batches)
            assert ampscope.handle(scaler).recorder.enabled
            ampscope.unwatch(scaler)
        else:
            LOOPS[loop](model, opt, scaler, batches)
        results.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    run = only_run(tmp_path)
    assert run.steps.tolist() == list(range(8))
    skipped = run.scalar("skipped") > 0
    assert skipped[3]
    assert (run.sampled.all(1) == ((run.steps % 3 == 0) | skipped)).all()
    assert (run.scalar("peak_memory_bytes") > 0).all()
    assert np.isfinite(run.scalar("loss")).all()
    np.testing.assert_allclose(run.scalar("lr"), 1e-3, rtol=1e-6)
    assert run.scalar("x")[0] == 1.0
    assert not [e for e in run.events if e.data.get("topic") in ("stopped", "switched_off")]


def test_a_whole_loop_without_a_synchronisation(tmp_path):
    """With a fused optimizer GradScaler itself has none: the watched loop has none either."""
    model, batches = network(), data(6)
    opt = torch.optim.Adam(model.parameters(), fused=True)
    scaler = ampscope.watch(torch.amp.GradScaler("cuda"), model, log_dir=tmp_path, tensorboard=False)
    plain(model, opt, scaler, batches[:2])
    torch.cuda.synchronize()
    with Refusing():
        plain(model, opt, scaler, batches[2:])
    ampscope.unwatch(scaler)
    assert only_run(tmp_path).steps.tolist() == list(range(6))


def test_records_are_those_of_a_reference(tmp_path):
    """Norms, zeros and the loss of each step, computed here in float64."""
    model, batches = network(), data(5)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = ampscope.watch(
        torch.amp.GradScaler("cuda", init_scale=2.0**10), model, log_dir=tmp_path, tensorboard=False
    )
    norms, zeros, losses = [], [], []
    for x, y in batches:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        grads = [p.grad.double().cpu().numpy() for p in model.parameters()]
        norms.append([np.linalg.norm(g.ravel()) / 2.0**10 for g in grads])
        zeros.append([(g == 0).mean() for g in grads])
        losses.append(loss.item())
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    np.testing.assert_allclose(run.metric("grad_norm"), norms, rtol=1e-6)
    np.testing.assert_allclose(run.metric("zero_ratio"), zeros, rtol=1e-6)
    np.testing.assert_allclose(run.scalar("loss"), losses, rtol=1e-6)
