"""`ampscope.audit` against gradients made by hand: values, table, figure, formats, and that the model is left as it was."""

import numpy as np
import pytest
import torch
from torch import nn

import ampscope

SCALES = (1.0, 2.0**8, 2.0**40)


class Net(nn.Module):
    """Two linear layers, a norm, dropout, and a layer that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3)
        self.b, self.idle = nn.Linear(32, 4), nn.Linear(2, 2)

    def forward(self, x):
        """Predict."""
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def loss_fn(model, x):
    """A small loss: at scale 1 its gradients lie near FP16's smallest number."""
    return model(x).float().pow(2).mean() * 3e-6


@pytest.fixture
def parts():
    """A model and a batch."""
    torch.manual_seed(0)
    return Net(), torch.randn(8, 16)


def by_hand(model, x, scale, dtype):
    """Return {layer: gradient} of one backward, float64; with dtype None in FP32, weights rounded to FP16 or BF16 before by the caller."""
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = loss_fn(model, x)
    (loss * scale).backward()
    found = {n: p.grad.double().numpy() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "FP16"), (torch.bfloat16, "BF16")])
def test_shares_are_those_counted_by_hand(parts, dtype, kind):
    """Flushed, subnormal, overflowing and the relative error, each layer at each scale."""
    model, x = parts
    torch.manual_seed(7)
    got = ampscope.audit(model, loss_fn, x, scales=SCALES, dtype=dtype)
    assert got.dtype == kind
    assert got.scales == SCALES
    assert got.layers == tuple(n for n, _ in model.named_parameters())
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype))
    truth = by_hand(model, x, 1.0, None)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(kept[n])
    for s, scale in enumerate(SCALES):
        half = by_hand(model, x, scale, dtype)
        for i, name in enumerate(got.layers):
            if name.startswith("idle"):
                assert np.isnan([got.flushed[s, i], got.subnormal[s, i], got.overflowed[s, i], got.error[s, i]]).all()
                continue
            g, t = half[name], truth[name]
            assert got.flushed[s, i] == ((g == 0) & (t != 0)).mean()
            assert got.subnormal[s, i] == ((g != 0) & (np.abs(g) < torch.finfo(dtype).tiny)).mean()
            assert got.overflowed[s, i] == (~np.isfinite(g)).mean()
            if np.isfinite(g).all():
                assert got.error[s, i] == pytest.approx(np.linalg.norm(g / scale - t) / np.linalg.norm(t))
            else:
                assert np.isnan(got.error[s, i])
    flushed, overflowed = np.nanmax(got.flushed, 1), np.nanmax(got.overflowed, 1)
    assert (flushed[0] > 0.1) == (dtype is torch.float16)
    assert (overflowed[2] > 0) == (dtype is torch.float16)
    assert got.best_scale() == (2.0**8 if dtype is torch.float16 else 1.0)


def test_the_table_has_a_row_a_layer_and_names_the_best_scale(parts):
    """Shares with errors, inf where it overflows, a dash where there is no gradient."""
    torch.manual_seed(7)
    got = ampscope.audit(*parts[:1], loss_fn, parts[1], scales=SCALES)
    lines = str(got).splitlines()
    assert "FP16" in lines[0]
    assert all(f"2^{k}" in lines[1] for k in (0, 8, 40))
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert list(rows) == list(got.layers)
    assert rows["idle.weight"] == ["-", "-", "-"]
    assert rows["b.weight"][0].startswith(f"{got.flushed[0, got.layers.index('b.weight')]:.0%}(")
    assert "inf" in rows["b.weight"][2]
    assert lines[-1] == "best of these scales: 2^8"


def test_the_figure_holds_the_same_numbers(parts):
    """A heatmap, layers by scales, with its shares in words."""
    torch.manual_seed(7)
    got = ampscope.audit(*parts[:1], loss_fn, parts[1], scales=SCALES)
    (trace,) = got.figure().data
    assert list(trace.y) == list(got.layers)
    assert list(trace.x) == ["2^0", "2^8", "2^40"]
    np.testing.assert_array_equal(np.array(trace.z, float), got.flushed.T)
    i = got.layers.index("b.weight")
    assert trace.text[i][0] == f"{got.flushed[0, i]:.0%}"
    assert trace.text[i][2] == "inf"
    assert trace.text[got.layers.index("idle.bias")][0] == ""


def test_no_scale_may_fit(parts):
    """All overflow: said so."""
    got = ampscope.audit(*parts[:1], loss_fn, parts[1], scales=(2.0**40, 2.0**41))
    assert got.best_scale() is None
    assert "no scale fits" in str(got)


def test_the_model_is_left_as_it_was(parts):
    """Parameters, gradients, buffers, random state, mode."""
    model, x = parts
    model.a.weight.grad = torch.ones_like(model.a.weight)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    ampscope.audit(model, loss_fn, x)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.a.weight.grad, torch.ones_like(model.a.weight))
    assert model.b.weight.grad is None
    assert model.training


def test_autocast_inside_the_loss_function_gets_the_audits_dtype(parts):
    """A training step that enters autocast by itself: FP32 is FP32 all the same, and autocast's parts that are off stay off."""
    model, x = parts

    def inner(m, b):
        with torch.autocast("cpu", dtype=torch.float16):
            h = m(b)
            with torch.autocast("cpu", enabled=False):
                return h.float().pow(2).mean() * 3e-6

    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(7)
        want = ampscope.audit(model, loss_fn, x, scales=SCALES, dtype=dtype)
        torch.manual_seed(7)
        got = ampscope.audit(model, inner, x, scales=SCALES, dtype=dtype)
        for name in ("flushed", "subnormal", "overflowed", "error"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert "entered" not in torch.autocast.__enter__.__qualname__


def test_sparse_and_complex_gradients(parts):
    """A sparse gradient counts as its dense one, a complex element as two."""
    torch.manual_seed(0)
    table, phase = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
    model = nn.ModuleDict({"table": table, "phase": phase})
    phase.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def loss(m, ids):
        h = m["table"](ids)
        return (m["phase"](h).float().pow(2).mean() + (h * m["phase"].turn).abs().pow(2).mean()) * 1e-3

    got = ampscope.audit(model, loss, torch.tensor([1, 2, 2]), scales=(1.0,))
    assert np.isfinite(got.flushed).all()
    assert got.error.max() < 0.01


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scales": ()}, "scales must be positive"),
        ({"scales": (0.0,)}, "scales must be positive"),
        ({"dtype": torch.float32}, "dtype must be"),
    ],
)
def test_wrong_arguments_get_one_clear_line(parts, arguments, words):
    """Each says what is wrong."""
    with pytest.raises(ampscope.AmpscopeError, match=words):
        ampscope.audit(*parts[:1], loss_fn, parts[1], **arguments)
