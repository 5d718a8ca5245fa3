"""The training loops ampscope must watch without changing them. Each is `loop(watch, steps)` and returns the trained parameters.

`watch(scaler, model, **kwargs)` is `ampscope.watch` with a log folder, or a function that does nothing.

Long because it is a collection: one short function a loop.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ampscope.probe.stats import BACKENDS

# numba compiles in a thread and uses warnings.catch_warnings() there, which is not made for threads: let it be over before
# a test looks at warnings.
BACKENDS.warm(wait=True)

LOOPS = {}
UNSEEN = ("compiled_train_step", "compiled_scaler_calls", "compiled_optimizer_without_scaler")
"""Loops that must not be changed, and whose calls, compiled, are not seen."""


def loop(function):
    """Register a loop under its name."""
    LOOPS[function.__name__] = function
    return function


def net(seed=0, d=8, h=16):
    """Return a small MLP."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, 1))


def batch(step, d=8, n=16, spike=()):
    """Return the same batch for the same step; where `spike`, one whose scaled gradient overflows."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(n, d, generator=g), torch.randn(n, 1, generator=g)
    return x, y * (1e4 if step in spike else 1.0)


def forward(model, x, y, dtype=torch.float16):
    """Return the loss under autocast."""
    with torch.autocast("cpu", dtype=dtype):
        return (model(x).float() - y).pow(2).mean()


def result(*modules):
    """Return every parameter, detached."""
    return [p.detach().clone() for m in modules for p in m.parameters()]


def run(watch, steps, optimizer=None, scaler=None, model=None, body=None, **kwargs):
    """Train a plain loop; `body(step, model, optimizer, scaler)` replaces what stands between zero_grad and the end."""
    model = model or net()
    opt = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    watch(scaler, model, **kwargs)
    for step in range(steps):
        opt.zero_grad()
        if body:
            body(step, model, opt, scaler)
            continue
        x, y = batch(step, spike=(3, 11))
        scaler.scale(forward(model, x, y)).backward()
        scaler.step(opt)
        scaler.update()
    return result(model)


@loop
def plain(watch, steps=20):
    """Scale, step, update."""
    return run(watch, steps)


@loop
def unscale_and_clip(watch, steps=20):
    """Unscale explicitly and clip by global norm."""

    def body(step, model, opt, scaler):
        scaler.scale(forward(model, *batch(step, spike=(3,)))).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def accumulation(watch, steps=20):
    """Four micro-batches a step."""

    def body(step, model, opt, scaler):
        for micro in range(4):
            scaler.scale(forward(model, *batch(step * 4 + micro, spike=(9,))) / 4).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


def gan(watch, steps, updates):
    """Two optimizers, one scaler."""
    g, d = net(0, 4, 8), net(1, 1, 8)
    og, od = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    watch(scaler, {"G": g, "D": d})
    for step in range(steps):
        z = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        og.zero_grad()
        scaler.scale(forward(d, g(z), torch.ones(8, 1))).backward()
        scaler.step(og)
        if updates == 2:
            scaler.update()
        od.zero_grad()
        spike = 1e6 if step == 5 else 1.0
        scaler.scale(forward(d, g(z).detach(), torch.zeros(8, 1) + spike)).backward()
        scaler.step(od)
        scaler.update()
    return result(g, d)


@loop
def gan_one_update(watch, steps=20):
    """Two optimizers, one update."""
    return gan(watch, steps, 1)


@loop
def gan_two_updates(watch, steps=20):
    """Two optimizers, two updates."""
    return gan(watch, steps, 2)


@loop
def fused_adam(watch, steps=20):
    """Fused Adam: `step()` runs on an overflow too."""
    return run(watch, steps, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, fused=True))


@loop
def fused_sgd(watch, steps=20):
    """Fused SGD."""
    return run(watch, steps, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, fused=True))


@loop
def sparse_embedding(watch, steps=20):
    """SparseAdam on a sparse embedding, Adam on the rest."""
    torch.manual_seed(0)
    emb, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1)
    os, oh = torch.optim.SparseAdam(emb.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    watch(scaler, [emb, head])
    for step in range(steps):
        ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(step))
        os.zero_grad()
        oh.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = head(emb(ids)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(os)
        scaler.step(oh)
        scaler.update()
    return result(emb, head)


@loop
def frozen_then_unfrozen(watch, steps=20):
    """A layer joins the training midway."""
    model = net()
    model[0].requires_grad_(False)

    def body(step, model, opt, scaler):
        if step == 8:
            model[0].requires_grad_(True)
        scaler.scale(forward(model, *batch(step))).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, model=model, body=body)


class Tied(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        """Score every token."""
        return self.head(torch.tanh(self.emb(x)))


@loop
def tied_weights(watch, steps=20):
    """A weight used twice counts once."""
    torch.manual_seed(0)

    def body(step, model, opt, scaler):
        ids = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(ids).float(), ids)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, model=Tied(), body=body)


@loop
def parameter_of_no_model(watch, steps=20):
    """A temperature that only the optimizer knows."""
    temperature = nn.Parameter(torch.ones(1))

    def body(step, model, opt, scaler):
        x, y = batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() * temperature - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    out = run(watch, steps, optimizer=lambda m: torch.optim.SGD([*m.parameters(), temperature], lr=1e-3), body=body)
    return [*out, temperature.detach().clone()]


@loop
def group_added_midway(watch, steps=20):
    """`add_param_group` while training."""
    late = nn.Parameter(torch.zeros(1))

    def body(step, model, opt, scaler):
        if step == 6:
            opt.add_param_group({"params": [late]})
        x, y = batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() + late - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    return [*run(watch, steps, body=body), late.detach().clone()]


@loop
def float64_parameters(watch, steps=20):
    """A double model."""

    def body(step, model, opt, scaler):
        x, y = batch(step)
        scaler.scale((model(x.double()) - y).pow(2).mean()).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, model=net().double(), body=body)


@loop
def complex_parameters(watch, steps=20):
    """Complex weights, without a scaler (GradScaler refuses them on CPU)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2, dtype=torch.complex64)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(None, model, optimizer=opt)
    for step in range(steps):
        opt.zero_grad()
        x = torch.randn(8, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
        model(x).abs().mean().backward()
        opt.step()
    return [torch.view_as_real(p) for p in result(model)]


@loop
def gradient_set_by_hand(watch, steps=20):
    """`.grad` is assigned, no backward runs."""

    def body(step, model, opt, scaler):
        scaler.scale(torch.zeros(()))
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.5 * (i + 1))
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def new_scale(watch, steps=20):
    """The scale is set by hand."""

    def body(step, model, opt, scaler):
        scaler.scale(forward(model, *batch(step))).backward()
        scaler.step(opt)
        scaler.update(64.0 if step == 4 else None)

    return run(watch, steps, body=body)


