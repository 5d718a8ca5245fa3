"""Healthy training loops that look like misuse: nothing above info may be said of any of them. Each is `run(watch, seed)`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.common import MLP, half
from tests.cases.optimizer_eps_underflow import Slim

LOOPS = {}


def loop(function):
    """Register a loop under its name."""
    LOOPS[function.__name__] = function
    return function


def _network(seed, **scaler):
    torch.manual_seed(seed)
    model = MLP(8, 32, 1)
    return model, torch.amp.GradScaler("cpu", **scaler)


def _loss(model, size=1.0):
    x = torch.randn(32, 8)
    with half():
        out = model(x)
    return F.mse_loss(out.float(), size * x.sum(1, keepdim=True))


@loop
def divided_by_hand(watch, seed):
    """A static scale: gradients are multiplied by its inverse, checked and clipped by hand, the optimizer stepped directly."""
    model, scaler = _network(seed, init_scale=1024.0)
    opt = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    watch(scaler, model)
    for _ in range(30):
        opt.zero_grad()
        scaler.scale(_loss(model)).backward()
        inverse = 1.0 / scaler.get_scale()
        for p in model.parameters():
            p.grad.mul_(inverse)
        if all(p.grad.isfinite().all() for p in model.parameters()):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()


@loop
def divided_past_the_version_counter(watch, seed):
    """The same with a constant and through `.data`, which leaves no trace but the value."""
    model, scaler = _network(seed, init_scale=256.0)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    watch(scaler, model)
    for _ in range(20):
        opt.zero_grad()
        scaler.scale(_loss(model)).backward()
        for p in model.parameters():
            p.grad.data.div_(256.0)
        opt.step()


@loop
def own_check_after_unscale(watch, seed):
    """`unscale_`, a check of the norm, and a plain `optimizer.step()` where it is finite."""
    model, scaler = _network(seed)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(scaler, model)
    for _ in range(40):
        opt.zero_grad()
        scaler.scale(_loss(model, 10.0)).backward()
        scaler.unscale_(opt)
        if math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            opt.step()
        scaler.update()


def _gan(watch, seed, every, to_none):
    torch.manual_seed(seed)
    g, d = MLP(4, 24, 6), MLP(6, 24, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), 1e-4), torch.optim.Adam(d.parameters(), 4e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=15)
    watch(scaler, {"G": g, "D": d})
    for i in range(45):
        z, real = torch.randn(16, 4), torch.randn(16, 6) + 1.0
        of_d.zero_grad(set_to_none=to_none)
        with half():
            loss = F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()
        scaler.scale(loss).backward()
        scaler.step(of_d)
        if i % every == every - 1:
            of_g.zero_grad(set_to_none=to_none)
            with half():
                loss = F.softplus(-d(g(z))).mean()
            scaler.scale(loss).backward()
            scaler.step(of_g)
        scaler.update()


@loop
def gan_generator_now_and_then(watch, seed):
    """The generator is stepped every fifth time; its old gradients lie there until then, and are cleared before its backward."""
    _gan(watch, seed, 5, to_none=True)


@loop
def gan_cleared_to_zero(watch, seed):
    """The same, with gradients cleared to zero in place."""
    _gan(watch, seed, 3, to_none=False)


@loop
def two_backwards_a_step(watch, seed):
    """Sharpness-aware minimisation by hand: weights moved along the scaled gradient and put back, the second gradient used."""
    model, scaler = _network(seed, init_scale=512.0)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    watch(scaler, model)
    for _ in range(25):
        scaler.scale(_loss(model)).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = [0.05 * p.grad / norm for p in model.parameters()]
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        opt.zero_grad()
        scaler.scale(_loss(model)).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


@loop
def batches_passed_over(watch, seed):
    """Batches with an odd loss are left out before anything is scaled."""
    model, scaler = _network(seed, init_scale=2.0**12)
    opt = torch.optim.RMSprop(model.parameters(), 1e-3)
    watch(scaler, model)
    for i in range(40):
        loss = _loss(model, 50.0 if i % 7 == 3 else 1.0)
        opt.zero_grad()
        if loss.item() > 100.0:
            continue
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@loop
def scale_capped_by_a_subclass(watch, seed):
    """A GradScaler that lowers its scale to a cap after each update."""

    class Capped(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(new_scale)
            if self.get_scale() > 2.0**13:
                super().update(2.0**13)

    torch.manual_seed(seed)
    model = MLP(8, 32, 1)
    scaler = Capped("cpu", init_scale=2.0**12, growth_interval=5)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    watch(scaler, model)
    for _ in range(40):
        opt.zero_grad()
        scaler.scale(_loss(model)).backward()
        scaler.step(opt)
        scaler.update()


@loop
def half_state_computed_in_fp32(watch, seed):
    """An optimizer that keeps its moments in half precision, and adds its epsilon in float32."""
    model, scaler = _network(seed, init_scale=2.0**12)
    opt = Slim(model.parameters(), 1e-4, 1e-8, wide=True)
    watch(scaler, model)
    for _ in range(20):
        opt.zero_grad()
        scaler.scale(_loss(model)).backward()
        scaler.step(opt)
        scaler.update()


@loop
def own_skip_of_one_of_two(watch, seed):
    """An optimizer is unscaled and, at some steps, not stepped: its gradients lie there until they are cleared before its next backward."""
    torch.manual_seed(seed)
    g, d = MLP(4, 24, 6), MLP(6, 24, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), 1e-4), torch.optim.Adam(d.parameters(), 4e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    watch(scaler, nn.ModuleDict({"G": g, "D": d}))
    for i in range(30):
        z, real = torch.randn(16, 4), torch.randn(16, 6) + 1.0
        of_d.zero_grad()
        with half():
            loss = F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()
        scaler.scale(loss).backward()
        scaler.step(of_d)
        of_g.zero_grad()
        with half():
            loss = F.softplus(-d(g(z))).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(of_g)
        if i % 4:
            scaler.step(of_g)
        scaler.update()
