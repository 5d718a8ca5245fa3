"""`replay`: torch's policy to the last bit, the recorded curve from the recorded settings, and other settings."""

import importlib
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import ampscope
from ampscope.analysis.overflow import limits
from ampscope.analysis.policy import Recorded, Settings, simulate
from ampscope.analysis.waste import _least
from ampscope.record.step import Event, Layer, StepRecord
from ampscope.run.find import find_runs
from tests.helpers_log import stats_of, write_run
from tests.loops import LOOPS

CASES = sorted(p.stem for p in (Path(__file__).parent / "cases").glob("[a-z]*.py") if p.stem != "common")


def torchs(scale, tracker, bad, settings):
    """Return (scale, tracker) before each step, by torch's own kernel."""
    s, k = torch.full((), scale, dtype=torch.float32), torch.full((), tracker, dtype=torch.int32)
    scales, trackers = [], []
    for found in bad:
        scales.append(s.item())
        trackers.append(k.item())
        flag = torch.full((), float(found))
        torch._amp_update_scale_(s, k, flag, settings.growth_factor, settings.backoff_factor, settings.growth_interval)
    return scales, trackers


@pytest.mark.parametrize(
    ("settings", "chance"),
    [
        (Settings(65536.0, 2.0, 0.5, 7), 0.05),
        (Settings(1000.0, 1.7, 0.3, 3), 0.2),
        (Settings(2.0**125, 3.0, 0.9, 1), 0.3),
        (Settings(2.0**-140, 2.0, 0.5, 50), 0.5),
        (Settings(2.0**-20, 1.0001, 0.01, 2), 0.1),
        (Settings(64.0, 2.0, 0.5, 2000), 0.001),
    ],
)
def test_the_policy_is_torchs_to_the_last_bit(settings, chance):
    """Scale and tracker equal those of `_amp_update_scale_`, beyond FP32's ends too."""
    bad = np.random.default_rng(0).random(3000) < chance
    scales, trackers = torchs(settings.init_scale, 0, bad, settings)
    record = Recorded(np.array(scales), np.array(trackers), bad, ((0, settings),), ())
    got = simulate(np.where(bad, 0.0, np.inf), record, {})
    assert got.loss_scale.tolist() == scales
    assert got.growth_tracker.tolist() == trackers
    assert got.skipped.tolist() == bad.tolist()


def test_an_interval_lowered_below_the_tracker_is_never_met_again():
    """torch compares for equality: the scale stops growing, and so it does here."""
    first, then = Settings(4.0, 2.0, 0.5, 10), Settings(4.0, 2.0, 0.5, 3)
    record = Recorded(np.full(30, 4.0), np.zeros(30, np.int64), np.zeros(30, bool), ((0, first), (5, then)), ())
    got = simulate(np.full(30, np.inf), record, {})
    assert set(got.loss_scale) == {4.0}
    assert got.growth_tracker.tolist() == list(range(30))


def all_runs(folder):
    """Return the runs below a folder that hold a step."""
    return [run for run in find_runs(folder) if len(run.steps)]