@loop
def changed_interval(watch, steps=20):
    """The growth interval changes."""

    def body(step, model, opt, scaler):
        if step == 5:
            scaler.set_growth_interval(3)
        scaler.scale(forward(model, *batch(step))).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def disabled_scaler(watch, steps=20):
    """`GradScaler(enabled=False)`."""
    return run(watch, steps, scaler=torch.amp.GradScaler("cpu", enabled=False))


@loop
def bf16_without_scaler(watch, steps=20):
    """BF16 autocast, no scaler."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(None, model, optimizer=opt)
    for step in range(steps):
        opt.zero_grad()
        forward(model, *batch(step), dtype=torch.bfloat16).backward()
        opt.step()
    return result(model)


@loop
def deprecated_spelling(watch, steps=20):
    """`torch.cuda.amp.GradScaler`, which disables itself without CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.cuda.amp.GradScaler()
    return run(watch, steps, scaler=scaler)


class Mine(torch.amp.GradScaler):
    """A user's subclass that floors the scale."""

    def update(self, new_scale=None):
        """Update, then floor."""
        super().update(new_scale)
        self._scale.clamp_(min=16.0)


@loop
def users_subclass(watch, steps=20):
    """A subclass that overrides `update`."""
    return run(watch, steps, scaler=Mine("cpu", init_scale=2.0**10, growth_interval=5))


def compiled(watch, steps, before):
    """A compiled model."""
    torch._dynamo.reset()
    model = net()
    fast = torch.compile(model, backend="eager")
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    if not before:
        forward(fast, *batch(99))
    watch(scaler, fast)
    for step in range(steps):
        opt.zero_grad()
        scaler.scale(forward(fast, *batch(step, spike=(3,)))).backward()
        scaler.step(opt)
        scaler.update()
    return result(model)


@loop
def compiled_watched_before(watch, steps=20):
    """Watched before its first call."""
    return compiled(watch, steps, True)


@loop
def compiled_watched_after(watch, steps=20):
    """Watched after its first call."""
    return compiled(watch, steps, False)


@loop
def data_parallel(watch, steps=20):
    """A wrapper that prefixes names."""
    inner = net()
    opt = torch.optim.SGD(inner.parameters(), lr=1e-3)
    return run(watch, steps, model=nn.DataParallel(inner), optimizer=lambda m: opt)


