"""One script, AMP on and off: what is recorded of both can be compared."""

import numpy as np
import torch

import ampscope


def _train(folder, name, enabled):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled)
    ampscope.watch(scaler, model, log_dir=folder, run=name, tensorboard=False)
    x, y = torch.randn(16, 8), torch.randn(16, 4) * 10
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    ampscope.unwatch(scaler)
    return ampscope.open_run(folder / name)


def test_gradients_are_those_before_clipping_with_a_disabled_scaler_too(tmp_path):
    """`unscale_` is where gradients are complete; a disabled scaler does nothing there, and the step comes after clipping."""
    on, off = _train(tmp_path, "on", True), _train(tmp_path, "off", False)
    assert len(off.steps) == len(on.steps) == 5
    assert (off.scalar("grad_norm") > 1.0).all()
    np.testing.assert_allclose(off.metric("grad_norm"), on.metric("grad_norm"), rtol=1e-5)
