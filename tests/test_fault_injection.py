"""An inf, then a NaN, put into backward and forward of every layer of a 12-layer model in turn: layer, phase and step are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases.common import train
from tests.casing import play

LAYERS, AT = 12, 7
VALUES = [float("inf"), float("nan")]


class Net(nn.Module):
    """Twelve linear layers with a residual path."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(LAYERS)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        """Return one number a sample."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def injected(layer, value, phase):
    """Return a training script that breaks one layer: in backward at step AT, in forward from it on."""

    def main(watch):
        torch.manual_seed(0)
        model = Net()
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        now = [0]

        def spoil_output(module, args, output):
            return output * value if now[0] >= AT else None

        def spoil_gradient(module, args, output):
            if now[0] == AT:
                output.register_hook(lambda g: g * value)

        model.layers[layer].register_forward_hook(spoil_output if phase == "forward" else spoil_gradient)

        def loss_of(step, micro):
            now[0] = step
            return nn.functional.mse_loss(model(x).float(), y)

        train(watch, model, loss_of, steps=AT + 7, init_scale=256.0)

    return main


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("value", VALUES, ids=["inf", "nan"])
def test_a_fault_in_backward_at_one_step_is_named(layer, value, tmp_path):
    """The free record alone names the layer, the phase and the step; the diagnosis says the same and does not accuse."""
    outcome = play(injected(layer, value, "backward"), tmp_path)
    skips = [e for e in outcome.run.events if e.kind == "skip"]
    assert [(e.step, e.phase, e.layers[0].rpartition(".")[0]) for e in skips] == [(AT, "backward", f"layers.{layer}")]
    assert outcome.serious == []
    (finding,) = outcome.findings
    assert (finding.steps, finding.phase, finding.layers[0]) == ((AT, AT, 1), "backward", f"layers.{layer}")


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("value", VALUES, ids=["inf", "nan"])
def test_a_fault_in_forward_from_one_step_on_is_named(layer, value, tmp_path):
    """The tracer, armed by the first non-finite loss, names the layer; the record the first step."""
    finding = play(injected(layer, value, "forward"), tmp_path).first
    assert (finding.rule, finding.phase, finding.layers[0]) == (
        "forward-overflow-activation",
        "forward",
        f"layers.{layer}",
    )
    assert finding.steps[0] == AT
