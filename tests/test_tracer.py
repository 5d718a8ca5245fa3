"""The tracer: names layer, phase and step of injected faults; leaves training unchanged; leaves nothing on the stack."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.errors import AmpscopeError
from ampscope.probe import armed

LAYERS = 12


class Bad(torch.autograd.Function):
    """Puts a value into the forward or the backward of a tensor."""

    @staticmethod
    def forward(ctx, x, value, backward):
        """Return x, in forward with the value in its first element."""
        ctx.value, ctx.backward = value, backward
        out = x.clone()
        return out if backward else out + torch.zeros_like(out).index_fill(-1, torch.tensor([0]), 1.0) * value

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient, in backward with the value added."""
        return (grad + ctx.value if ctx.backward else grad), None, None


class Layer(nn.Module):
    """A linear layer with a switch for a fault."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fault = None

    def forward(self, x):
        """Compute, with the fault if it is on."""
        x = torch.tanh(self.linear(x))
        if self.fault is not None:
            x = Bad.apply(x, *self.fault)
        return x


def train(folder, where, value, backward, at, steps=8):
    """Train a 12-layer model with a fault in one layer, at one step (backward) or from it on (forward); return the run."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ampscope.watch(scaler, model, log_dir=folder, run="r", tensorboard=False)
    for step in range(steps):
        model[where].fault = (value, backward) if (step == at if backward else step >= at) else None
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    assert not _get_current_dispatch_mode_stack()
    return ampscope.open_run(folder / "r")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", range(LAYERS))
def test_a_fault_in_backward_at_one_step_is_named(tmp_path, where, value):
    """The free record alone: the step, backward, the layer whose gradient is the first bad one."""
    run = train(tmp_path, where, value, True, at=3)
    (event,) = [e for e in run.events if e.data.get("topic") == "gradients"]
    assert event.step == 3
    assert event.phase == "backward"
    assert event.layers[0].startswith(f"{where}.linear.")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", range(LAYERS))
def test_a_fault_in_forward_from_a_step_on_is_named(tmp_path, where, value):
    """The tracer, armed by the first bad step: the layer and the phase; the free record: the step."""
    run = train(tmp_path, where, value, False, at=3)
    first = next(e for e in run.events if e.data.get("topic") == "gradients")
    assert first.step == 3
    assert first.phase == "forward"
    roots = [e for e in run.events if e.data.get("role") == "root"]
    assert roots
    assert roots[0].phase == "forward"
    assert roots[0].layers[0] == str(where)


class Block(nn.Module):
    """Dropout, BatchNorm and a checkpointed part."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.bn, self.drop, self.b, self.reentrant = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 1),
            reentrant,
        )

    def inner(self, x):
        """The part that is recomputed."""
        return self.drop(self.bn(self.a(x)))

    def forward(self, x):
        """Predict."""
        if self.reentrant is None:
            return self.b(self.inner(x))
        return self.b(checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant))


def checkpointed(folder, reentrant, watched, wide=1.0):
    """Train with a fault-free or overflowing recomputed part; return state and run."""
    torch.manual_seed(0)
    model = Block(reentrant)
    with torch.no_grad():
        model.a.weight.mul_(wide)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    if watched:
        ampscope.watch(scaler, model, log_dir=folder, run="r", tensorboard=False)
    for step in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(16, 8, generator=torch.Generator().manual_seed(step))).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    if watched:
        ampscope.unwatch(scaler)
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("wide", [1.0, 1e5])
def test_training_is_unchanged_while_traced(tmp_path, reentrant, wide):
    """Both kinds of checkpointing, dropout, BatchNorm; healthy, and with every step traced because the forward overflows."""
    want = checkpointed(tmp_path, reentrant, False, wide)
    got = checkpointed(tmp_path, reentrant, True, wide)
    for a, b in zip(want, got, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    roots = [e for e in ampscope.open_run(tmp_path / "r").events if e.data.get("role") == "root"]
    assert bool(roots) == (wide > 1)
    if roots:
        assert roots[0].layers[0] == "a"
        assert roots[0].data["fp32_ok"] is True


def test_a_mode_of_the_users_stays_alone(tmp_path):
    """Nothing is traced above it; it ends as it began."""

    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    with Mine() as mine:
        scaler.scale(model(torch.ones(1, 2)).mean()).backward()
        assert _get_current_dispatch_mode_stack() == [mine]
        scaler.step(opt)
        scaler.update()
        with pytest.raises(AmpscopeError, match="another TorchDispatchMode"):
            ampscope.trace(model).__enter__()
    assert not _get_current_dispatch_mode_stack()
    ampscope.unwatch(scaler)


def test_an_exception_in_forward_leaves_no_mode(tmp_path):
    """The first step is audited; its forward raises; nothing stays on the stack."""

    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            raise KeyError("mine")

    model = Raises()
    scaler = torch.amp.GradScaler("cpu")
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", tensorboard=False)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 2))
    assert not _get_current_dispatch_mode_stack()
    ampscope.unwatch(scaler)


class Masked(nn.Module):
    """Attention with a causal −inf mask, and one row masked completely if asked."""

    def __init__(self, everything):
        super().__init__()
        self.q, self.out, self.everything = nn.Linear(8, 8), nn.Linear(8, 1), everything

    def forward(self, x):
        """Attend."""
        scores = self.q(x) @ x.transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.everything:
            mask[2] = True
        return self.out(scores.masked_fill(mask, float("-inf")).softmax(-1) @ x)


def test_minus_infinity_in_a_mask_is_no_fault():
    """A causal mask is healthy; a row that is masked completely is not, and FP32 has it too."""
    for everything in (False, True):
        torch.manual_seed(0)
        model = Masked(everything)
        with ampscope.trace(model, quiet=True) as found:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(2, 4, 8)).float().mean()
            loss.backward()
        assert bool(found.events) == everything
        if everything:
            assert found.events[0].data["masked_rows"]
            assert found.events[0].data["fp32_ok"] is False


def test_trace_prints_and_returns_the_operation(capsys):
    """By hand, for one step, without a scaler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(6e4)
    with ampscope.trace(model) as found, torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 4)).float().mean().backward()
    assert found.events[0].layers[0] == "0"
    assert found.events[0].where.startswith(("tests", "test_tracer"))
    assert found.matmuls == {"float16": 2}
    assert "made inf" in capsys.readouterr().out
    assert not model._forward_pre_hooks


