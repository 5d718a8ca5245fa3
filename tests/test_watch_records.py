"""What a record holds, for every loop, beside a slow reference; and by name where a loop has something of its own."""

import numpy as np
import pytest
import torch

import ampscope
from ampscope.run.find import find_runs
from tests.loops import LOOPS, UNSEEN
from tests.reference import Reference
from tests.test_watch_loops import Watching

OF_THEIR_OWN = ("gradient_penalty", "lazy_losses", "bare_steps_beside", *UNSEEN)
"""Loops whose losses or steps the slow reference does not see; test_watch_loss.py and tests below look at them."""


@pytest.mark.parametrize("name", [n for n in LOOPS if n not in OF_THEIR_OWN])
def test_a_record_holds_what_a_slow_reference_sees(name, tmp_path):
    """Scale, tracker, skips, loss, and every layer's norm, maximum, zeros and non-finite elements."""
    reference = Reference()
    LOOPS[name](reference, 14)
    watching = Watching(tmp_path)
    LOOPS[name](watching, 14)
    watching.close()
    runs = sorted(find_runs(tmp_path), key=lambda r: (len(r.layers), r.scalar("loss_scale")[0]))
    assert len(runs) == len(reference.runs)
    for run, want in zip(runs, reference.runs, strict=True):
        records = want.end()
        names = {n for r in records for n in r["layers"]}
        assert names <= {x.name for x in run.layers}
        assert len(run.steps) == len(records)
        for scalar in ("loss_scale", "growth_tracker", "skipped"):
            np.testing.assert_array_equal(run.scalar(scalar), [r[scalar] for r in records])
        loss = [sum(r["loss"]) if r["loss"] else np.nan for r in records]
        np.testing.assert_allclose(run.scalar("loss"), loss, rtol=1e-6)
        numel = np.array([x.numel for x in run.layers])
        for k, metric in enumerate(("grad_norm", "nonfinite_count", "zero_ratio", "grad_max")):
            expected = np.array([[r["layers"].get(x.name, [np.nan] * 4)[k] for x in run.layers] for r in records])
            if metric == "zero_ratio":
                expected = expected / numel
            np.testing.assert_allclose(run.metric(metric), expected, rtol=1e-6, err_msg=metric)


def record(name, tmp_path, steps=20, **kwargs):
    """Run a loop watched; return its run."""
    watching = Watching(tmp_path, **kwargs)
    LOOPS[name](watching, steps)
    watching.close()
    (run,) = find_runs(tmp_path)
    return run


def test_fused_optimizers_show_the_skip_although_step_ran(tmp_path):
    """`found_inf` is what counts."""
    run = record("fused_adam", tmp_path)
    assert run.scalar("skipped").sum() >= 1
    assert (run.metric("nonfinite_count").sum(1) > 0).tolist() == (run.scalar("skipped") > 0).tolist()
    assert "skipped/Adam.0" in run.scalars


def test_a_flag_an_optimizer_is_stored(tmp_path):
    """In the GAN only the discriminator overflows."""
    run = record("gan_one_update", tmp_path)
    assert run.scalar("skipped/Adam.0").sum() == 0
    assert run.scalar("skipped/Adam.1").sum() == run.scalar("skipped").sum() >= 1
    assert {x.optimizer for x in run.layers if x.name.startswith("G.")} == {"Adam.0"}
    assert {x.optimizer for x in run.layers if x.name.startswith("D.")} == {"Adam.1"}


def test_what_was_not_looked_at_is_told_apart_from_what_had_no_gradient(tmp_path):
    """In a GAN with two updates the other network's layers are not sampled; frozen ones are, and have no gradient."""
    run = record("gan_two_updates", tmp_path / "gan")
    d = [x.name.startswith("D.") for x in run.layers]
    assert not run.sampled[0::2][:, d].any()
    assert run.sampled[1::2][:, d].all()
    run = record("frozen_then_unfrozen", tmp_path / "frozen")
    assert run.sampled.all()
    assert np.isnan(run.metric("grad_norm")[:8, :2]).all()
    assert np.isfinite(run.metric("grad_norm")[8:]).all()


def test_micro_steps_are_counted(tmp_path):
    """Four micro-batches; one of a tuple of losses."""
    assert (record("accumulation", tmp_path / "a").scalar("micro_steps") == 4).all()
    assert (record("several_losses", tmp_path / "b").scalar("micro_steps") == 1).all()
    assert (record("gradient_set_by_hand", tmp_path / "c").scalar("micro_steps") == 0).all()


