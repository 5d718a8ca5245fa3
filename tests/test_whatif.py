"""`what_if` against the gradients themselves: cast to each format at each scale, and counted."""

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.analysis.formats import FORMATS
from ampscope.analysis.tally import Table
from ampscope.analysis.whatif import collect, evaluate
from ampscope.record.step import Layer, StepRecord
from tests.helpers_log import stats_of, write_run

SCALES = [2.0**-6, 1.0, 2.0**3, 2.0**10, 2.0**15, 2.0**24, 2.0**34]


class Net(nn.Module):
    """Embedding, norm, layers with dead units: many sorts of gradients in one small model."""

    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 3)

    def forward(self, x):
        """Return scores."""
        return self.b(torch.relu(self.a(self.norm(self.emb(x))) - 0.5))


def train(log_dir, autocast, steps=7):
    """Train watched; return the run and [(scale, {layer: scaled gradient})]."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3, growth_interval=2, growth_factor=4.0)
    ampscope.watch(scaler, model, log_dir=log_dir, run="r", exponents_every=1, tensorboard=False)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randint(0, 20, (32,)), torch.randint(0, 3, (32,))
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y) * 1e-3
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        seen.append((scale, {n: p.grad.clone() for n, p in model.named_parameters()}))
        scaler.step(optimizer)
        scaler.update()
    ampscope.unwatch(scaler)
    return ampscope.open_run(log_dir / "r"), seen


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "fp16 autocast"])
def recorded(request, tmp_path_factory):
    """Return a run with FP32 gradients, then one with gradients from FP16 autocast."""
    return train(tmp_path_factory.mktemp("logs"), request.param)


def casts(seen, layer, format, scale):
    """Return (all elements as they came, before the cast at that scale, after it), float64."""
    came, before, after = [], [], []
    for recorded_scale, grads in seen:
        x = grads[layer].reshape(-1) * (scale / recorded_scale)
        came.append(grads[layer].reshape(-1).double())
        before.append(x.double())
        after.append(x.to(getattr(torch, FORMATS[format].dtype)).double())
    return (torch.cat(x).numpy() for x in (came, before, after))


@pytest.mark.parametrize("format", FORMATS)
def test_flushed_elements_are_counted_one_by_one(recorded, format):
    """At any power of two, over steps at several scales, the count is that of zeros in the real gradients' casts."""
    run, seen = recorded
    assert len({scale for scale, _ in seen}) == 4
    for scale in SCALES:
        got = ampscope.what_if(run, format, scale)
        assert got.exact
        for i, layer in enumerate(got.layers):
            came, _, after = casts(seen, layer, format, scale)
            assert got.elements[i] == len(came)
            assert got.flushed[i] == ((after == 0) & (came != 0)).sum()
            assert got.zeros[i] == (after == 0).sum()
            assert got.underflow_ratio[i] == got.underflow_ratio_low[i] == got.underflow_ratio_high[i]
            assert got.underflow_ratio[i] * len(came) == pytest.approx(got.flushed[i])
            assert got.already_zero_ratio[i] == (came == 0).mean()
            assert got.zero_ratio[i] == pytest.approx((after == 0).mean())


@pytest.mark.parametrize("format", FORMATS)
def test_bounds_hold_the_counted_subnormals_and_overflows(recorded, format):
    """They hold, and are no wider than the binade that holds the limit."""
    run, seen = recorded
    form = FORMATS[format]
    wide = 0
    for scale in SCALES:
        got = ampscope.what_if(run, format, scale)
        for i, layer in enumerate(got.layers):
            _, before, after = casts(seen, layer, format, scale)
            weak = ((np.abs(after) > 0) & (np.abs(after) < form.min_normal)).mean()
            over = form.overflows(before).mean()
            assert got.subnormal_ratio_low[i] <= weak <= got.subnormal_ratio_high[i]
            assert got.overflow_ratio_low[i] <= over <= got.overflow_ratio_high[i]
            a = np.abs(before)
            binade = ((a >= form.min_normal / 2) & (a < form.min_normal)).mean()
            assert got.subnormal_ratio_high[i] - got.subnormal_ratio_low[i] <= binade + 1e-12
            top = 2.0 ** np.floor(np.log2(form.max))
            assert got.overflow_ratio_high[i] - got.overflow_ratio_low[i] <= ((a >= top) & (a < 2 * top)).mean() + 1e-12
            wide += over > 0
    assert format == "bf16" or wide, "no overflow was put to the test"


