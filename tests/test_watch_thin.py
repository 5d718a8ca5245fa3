"""The thin path: watch → log → open_run → TensorBoard."""

import numpy as np
import pytest
import torch

import ampscope


@pytest.fixture
def trained(tmp_path):
    """Train a small model with real FP16 autocast and GradScaler, watched."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    assert ampscope.watch(scaler, model, log_dir=tmp_path, run="r") is scaler
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    scales, losses = [], []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() - y).pow(2).mean() * 10
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    ampscope.unwatch(scaler)
    return tmp_path / "r", scales, losses


def test_a_run_reads_back_what_happened(trained):
    """Scale, loss, skips and layer norms are those of the training."""
    path, scales, losses = trained
    run = ampscope.open_run(path)
    assert run.steps.tolist() == list(range(20))
    np.testing.assert_array_equal(run.scalar("loss_scale"), scales)
    np.testing.assert_allclose(run.scalar("loss"), losses, rtol=1e-6)
    skipped = np.diff([*scales, scales[-1]]) < 0
    assert run.scalar("skipped")[:-1].tolist() == skipped[:-1].tolist()
    assert [x.name for x in run.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {x.optimizer for x in run.layers} == {"SGD.0"}
    assert run.metric("grad_norm").shape == (20, 4)
    assert np.isfinite(run.metric("grad_norm")[~skipped]).all()
    steps, counts = run.exponents("0.weight")
    assert counts.shape == (len(steps), 256)
    assert run.finished
    assert not run.damage


def test_tensorboard_reads_the_tags(trained):
    """TensorBoard's own reader shows every step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, scales, _ = trained
    events = EventAccumulator(str(path)).Reload()
    assert [e.value for e in events.Scalars("amp/loss_scale")] == scales
    assert "grad_norm/0/weight" in events.Tags()["scalars"]
