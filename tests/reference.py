"""A slow, obvious recorder for the loops, written without ampscope: what a record must hold."""

from __future__ import annotations

import numpy as np
import torch


def measure(grad):
    """Return (L2 norm of the finite elements, non-finite elements, exact zeros, largest finite) of a scaled gradient."""
    if grad.is_sparse:
        missing = grad.numel()
        grad = grad.coalesce().values()
        missing -= grad.numel()
    else:
        missing = 0
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    values = grad.detach().double().numpy().reshape(-1)
    finite = values[np.isfinite(values)]
    largest = np.abs(finite).max() if len(finite) else (0.0 if missing else np.nan)
    return np.sqrt((finite**2).sum()), len(values) - len(finite), int((values == 0).sum()) + missing, largest


class Reference:
    """Takes the place of `watch`: wraps the scaler's (or optimizer's) methods and keeps a dict a record."""

    def __init__(self):
        self.runs = []

    def __call__(self, scaler, model, optimizer=None, **kwargs):
        run = Run(model)
        self.runs.append(run)
        if scaler is None:
            optimizer.register_step_pre_hook(lambda *args: run.look(optimizer, 1.0))
            optimizer.register_step_post_hook(lambda *args: run.close(None))
            return None
        run.wrap(scaler)
        return scaler


class Run:
    """The records of one scaler."""

    def __init__(self, model):
        models = (
            model if isinstance(model, dict) else dict(enumerate(model)) if isinstance(model, list) else {"": model}
        )
        self.names = {}
        for prefix, module in models.items():
            for name, param in module.named_parameters():
                name = name.removeprefix("_orig_mod.")
                if isinstance(module, torch.nn.DataParallel):
                    name = name.removeprefix("module.")
                self.names[id(param)] = f"{prefix}.{name}" if prefix != "" else name
        self.records = []
        self.layers, self.losses, self.stepped = {}, [], False

    def look(self, optimizer, scale):
        """Measure the gradients as they are."""
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                name = self.names.get(id(param), f"optimizer.{g}.{i}")
                if param.grad is not None and name not in self.layers:
                    norm, bad, zeros, largest = measure(param.grad)
                    self.layers[name] = (norm / scale, bad, zeros, largest / scale)

    def close(self, scaler):
        """End the record."""
        record = {"layers": self.layers, "loss": self.losses, "loss_scale": 1.0, "growth_tracker": 0, "skipped": 0}
        if scaler is not None and scaler.is_enabled():
            flags = [f for s in scaler._per_optimizer_states.values() for f in s["found_inf_per_device"].values()]
            record["skipped"] = float(any(f.item() for f in flags))
            record["loss_scale"] = scaler._scale.item()
            record["growth_tracker"] = scaler._growth_tracker.item()
        self.records.append(record)
        self.layers, self.losses, self.stepped = {}, [], False

    def wrap(self, scaler):
        """Look before every call."""
        scale, unscale, step, update = scaler.scale, scaler.unscale_, scaler.step, scaler.update

        def scaled(outputs):
            if self.stepped and not scaler.is_enabled():
                self.close(scaler)
            for out in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
                if out.requires_grad:
                    self.losses.append(out.double().sum().item())
            return scale(outputs)

        def unscaled(optimizer):
            if scaler.is_enabled():
                self.look(optimizer, scaler._scale.item())
            return unscale(optimizer)

        def stepping(optimizer):
            if scaler._enabled and scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
                pass  # unscaled already: looked at then
            else:
                self.look(optimizer, scaler._scale.item() if scaler.is_enabled() else 1.0)
            out = step(optimizer)
            self.stepped = True
            return out

        def updated(new_scale=None):
            self.close(scaler)
            return update(new_scale)

        scaler.scale, scaler.unscale_, scaler.step, scaler.update = scaled, unscaled, stepping, updated

    def end(self):
        """Close what is open."""
        if self.stepped:
            self.close(None)
        return self.records