def test_between_powers_of_two_the_count_is_interpolated(recorded):
    """At other scales the value is close to the truth, and its bounds hold it."""
    run, seen = recorded
    for scale in (3.0, 100.0, 5000.0):
        got = ampscope.what_if(run, "fp16", scale)
        assert not got.exact or scale > 3
        for i, layer in enumerate(got.layers):
            came, _, after = casts(seen, layer, "fp16", scale)
            truth = ((after == 0) & (came != 0)).mean()
            assert got.underflow_ratio_low[i] <= truth <= got.underflow_ratio_high[i]
            assert got.underflow_ratio_low[i] <= got.underflow_ratio[i] <= got.underflow_ratio_high[i]
            assert abs(got.underflow_ratio[i] - truth) < 0.02


def test_steps_can_be_chosen(recorded):
    """One step, several, a range, a slice: only their gradients are counted."""
    run, seen = recorded
    for steps, kept in (
        (3, [3]),
        ([0, 6], [0, 6]),
        (range(2, 5), [2, 3, 4]),
        (slice(5, None), [5, 6]),
        (np.array([1]), [1]),
    ):
        got = ampscope.what_if(run, "fp8_e4m3", 2.0**10, steps)
        assert got.steps.tolist() == kept
        came, _, after = casts([seen[k] for k in kept], "a.weight", "fp8_e4m3", 2.0**10)
        assert got.flushed[got.layers.index("a.weight")] == ((after == 0) & (came != 0)).sum()


def test_a_run_is_read_once_and_asked_often(recorded):
    """`collect` then `evaluate` says what `what_if` says."""
    run, _ = recorded
    collected = collect(run)
    for format, scale in (("fp16", 1.0), ("fp8_e5m2", 2.0**9)):
        one, other = evaluate(collected, format, scale), ampscope.what_if(run, format, scale)
        np.testing.assert_array_equal(one.flushed, other.flushed)
        assert one.window == other.window


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("fp12",), "no format 'fp12'"),
        (("fp16", 0.0), "scale must be a positive number, not 0.0"),
        (("fp16", float("nan")), "scale must be a positive number"),
        (("fp16", "big"), "scale must be a positive number, not 'big'"),
        (("fp16", 1.0, 999), "none of those steps of run 'r' has a histogram; 7 from 0 to 6 have one"),
        (("fp16", 1.0, "last"), "steps must be step numbers"),
    ],
)
def test_wrong_questions_get_one_clear_line(recorded, arguments, text):
    """Each says what is wrong."""
    with pytest.raises(ampscope.AmpscopeError, match=text):
        ampscope.what_if(recorded[0], *arguments)


# Made-up gradients


def made(tmp_path, steps, scales=(1.0,), names=("a", "b"), skipped=(), loss=1.0, bare=(), **header):
    """Write a run whose scaled gradients are given, [step][layer], with histograms but in the `bare` steps; return it."""
    layers = [Layer(n, np.shape(g), int(np.size(g)), "float32", "SGD.0") for n, g in zip(names, steps[0], strict=True)]
    rows = []
    for k, grads in enumerate(steps):
        scale = scales[k % len(scales)]
        scalars = {
            "loss_scale": scale,
            "skipped": float(k in skipped),
            "loss": loss,
            "micro_steps": 1.0,
            "growth_tracker": 0.0,
        }
        record = StepRecord(k, 1e9 + k, scalars)
        record.layers, record.keep_exponents = stats_of(grads), k not in bare
        rows.append(record)
    path = write_run(tmp_path, layers, rows, **header)
    return ampscope.open_run(path)


def spread(low, high, n=4096, seed=0):
    """Return values whose log2 is uniform between two exponents."""
    rng = np.random.default_rng(seed)
    return (2.0 ** rng.uniform(low, high, n) * rng.choice([-1, 1], n)).astype(np.float32)