def test_names(tmp_path):
    """Tied weights once, wrappers' prefixes gone, unnamed parameters by place."""
    names = {
        n: [x.name for x in record(n, tmp_path / n, 3).layers]
        for n in ("tied_weights", "data_parallel", "compiled_watched_before")
    }
    assert names["tied_weights"] == ["emb.weight"]
    assert names["data_parallel"] == names["compiled_watched_before"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert record("parameter_of_no_model", tmp_path / "p", 3).layers[-1].name == "optimizer.0.4"
    late = record("group_added_midway", tmp_path / "g").layers[-1]
    assert late.name == "optimizer.1.0"
    assert late.optimizer == "SGD.0"
    assert [x.name for x in record("gan_one_update", tmp_path / "gan", 2).layers][:1] == ["G.0.weight"]
    assert [x.name for x in record("sparse_embedding", tmp_path / "s", 2).layers] == ["0.weight", "1.weight", "1.bias"]


def test_scales_set_by_hand_and_changed_settings_are_events(tmp_path):
    """Growth, backoff, `update(new_scale)` and `set_growth_interval` are told apart."""
    run = record("new_scale", tmp_path / "n")
    by_hand = [e for e in run.events if e.kind == "settings"]
    assert [(e.step, e.data["from"], e.data["to"]) for e in by_hand] == [(4, 1024.0, 64.0)]
    growth = [e.step for e in run.events if e.kind == "growth"]
    scale = run.scalar("loss_scale")
    assert growth == [int(s) for s in np.flatnonzero(np.diff(scale) > 0)]
    run = record("changed_interval", tmp_path / "c")
    (event,) = [e for e in run.events if e.kind == "settings"]
    assert event.step == 5
    assert event.data["growth_interval"] == 3
    run = record("plain", tmp_path / "p")
    backoff = [e.step for e in run.events if e.kind == "backoff"]
    assert backoff == np.flatnonzero(run.scalar("skipped")).tolist() != []


def test_every_kth_step_and_every_skipped_one_is_sampled(tmp_path):
    """Also with explicit `unscale_`, fused optimizers and two networks; the statistics are those of `every=1`."""
    for name in ("plain", "unscale_and_clip", "fused_sgd", "gan_one_update"):
        every = record(name, tmp_path / name / "1")
        some = record(name, tmp_path / name / "4", every=4)
        skipped = some.scalar("skipped") > 0
        assert skipped.any()
        wanted = (some.steps % 4 == 0) | skipped
        assert (some.sampled.any(1) == wanted).all(), name
        for metric in ("grad_norm", "nonfinite_count", "zero_ratio"):
            got, want = some.metric(metric)[wanted], every.metric(metric)[wanted]
            sampled = some.sampled[wanted]  # a network that stepped before the other one overflowed was not looked at
            assert sampled.all() or name == "gan_one_update"
            np.testing.assert_array_equal(got[sampled], want[sampled])
        np.testing.assert_array_equal(some.scalar("loss"), every.scalar("loss"))


def test_learning_rate_is_the_first_groups(tmp_path):
    """Numbers and tensors."""
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    scaler = ampscope.watch(torch.amp.GradScaler("cpu"), model, log_dir=tmp_path, tensorboard=False)
    for step in range(3):
        opt.param_groups[0]["lr"].fill_(0.5 / (step + 1))
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    np.testing.assert_allclose(find_runs(tmp_path)[0].scalar("lr"), [0.5, 0.25, 0.5 / 3], rtol=1e-6)


def test_weight_norms_are_those_of_the_parameters(tmp_path):
    """Every `exponents_every` steps, NaN between."""
    kept = []

    class Keep(Watching):
        def __call__(self, scaler, model, **kwargs):
            kept.append(model)
            return super().__call__(scaler, model, **kwargs)

    watching = Keep(tmp_path, exponents_every=3)
    LOOPS["plain"](watching, 7)
    watching.close()
    norms = find_runs(tmp_path)[0].metric("weight_norm")
    assert np.isfinite(norms).all(1).tolist() == [True, False, False, True, False, False, True]
    np.testing.assert_allclose(norms[-1], [p.detach().norm().numpy() for p in kept[0].parameters()], rtol=1e-6)


def test_time_and_memory_scalars(tmp_path):
    """Steps take time, ampscope a part of it; there is no device memory on a CPU."""
    run = record("plain", tmp_path)
    assert (run.scalar("step_seconds") > 0).all()
    assert (run.scalar("overhead_seconds") > 0).all()
    assert (run.scalar("overhead_seconds") < run.scalar("step_seconds")).all()
    assert np.isnan(run.scalar("peak_memory_bytes")).all()
    assert (np.diff(run.scalar("time")) >= 0).all()


def test_a_network_trained_beside_the_scaler_is_not_measured(tmp_path):
    """Its gradients do not carry the loss scale; nothing of it is divided by one."""
    run = record("bare_steps_beside", tmp_path, 6)
    assert run.steps.tolist() == list(range(6))
    d = np.array([x.name.startswith("D.") for x in run.layers])
    assert np.isfinite(run.metric("grad_norm")[:, ~d]).all()
    assert not run.sampled[:, d].any()
