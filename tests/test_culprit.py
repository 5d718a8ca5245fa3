"""What the free record says of non-finite gradients: backward order, front, pattern, verdict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.probe.culprit import LEARN, describe, sort_out
from ampscope.record.step import MEASURED, Layer, LayerStats
from tests.cases.common import MLP, train
from tests.casing import play

NAMES = ("inp.weight", "inp.bias", "mid.weight", "mid.bias", "out.weight", "out.bias")
LAYERS = [Layer(n, (1,), 1, "float32", "SGD.0") for n in NAMES]
ORDER = {4: 0, 5: 1, 2: 2, 3: 3, 0: 4, 1: 5}


def stats(nan=(), inf=()):
    """Return statistics of the six layers with NaN and +inf in some of them."""
    out = LayerStats.empty(len(NAMES))
    out.state[:] = MEASURED
    out.nan[list(nan)] = 2
    out.pos_inf[list(inf)] = 1
    return out


@pytest.mark.parametrize(
    ("nan", "inf", "front", "pattern", "kind"),
    [
        ((0, 1, 2, 3), (4, 5), "out.weight", "all", "inf"),
        ((0, 1), (2, 3), "mid.weight", "suffix", "inf"),
        ((2, 3), (), "mid.weight", "single", "nan"),
        ((0, 5), (), "out.bias", "scattered", "nan"),
        ((0, 1), (), "inp.weight", "suffix", "nan"),
    ],
)
def test_the_pattern_of_bad_layers_is_told_apart(nan, inf, front, pattern, kind):
    """Everything from the exit on, from a front on, one module alone, or here and there; in backward order."""
    s = stats(nan, inf)
    bad, measured = sort_out(s, ORDER)
    told = describe(s, bad, measured, LAYERS, ORDER)
    assert (told["front"], told["pattern"], told["front_kind"]) == (front, pattern, kind)
    assert [ORDER[i] for i in measured] == sorted(ORDER.values())
    assert told["nan"] == 2 * len(nan)


def test_layers_are_named_in_backward_order_not_in_the_order_of_registration(tmp_path):
    """A model that registers its last layer first."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.z_last, self.a_first = nn.Linear(8, 1), nn.Linear(4, 8)

        def forward(self, x):
            return self.z_last(torch.relu(self.a_first(x)))

    def main(watch):
        model = Odd()
        train(
            watch,
            model,
            lambda s, m: (model(torch.randn(8, 4)).float() * (1e4 if s == 4 else 1.0)).pow(2).mean() * 10,
            steps=6,
            init_scale=2.0**14,
        )

    run = play(main, tmp_path).run
    skip = next(e for e in run.events if e.kind == "skip" and e.step == 4)
    assert skip.layers[0].startswith("z_last")
    assert skip.layers[-1].startswith("a_first")
    assert run.backward_order.index("z_last.weight") < run.backward_order.index("a_first.weight")


def test_hooks_are_gone_after_the_first_steps(tmp_path):
    """No accumulate hook is left once the order is known, nor after unwatch."""
    model = MLP(4, 8, 1)

    def hooks():
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    seen = []
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scaler = ampscope.watch(torch.amp.GradScaler("cpu", init_scale=4.0), model, log_dir=tmp_path, tensorboard=False)
    for _ in range(LEARN + 1):
        seen.append(hooks())
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 4)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    assert seen[0] > 0
    assert seen[LEARN] == hooks() == 0


def test_clipping_does_not_hide_who_was_bad(tmp_path):
    """clip_grad_norm_ with a NaN norm makes every layer NaN: the record looks before it."""

    def main(watch):
        torch.manual_seed(0)
        model = MLP(4, 8, 8, 1)
        x = torch.randn(8, 4)
        model.fc2.weight.register_hook(lambda g: g * float("nan") if now[0] == 3 else None)
        now = [0]

        def loss_of(step, micro):
            now[0] = step
            return model(x).float().pow(2).mean()

        train(watch, model, loss_of, steps=6, init_scale=4.0, clip=1.0)

    run = play(main, tmp_path).run
    (skip,) = [e for e in run.events if e.kind == "skip"]
    assert skip.layers == ("fc2.weight",)
    assert skip.data["pattern"] == "single"
    assert np.flatnonzero(run.metric("nonfinite_count")[3]).tolist() == [run.layer_index("fc2.weight")]