def test_the_window_is_what_a_search_by_hand_finds(tmp_path):
    """At its ends every layer is fine; one step further some layer is not."""
    grads = [spread(-34, -18), spread(-30, -6, seed=1)]
    got = ampscope.what_if(made(tmp_path, [grads]), share=0.01)
    low, high = got.window

    def bad(scale):
        x = [torch.tensor(g).mul(scale).half() for g in grads]
        return any(bool(v.isinf().any()) or float((v == 0).float().mean()) > 0.01 for v in x)

    assert not bad(low)
    assert not bad(high)
    assert bad(low / 2)
    assert bad(high * 2)
    assert got.misfits == ()
    assert got.advice == ()
    assert (got.scale_low <= low).all()
    assert (got.scale_high >= high).all()


def test_a_layer_too_wide_for_the_format_is_named_with_advice(tmp_path):
    """No scale suits it; FP32 and, since its range fits, BF16 are offered."""
    got = ampscope.what_if(made(tmp_path, [[spread(-45, 3), spread(-10, -3)]]))
    assert got.window is None
    assert got.misfits == ("a",)
    assert "No scale suits a in fp16" in got.advice[0]
    assert "FP32" in got.advice[0]
    assert "BF16" in got.advice[1]
    assert "No scale suits a" in str(got)


def test_layers_whose_windows_do_not_meet_are_told_apart(tmp_path):
    """Each has a window, but no scale lies in both."""
    got = ampscope.what_if(made(tmp_path, [[spread(-48, -44), spread(2, 6)]]))
    assert got.window is None
    assert got.misfits == ("a",)
    assert got.scale_low[0] <= got.scale_high[0]
    assert "No one loss scale fits all layers: a needs at least" in got.advice[0]
    assert "b overflows above" in got.advice[0]


def test_the_window_minds_overflows_of_steps_without_histograms(tmp_path):
    """A spike in any recorded step closes it from above."""
    quiet = [spread(-20, -10), spread(-20, -10, seed=1)]
    spike = [quiet[0], np.append(quiet[1][:-1], np.float32(2.0**4))]
    run = made(tmp_path, [quiet, spike], bare=(1,))
    assert ampscope.what_if(run, steps=0).window[1] == 2.0**26
    assert ampscope.what_if(run).steps.tolist() == [0]
    assert ampscope.what_if(run).window[1] == 2.0**11


def test_an_inf_counts_at_its_scale_and_above(tmp_path):
    """Below, as far as other steps were finite, it is possible; further down it is not counted."""
    fine = [np.full(8, 2.0**10, np.float32), np.ones(8, np.float32)]
    over = [np.append(fine[0][:-1], np.float32(np.inf)), fine[1]]
    run = made(tmp_path, [over, fine, fine], scales=(2.0**16, 2.0**14, 2.0**14), skipped=(0,))

    def bounds(scale):
        got = ampscope.what_if(run, "fp16", scale)
        return got.overflow_ratio_low[0] * 24, got.overflow_ratio_high[0] * 24

    assert bounds(2.0**16) == (1, 1)
    assert bounds(2.0**10) == (0, 0)
    got = ampscope.what_if(run, "fp16", 2.0**10)
    assert got.nonfinite_ratio[0] == 1 / 24
    assert got.window[1] < 2.0**16


def test_a_fault_that_no_scale_avoids_leaves_the_window_alone(tmp_path):
    """NaN from the forward pass (the loss is NaN too) says nothing about scales."""
    nan = np.full(8, np.nan, np.float32)
    got = ampscope.what_if(made(tmp_path, [[nan, nan]], skipped=(0,), loss=float("nan")))
    assert got.window is None
    assert np.isnan(got.scale_low).all()
    assert "nothing can be said about scales" in got.advice[0]
    assert got.nonfinite_ratio.tolist() == [1, 1]