@loop
def two_scalers(watch, steps=20):
    """Two watched scalers take turns."""
    a, b = net(0), net(1)
    oa, ob = torch.optim.SGD(a.parameters(), lr=1e-3), torch.optim.SGD(b.parameters(), lr=1e-3)
    sa, sb = (torch.amp.GradScaler("cpu", init_scale=2.0**k) for k in (8, 12))
    watch(sa, a)
    watch(sb, b)
    for step in range(steps):
        for m, o, s in ((a, oa, sa), (b, ob, sb)):
            o.zero_grad()
            s.scale(forward(m, *batch(step, spike=(3,)))).backward()
            s.step(o)
            s.update()
    return result(a, b)


@loop
def no_update_when_disabled(watch, steps=20):
    """`update()` never comes; a disabled scaler does not mind."""

    def body(step, model, opt, scaler):
        scaler.scale(forward(model, *batch(step))).backward()
        scaler.step(opt)

    return run(watch, steps, scaler=torch.amp.GradScaler("cpu", enabled=False), body=body)


@loop
def several_losses(watch, steps=20):
    """A tuple of losses goes through one `scale()`."""

    def body(step, model, opt, scaler):
        first, second = scaler.scale((forward(model, *batch(step)), forward(model, *batch(step + 100))))
        first.backward()
        second.backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def dropout_and_batchnorm(watch, steps=20):
    """Random numbers and buffers are the same, watched or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    out = run(watch, steps, model=model)
    return [*out, *(b.double() for b in model.buffers())]


@loop
def gradient_penalty(watch, steps=20):
    """PyTorch's recipe: `autograd.grad` of a scaled loss with `create_graph`, unscaled by hand."""

    def body(step, model, opt, scaler):
        loss = forward(model, *batch(step))
        grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        penalty = sum((g / scaler.get_scale()).pow(2).sum() for g in grads)
        scaler.scale(loss + 0.1 * penalty).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def lazy_losses(watch, steps=20):
    """A generator of losses."""

    def body(step, model, opt, scaler):
        for scaled in scaler.scale(forward(model, *batch(step + 100 * k)) for k in range(3)):
            scaled.backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def checkpointed(watch, steps=20):
    """Activation checkpointing of both kinds."""
    from torch.utils.checkpoint import checkpoint

    def body(step, model, opt, scaler):
        x, y = batch(step, spike=(3,))
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = checkpoint(model[:2], x.requires_grad_(True), use_reentrant=step % 2 == 0)
            loss = (model[2](hidden).float() - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def compiled_optimizer(watch, steps=20):
    """`optimizer.step` compiled, called by the scaler."""
    torch._dynamo.reset()
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    opt.step = torch.compile(opt.step, backend="eager")
    return run(watch, steps, optimizer=lambda m: opt, model=model)


@loop
def compiled_train_step(watch, steps=20):
    """Forward, backward and the scaler's calls in one compiled function (with the graph breaks that GradScaler makes)."""
    torch._dynamo.reset()

    def body(step, model, opt, scaler):
        train(model, opt, scaler, *batch(step, spike=(3,)))

    @torch.compile(backend="eager")
    def train(model, opt, scaler, x, y):
        scaler.scale(forward(model, x, y)).backward()
        scaler.step(opt)
        scaler.update()

    return run(watch, steps, body=body)


@loop
def bare_steps_beside(watch, steps=20):
    """One network is scaled, the other steps five times a record on its own, unscaled."""
    g, d = net(0, 4, 8), net(1, 1, 8)
    og, od = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.SGD(d.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    watch(scaler, {"G": g, "D": d})
    for step in range(steps):
        z = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for _ in range(5):
            od.zero_grad()
            (d(g(z).detach()) - 1).pow(2).mean().backward()
            od.step()
        og.zero_grad()
        scaler.scale(forward(d, g(z), torch.ones(8, 1))).backward()
        scaler.step(og)
        scaler.update()
    return result(g, d)


@loop
def compiled_scaler_calls(watch, steps=200):
    """Forward and backward in eager mode, the scaler's calls in a compiled function."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def finish(opt, scaler):
        scaler.step(opt)
        scaler.update()

    def body(step, model, opt, scaler):
        scaler.scale(forward(model, *batch(step, spike=(3,)))).backward()
        finish(opt, scaler)

    return run(watch, steps, body=body)


@loop
def compiled_optimizer_without_scaler(watch, steps=20):
    """`optimizer.step` compiled, without a scaler: no end of a step is seen."""
    torch._dynamo.reset()
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(None, model, optimizer=opt)
    step_compiled = torch.compile(opt.step, backend="eager")
    for step in range(steps):
        opt.zero_grad()
        forward(model, *batch(step), dtype=torch.bfloat16).backward()
        step_compiled()
    return result(model)