@pytest.mark.parametrize("name", [n for n in LOOPS if not n.startswith("compiled")])  # as plain, and slow to compile
def test_every_loop_is_reproduced(name, tmp_path):
    """With the run's own settings the recorded scale curve and skips come out, by the policy alone."""
    watched = []

    def watch(scaler, model, **kwargs):
        watched.append(ampscope.watch(scaler, model, log_dir=tmp_path, tensorboard=False, **kwargs))
        return watched[-1]

    LOOPS[name](watch, 20)
    for made in watched:
        ampscope.unwatch(made)
    for run in all_runs(tmp_path):
        got = ampscope.replay(run, search=False)
        assert got.matches_record
        np.testing.assert_array_equal(got.loss_scale, run.scalar("loss_scale"))
        np.testing.assert_array_equal(got.skipped, run.scalar("skipped") > 0)
        assert [i.kind for i in got.interventions] == (["new_scale"] if name == "new_scale" else [])


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_reproduced(name, tmp_path):
    """Broken runs too: scale and skips come out, and what the policy does not explain is named."""
    case = importlib.import_module(f"tests.cases.{name}")
    watched = []

    def watch(scaler, model, **kwargs):
        for made in watched:
            ampscope.unwatch(made)
        watched[:] = [ampscope.watch(scaler, model, log_dir=tmp_path, run="case", tensorboard=False, **kwargs)]
        return watched[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(RuntimeError, ValueError, AssertionError):  # some cases end in GradScaler's own error
            case.main(watch)
    for made in watched:
        ampscope.unwatch(made)
    for run in all_runs(tmp_path):
        got = ampscope.replay(run, search=False)
        assert got.matches_record
        kinds = {i.kind for i in got.interventions}
        expected = {
            "all_steps_skipped_constant_scale": {"new_scale", "set"},
            "optimizer_step_without_unscale": {"no_update"},
            "scale_changed_within_accumulation": {"new_scale"},
            "scaler_state_not_restored": {"restart"},
            "update_not_called_on_skip": {"no_update"},
        }
        assert kinds <= expected.get(name, set()), got.interventions


# Other settings, on made-up runs: gradients of one layer whose largest value is known


def made(folder, largest, scale=1024.0, *, interval=2000, losses=(), bare=(), events=(), born=torch.float16, **header):
    """Write the run a real scaler would have left: step t has a gradient of that largest value; return it.

    A gradient that leaves FP16 at the scale of its step comes out as inf (NaN where it is NaN), and the scaler backs
    off.
    """
    layer = Layer("a", (64,), 64, "float32", "SGD.0")
    tracker, rows, first = 0, [], header.get("step", 0)
    scaler = {
        "enabled": True,
        "init_scale": scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
    }
    for t, top in enumerate(largest):
        g = torch.linspace(0.25, 1, 64, dtype=torch.float64) * top * scale
        g = (g.float().to(born).float() if born else g.float()).numpy()
        bad = not np.isfinite(g).all()
        scalars = {
            "loss_scale": scale, "growth_tracker": float(tracker), "skipped": float(bad), "micro_steps": 1.0,
            "loss": losses[t] if t < len(losses) else 1.0, "step_seconds": 0.5,
        }  # fmt: skip
        record = StepRecord(first + t, 1e9 + t, scalars, events=[e for e in events if e.step == t])
        if t not in bare or bad:
            record.layers, record.keep_exponents = stats_of([g]), t % 5 == 0
        rows.append(record)
        tracker = 0 if bad else tracker + 1
        if bad or tracker == interval:
            scale, tracker = scale * (0.5 if bad else 2.0), 0
    header.setdefault("scaler", scaler)
    return ampscope.open_run(write_run(folder, [layer], rows, **header))


def test_a_larger_initial_scale_skips_until_the_maxima_fit(tmp_path):
    """Largest gradient 1: FP16 holds it up to 2^15, and the simulated scaler comes down to just that."""
    run = made(tmp_path, [1.0] * 30)
    got = ampscope.replay(run, init_scale=2.0**20)
    assert got.loss_scale[:7].tolist() == [2.0**k for k in (20, 19, 18, 17, 16, 15, 15)]
    assert got.skipped_steps == 5
    assert got.recorded_skipped_steps == 0
    assert got.wasted[:6].tolist() == [1, 1, 1, 1, 1, 0]
    assert got.wasted_seconds == 2.5
    assert not got.matches_record
    assert (got.limit == 65520.0).all()


def test_a_replay_prints_in_a_few_lines(tmp_path):
    """For a notebook or a terminal: no arrays."""
    found = ampscope.replay(made(tmp_path, [1.0] * 40), init_scale=2.0**24)
    text = str(found)
    assert len(text.splitlines()) <= 4
    assert "init_scale 2^24" in text
    assert f"{found.skipped_steps} skipped" in text
    assert "least waste" in text
    assert "array(" not in text


def test_a_smaller_initial_scale_saves_the_warm_up(tmp_path):
    """Recorded: skips from 2^20 down. From 2^10 on there are none, and the best setting found has none either."""
    run = made(tmp_path, [1.0] * 30, scale=2.0**20)
    own = ampscope.replay(run)
    assert own.matches_record
    assert own.skipped_steps == 5
    assert ampscope.replay(run, init_scale=2.0**10).skipped_steps == 0
    assert own.best is not None
    assert own.best.init_scale == 2.0**14
    assert own.best_skipped_steps == 0
    assert own.best_wasted == 0


def test_a_shorter_interval_grows_into_overflow(tmp_path):
    """Growth every 3 steps from 2^10: 2^16 overflows, backs off, grows again."""
    run = made(tmp_path, [1.0] * 60)
    got = ampscope.replay(run, growth_interval=3)
    assert got.loss_scale.max() == 2.0**16
    assert got.skipped.tolist() == (got.loss_scale == 2.0**16).tolist()
    assert got.skipped_steps == 11
    assert got.settings == Settings(1024.0, 2.0, 0.5, 3)
    assert ampscope.replay(run, growth_interval=3, backoff_factor=0.25).loss_scale[19] == 2.0**14
    assert ampscope.replay(run, growth_interval=3, growth_factor=4.0).loss_scale[3] == 2.0**12


def test_a_spike_costs_only_scales_that_do_not_bear_it(tmp_path):
    """One step with a gradient 64 times as large: skipped at 2^10 and above, not at 2^9."""
    run = made(tmp_path, [1.0] * 10 + [64.0] + [1.0] * 10)
    assert run.scalar("skipped").sum() == 1
    assert ampscope.replay(run, search=False).matches_record
    assert ampscope.replay(run, init_scale=2.0**3, search=False).skipped_steps == 0


def test_a_fault_at_any_scale_is_not_blamed_on_the_scale(tmp_path):
    """A NaN loss, or a gradient that is NaN far below the limit, is skipped whatever the settings."""
    top = [2.0**-3] * 6 + [float("nan")] + [2.0**-3] * 6 + [float("nan")] + [2.0**-3] * 6
    run = made(tmp_path, top, losses=[1.0] * 6 + [float("nan")])
    assert limits(run).hopeless.nonzero()[0].tolist() == [6, 13]
    for scale in (2.0**-10, 1.0, 2.0**10):
        got = ampscope.replay(run, init_scale=scale, search=False)
        assert got.skipped.nonzero()[0].tolist() == [6, 13]
        assert got.hopeless_steps == 2
    assert any("2 skipped steps are taken to be non-finite at any scale" in a for a in got.assumptions)


def test_a_trace_overrules_the_numbers(tmp_path):
    """A NaN near the limit looks like overflow; a trace that found it in FP32 too says that it is none."""
    top = [32.0] * 5 + [float("nan")] + [32.0] * 5
    assert limits(made(tmp_path / "a", top)).by_scale.sum() == 1
    for k, event in enumerate(
        (
            Event(5, "nonfinite", phase="backward", data={"fp32_ok": False}),
            Event(5, "nonfinite", phase="data"),
            Event(5, "nonfinite", phase="forward"),
        )
    ):
        assert limits(made(tmp_path / f"b{k}", top, events=[event])).hopeless.sum() == 1
    scaling = Event(5, "nonfinite", phase="forward", data={"in_scale": True})
    assert limits(made(tmp_path / "c", top, events=[scaling])).by_scale.sum() == 1


def test_overflows_inside_backward_are_learned_from(tmp_path):
    """Parameter gradients of 1/8 fit at 2^18, but the record overflowed at 2^16: values 8 times as large are assumed."""
    layer = Layer("a", (64,), 64, "float32", "SGD.0")
    rows, scale = [], 2.0**18
    for t in range(20):
        bad = scale > 2.0**15
        g = np.float32(np.nan if bad else scale / 8) * np.ones(64, np.float32)
        record = StepRecord(t, 1e9 + t, {"loss_scale": scale, "skipped": float(bad), "micro_steps": 1.0, "loss": 1.0,
                                         "growth_tracker": float(max(t - 3, 0))})  # fmt: skip
        record.layers = stats_of([g])
        rows.append(record)
        scale = scale / 2 if bad else scale
    run = ampscope.open_run(write_run(tmp_path, [layer], rows))
    found = limits(run)
    assert found.gain == pytest.approx(8, rel=0.001)
    assert found.by_scale.sum() == 3
    got = ampscope.replay(run, init_scale=2.0**20, search=False)
    assert got.loss_scale[-1] == 2.0**15
    assert any("times 8" in a for a in got.assumptions)


def test_steps_that_were_not_measured_take_their_neighbours_maxima(tmp_path):
    """With every=4, the layers of most steps are unknown."""
    run = made(tmp_path, [1.0] * 20, bare=[t for t in range(20) if t % 4])
    assert ampscope.replay(run, init_scale=2.0**17, search=False).skipped.nonzero()[0].tolist() == [0, 1]


def test_too_low_a_scale_is_told_by_what_it_flushes(tmp_path):
    """Gradients of 2^-22 to 2^-20: scale 2^4 keeps what 2^-4 flushes; where nothing flushes nothing is too low."""
    run = made(tmp_path / "a", [2.0**-20] * 40, scale=2.0**4)
    got = ampscope.replay(run, init_scale=2.0**-4)
    flushed = ampscope.what_if(run, "fp16", 2.0**-4).underflow_ratio[0]
    assert 0.2 < flushed < 0.5
    np.testing.assert_allclose(got.wasted, flushed)
    assert got.too_low.all()
    assert got.too_low_seconds == got.too_low_steps * 0.5 == 20
    assert got.best is not None
    assert got.best.init_scale > 2.0**-4
    assert got.best_wasted == 0
    fine = ampscope.replay(made(tmp_path / "b", [1.0] * 40, scale=2.0))
    assert fine.too_low_steps == 0
    assert fine.wasted.sum() == 0
    assert fine.best == fine.settings


def test_the_format_gradients_came_in_decides_what_overflows(tmp_path):
    """FP32 gradients do not overflow at 65520, FP16 ones do; an audit of the step says which they were."""
    audit = Event(0, "note", data={"topic": "audit", "matmuls": {"bfloat16": 2}})
    half = ampscope.replay(made(tmp_path / "a", [1.0] * 5), init_scale=2.0**18, search=False)
    full = ampscope.replay(made(tmp_path / "b", [1.1] * 5, born=None), init_scale=2.0**18, search=False)
    bf16 = ampscope.replay(made(tmp_path / "c", [1.0] * 5, events=[audit]), init_scale=2.0**18, search=False)
    assert (half.skipped_steps, full.skipped_steps, bf16.skipped_steps) == (3, 0, 0)
    assert "leaves FP32's range" in full.assumptions[2]


def test_sessions_that_restore_the_scaler_go_on_and_others_start_again(tmp_path):
    """A session that restored scale and tracker goes on; another restarts, with the initial scale asked for."""
    made(tmp_path, [1.0] * 10, scale=2.0**8)
    run = made(tmp_path, [1.0] * 10, scale=2.0**8, step=10)
    restored = ampscope.replay(run, search=False)
    assert [i.kind for i in restored.interventions] == ["restart"]  # the growth tracker began again
    made(tmp_path / "other", [1.0] * 10, scale=2.0**4)
    run = made(tmp_path / "other", [1.0] * 10, scale=2.0**12, step=10)
    own, other = ampscope.replay(run, search=False), ampscope.replay(run, init_scale=2.0**6, search=False)
    assert own.matches_record
    assert set(own.loss_scale[10:]) == {2.0**12}
    assert set(other.loss_scale) == {2.0**6}
    assert any("1 later sessions began with a scaler that was not restored" in a for a in own.assumptions)


def test_a_gap_in_the_record_is_passed_over(tmp_path):
    """Steps lost to a full disk: the recorded settings find back to the record, others go on."""
    layer = Layer("a", (4,), 4, "float32", "")
    rows = []
    for t, scale in ((0, 4.0), (1, 4.0), (5, 16.0), (6, 16.0)):
        record = StepRecord(t, 1e9, {"loss_scale": scale, "growth_tracker": float(t % 5), "skipped": 0.0})
        record.layers = stats_of([np.ones(4, np.float32)])
        rows.append(record)
    run = ampscope.open_run(write_run(tmp_path, [layer], rows))
    own = ampscope.replay(run, search=False)
    assert own.matches_record
    assert [i.kind for i in own.interventions] == ["gap"]
    assert ampscope.replay(run, init_scale=8.0, search=False).loss_scale.tolist() == [8, 8, 8, 8]


def test_a_run_without_a_scaler_is_constant_unless_settings_are_given(tmp_path):
    """BF16 or FP32 training: what a scaler would have done can be asked all the same."""
    run = made(tmp_path, [2.0**-20] * 10, scale=1.0, scaler={"enabled": False}, interval=10**9)
    own = ampscope.replay(run, search=False)
    assert own.matches_record
    assert own.settings is None
    other = ampscope.replay(run, growth_interval=4, search=False)
    assert other.loss_scale[:6].tolist() == [2.0**16] * 4 + [2.0**17] * 2
    assert "The run had no scaler; settings not given are torch's defaults." in other.assumptions


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"init_scale": 0.0}, "init_scale must be a positive number, not 0.0"),
        ({"init_scale": float("inf")}, "init_scale must be a positive number"),
        ({"growth_factor": 1.0}, "growth_factor must be greater than 1, not 1.0"),
        ({"backoff_factor": 1.5}, "backoff_factor must be between 0 and 1, not 1.5"),
        ({"growth_interval": 0}, "growth_interval must be an integer of at least 1, not 0"),
        ({"growth_interval": 2.5}, "growth_interval must be an integer, not 2.5"),
        ({"init_scale": "65536"}, "init_scale must be a number, not '65536'"),
        ({"growth_factor": True}, "growth_factor must be a number, not True"),
    ],
)
def test_settings_out_of_range_are_refused(given, text, tmp_path):
    """GradScaler asserts the same; here it is one line."""
    run = made(tmp_path, [1.0])
    with pytest.raises(ampscope.AmpscopeError, match=text):
        ampscope.replay(run, **given)


def test_a_run_without_steps_says_so(tmp_path):
    """There is nothing to simulate."""
    run = ampscope.open_run(write_run(tmp_path, [Layer("a", (4,), 4, "float32", "")], []))
    with pytest.raises(ampscope.AmpscopeError, match="has no step yet"):
        ampscope.replay(run)


def test_the_least_limit_of_neighbours_is_that_of_a_slow_search():
    """A sliding minimum, held against the obvious one."""
    x = np.random.default_rng(0).random(400)
    for n in (1, 30, 120, 400):
        slow = [x[:n][max(0, t - 50) : t + 51].min() for t in range(n)]
        np.testing.assert_array_equal(_least(x[:n]), slow)