def test_what_fp16_flushed_before_comes_on_top(tmp_path):
    """Zeros of gradients born in FP16 are there already: bounded, fewer at a larger scale, none in BF16."""
    x = torch.tensor(spread(-30, -20)).half().float().numpy()
    run = made(tmp_path, [[x, x]])
    at = ampscope.what_if(run, "fp16", 1.0)
    zero = (x == 0).mean()
    assert at.flushed.tolist() == [0, 0]
    assert at.already_zero_ratio[0] == zero
    assert (
        0 <= at.already_flushed_ratio_low[0] <= at.already_flushed_ratio[0] <= at.already_flushed_ratio_high[0] <= zero
    )
    assert at.already_flushed_ratio[0] > 0
    larger, bf16 = ampscope.what_if(run, "fp16", 2.0**4), ampscope.what_if(run, "bf16", 1.0)
    assert larger.already_flushed_ratio[0] == pytest.approx(at.already_flushed_ratio[0] / 16)
    assert larger.already_flushed_ratio_low[0] == 0
    assert bf16.already_flushed_ratio[0] < 1e-9
    smaller = ampscope.what_if(run, "fp16", 2.0**-3)
    assert smaller.already_flushed_ratio[0] == at.already_flushed_ratio[0]
    assert smaller.flushed[0] == ((torch.tensor(x).mul(2.0**-3).half() == 0).sum().item() - (x == 0).sum())


def test_scales_that_are_no_powers_of_two_are_added_up(tmp_path):
    """Steps at 1000 and 1500: exact where the ratio is a power of two for all steps, bounded otherwise."""
    grads = [[spread(-30, -10, seed=k), spread(-9, 0, seed=k)] for k in range(4)]
    run = made(tmp_path, grads, scales=(1000.0, 1500.0))
    for scale in (1000.0, 2.0**5):
        got = ampscope.what_if(run, "fp16", scale)
        truth = 0
        for k, step in enumerate(grads):
            x = step[0].astype(np.float64) / (1000.0, 1500.0)[k % 2] * scale
            truth += (np.abs(x) <= 2.0**-25).sum()
        assert got.underflow_ratio_low[0] * got.elements[0] <= truth <= got.underflow_ratio_high[0] * got.elements[0]
        assert not got.exact
    one = ampscope.what_if(run, "fp16", 500.0, steps=[0, 2])
    assert one.exact
    truth = sum((np.abs(grads[k][0].astype(np.float64) / 2) <= 2.0**-25).sum() for k in (0, 2))
    assert one.flushed[0] == truth


def test_fp32_subnormals_are_bounded_in_bf16():
    """Their binade is not recorded: the count is exact where all flush or none does, and bounded between."""
    table = Table(1)
    counts = np.zeros((1, 256), np.int64)
    counts[0, 0] = 100
    table.add(counts, np.zeros_like(counts), 0)
    bf16 = FORMATS["bf16"].flush_limit
    at = table.at_most(bf16)
    assert (at.low[0], at.high[0]) == (0, 100)
    assert 0 < at.value[0] < 1
    assert table.at_most(bf16 * 2.0**8).low[0] == 100
    assert table.at_most(FORMATS["fp16"].flush_limit).low[0] == 100


def test_sharded_gradients_are_added_up_over_ranks(tmp_path):
    """FSDP: each rank holds a part. DDP: each holds the same, and one is enough."""
    half = [spread(-30, -10, 64), spread(-30, -10, 64, seed=1)]
    layer = [Layer(n, (64,), 64, "float32", "") for n in "ab"]
    for kind, factor in (("sharded", 2), ("replicated", 1)):
        for rank in (0, 1):
            record = StepRecord(0, 1e9, {"loss_scale": 1.0, "skipped": 0.0, "micro_steps": 1.0, "loss": 1.0})
            record.layers, record.keep_exponents = stats_of(half), True
            path = write_run(tmp_path / kind, layer, [record], rank=rank, world_size=2, launch_key="k", gradients=kind)
        got = ampscope.what_if(ampscope.open_run(path), "fp16", 1.0)
        assert got.elements.tolist() == [64 * factor] * 2
        assert got.flushed[0] == factor * (np.abs(half[0]) <= 2.0**-25).sum()


def test_a_run_without_histograms_says_how_to_keep_them(tmp_path):
    """The message names the argument."""
    layer = Layer("a", (4,), 4, "float32", "")
    record = StepRecord(0, 1e9, {"loss_scale": 1.0})
    path = write_run(tmp_path, [layer], [record])
    with pytest.raises(ampscope.AmpscopeError, match="exponents_every=N"):
        ampscope.what_if(ampscope.open_run(path))