def test_a_healthy_step_says_so(capsys):
    """Nothing found is said too."""
    model = nn.Linear(4, 1)
    with ampscope.trace(model) as found:
        model(torch.ones(2, 4)).mean().backward()
    assert not found.events
    assert "no operation made inf or NaN" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_backward_thread_of_cuda_is_seen():
    """A mode entered in one thread is on in the thread that runs CUDA's backward."""
    model = nn.Linear(4, 1).cuda()
    with ampscope.trace(model, quiet=True) as found:
        model(torch.ones(2, 4, device="cuda")).mean().backward()
    assert found.operations > 2


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("where", [0, 5, 11])
def test_flags_that_stay_on_the_device_name_the_same_layer(where, backward):
    """The path for CUDA, forced on the CPU: no value is read until the end, then one copy tells."""
    from ampscope.probe import report
    from ampscope.probe.places import Places
    from ampscope.probe.tracer import OpTracer

    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)], nn.Linear(8, 1))
    model[where].fault = (float("inf"), backward)
    tracer = OpTracer(Places({"": model}), {}, deferred=True)
    tracer.enter()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 8)).float().pow(2).mean()
    tracer.see_loss(loss)
    loss.backward()
    tracer.passive = True
    for p in model.parameters():
        tracer.see_gradient(p.grad)
    tracer.leave()
    assert not tracer.trace.births
    tracer.deferred.send()
    assert tracer.deferred.ready()
    tracer.deferred.settle(tracer.trace)
    root = report.step(tracer, 0)[0]
    assert root.phase == ("backward" if backward else "forward")
    assert root.layers[0] == str(where)


def test_a_mask_is_no_fault_on_a_device_either():
    """A causal -inf mask, flags on the device."""
    from ampscope.probe.places import Places
    from ampscope.probe.tracer import OpTracer

    torch.manual_seed(0)
    model = Masked(False)
    tracer = OpTracer(Places({"": model}), {}, deferred=True)
    tracer.enter()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(2, 4, 8)).float().mean()
    loss.backward()
    tracer.leave()
    tracer.deferred.send()
    tracer.deferred.settle(tracer.trace)
    assert not tracer.trace.births


def test_a_sick_run_whose_traced_steps_are_slow_is_traced_less(tmp_path, monkeypatch):
    """Thousands of layers that are all non-finite: after a minute of traced steps tracing takes its share of the time and no more."""
    monkeypatch.setattr(armed, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(armed, "TIME_SHARE", 0.0)
    traced = []
    opened = armed.ArmedTracer._open
    monkeypatch.setattr(armed.ArmedTracer, "_open", lambda self: (traced.append(self._recorder.step), opened(self)))
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ampscope.watch(torch.amp.GradScaler("cpu", init_scale=4.0), model, log_dir=tmp_path, tensorboard=False)
    for _ in range(8):
        opt.zero_grad()
        scaler.scale(model(torch.full((2, 4), float("nan"))).mean()).backward()
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    assert traced == [0]  # the audit
