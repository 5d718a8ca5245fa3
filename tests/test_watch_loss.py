"""The loss of a record: what went through scale() and was back-propagated, unscaled."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from tests.loops import batch, forward, net
from tests.test_watch_api import make, only_run


def watched(tmp_path, body, steps=4, **kwargs):
    """Train with `body(step, model, opt, scaler)` returning the loss expected; compare; return the run."""
    model, opt, scaler = make(**kwargs)
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    want = []
    for step in range(steps):
        opt.zero_grad()
        want.append(float(torch.as_tensor(body(step, model, opt, scaler)).detach()))
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    np.testing.assert_allclose(run.scalar("loss"), want, rtol=1e-6)
    return run


def test_accumulated_losses_add_up(tmp_path):
    """Micro-batches, each divided by their number."""

    def body(step, model, opt, scaler):
        total = 0.0
        for micro in range(3):
            loss = forward(model, *batch(3 * step + micro)) / 3
            scaler.scale(loss).backward()
            total += loss.item()
        return total

    assert (watched(tmp_path, body).scalar("micro_steps") == 3).all()


def test_a_loss_that_is_scaled_but_not_propagated_does_not_count(tmp_path):
    """Printed, compared, thrown away."""

    def body(step, model, opt, scaler):
        scaler.scale(forward(model, *batch(50 + step)))
        with torch.no_grad():
            scaler.scale(forward(model, *batch(60 + step)))
        loss = forward(model, *batch(step))
        scaler.scale(loss).backward()
        return loss

    assert (watched(tmp_path, body).scalar("micro_steps") == 1).all()


def test_a_sum_of_scaled_losses_counts_both(tmp_path):
    """They are added before backward."""

    def body(step, model, opt, scaler):
        a, b = forward(model, *batch(step)), forward(model, *batch(step + 10))
        (scaler.scale(a) + scaler.scale(b)).backward()
        return a + b

    watched(tmp_path, body)


def test_a_gradient_penalty_is_not_the_objective(tmp_path):
    """PyTorch's own recipe: `autograd.grad` of a scaled loss, then backward of the sum."""

    def body(step, model, opt, scaler):
        loss = forward(model, *batch(step))
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        penalty = sum((g / scaler.get_scale()).pow(2).sum() for g in scaled)
        total = loss + 0.1 * penalty
        scaler.scale(total).backward()
        return total

    assert (watched(tmp_path, body).scalar("micro_steps") == 1).all()


def test_a_penalty_on_the_inputs_is_not_the_objective_either(tmp_path):
    """As in WGAN-GP."""

    def body(step, model, opt, scaler):
        x, y = batch(step)
        x.requires_grad_(True)
        loss = forward(model, x, y)
        (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
        total = loss + (grad / scaler.get_scale()).pow(2).sum()
        scaler.scale(total).backward()
        return total

    watched(tmp_path, body)


def test_gradients_taken_by_autograd_grad_and_set_by_hand_carry_their_loss(tmp_path):
    """Nothing was back-propagated, and yet the step has an objective."""

    def body(step, model, opt, scaler):
        loss = forward(model, *batch(step))
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(scaler.scale(loss), params), strict=True):
            p.grad = g
        return loss

    assert (watched(tmp_path, body).scalar("micro_steps") == 1).all()


@pytest.mark.parametrize("kind", ["list", "tuple", "nested", "generator", "map", "list_of_generators"])
def test_several_losses_in_one_call(kind, tmp_path):
    """Types and laziness are those of an unwatched scaler."""

    def body(step, model, opt, scaler):
        losses = [forward(model, *batch(step + 10 * k)) for k in range(3)]
        taken = []

        def lazily():
            for k, loss in enumerate(losses):
                taken.append(k)
                yield loss

        if kind == "list":
            out = scaler.scale(losses)
            assert type(out) is list
        elif kind == "tuple":
            out = scaler.scale(tuple(losses))
            assert type(out) is tuple
        elif kind == "nested":
            first, rest = scaler.scale([losses[0], (losses[1], losses[2])])
            out = [first, *rest]
        elif kind == "generator":
            out = scaler.scale(lazily())
            assert not taken
            first = next(out)
            assert taken == [0]
            out = itertools.chain([first], out)
        elif kind == "map":
            out = scaler.scale(map(torch.clone, losses))
            assert type(out) is map
        else:
            (inner,) = scaler.scale([lazily()])
            out = list(inner)
            for loss in out:
                loss.backward()
            return float("nan")  # what is hidden in a container is left alone, and so not known
        for loss in out:
            loss.backward()
        return sum(losses)

    watched(tmp_path, body)


def test_half_precision_losses_keep_their_value(tmp_path):
    """A loss of shape [1] stays FP16, and overflows when scaled; its own value is finite."""

    def body(step, model, opt, scaler):
        x, y = batch(step)
        loss = (model(x) - y).pow(2).mean().reshape(1).half() * 200
        scaler.scale(loss).backward()
        return loss

    run = watched(tmp_path, body, init_scale=2.0**14, steps=3)
    assert (run.scalar("loss") > 10).all()
    assert run.scalar("skipped").any()


def test_a_loss_in_a_long_graph(tmp_path):
    """Two thousand nodes deep, and still only a hook."""

    def body(step, model, opt, scaler):
        loss = forward(model, *batch(step))
        for _ in range(2000):
            loss = loss + 0.0
        scaler.scale(loss).backward()
        return loss

    watched(tmp_path, body, steps=2)


def test_losses_of_a_disabled_scaler(tmp_path):
    """`scale()` hands the loss back itself; it counts once it is back-propagated."""

    def body(step, model, opt, scaler):
        scaler.scale(forward(model, *batch(50)))
        loss = forward(model, *batch(step))
        assert scaler.scale(loss) is loss
        loss.backward()
        return loss

    run = watched(tmp_path, body, enabled=False)
    assert (run.scalar("loss_scale") == 1).all()


def test_reentrant_checkpoints_and_compiled_models(tmp_path):
    """Where no leaf can be reached from the loss, a differentiated loss counts."""
    from torch.utils.checkpoint import checkpoint

    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def body(step, model, opt, scaler):
        x, _ = batch(step)
        loss = checkpoint(inner, x.requires_grad_(True), use_reentrant=True).pow(2).mean() + 0.0 * model(x).sum()
        scaler.scale(loss).backward()
        return loss

    watched(tmp_path, body)


def test_no_loss_hook_outlives_its_record(tmp_path):
    """A loss kept in a list has no hook after update()."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    scaled = scaler.scale(forward(net(), *batch(0)))
    assert scaled._backward_hooks
    kept = scaler.scale(forward(model, *batch(1)))
    kept.backward()
    scaler.step(opt)
    scaler.update()
    assert not kept._backward_hooks
    assert not scaled._backward_hooks
    ampscope.unwatch(scaler)


def test_a_record_that_never_ends_does_not_grow(tmp_path):
    """Thousands of losses in one record: added up, all the same."""
    model, opt, scaler = make()
    ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False)
    weight = next(model.parameters())
    for _ in range(2500):
        scaler.scale(weight[0, 0] * 0.0 + 1.0).backward()
    assert len(ampscope.handle(scaler).recorder.window.losses) <= 1000
    scaler.step(opt)
    scaler.update()
    ampscope.unwatch(scaler)
    run = only_run(tmp_path)
    assert run.scalar("loss").tolist() == [2500.0]
    assert run.scalar("micro_steps").tolist() == [2500.0]
