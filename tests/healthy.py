"""Healthy training runs of many kinds: nothing above info may be said of any of them. Each is `run(watch, seed)`.

Long because it is a collection: one short function a kind.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.common import MLP, half, train

RUNS = {}


def healthy(function):
    """Register a run under its name."""
    RUNS[function.__name__] = function
    return function


def classes(n=64, d=16, k=4):
    """Return a learnable classification problem."""
    x = torch.randn(n, d)
    return x, (x @ torch.randn(d, k)).argmax(1)


def batches(x, y, step, size=16):
    """Return one batch, going round."""
    at = torch.arange(step * size, (step + 1) * size) % len(x)
    return x[at], y[at]


@healthy
def mlp(watch, seed):
    """A classifier with the default scaler and Adam."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 32, 4), classes()
    train(
        watch,
        model,
        lambda s, m: F.cross_entropy(model(batches(x, y, s)[0]), batches(x, y, s)[1]),
        steps=40,
        optimizer="adam",
        init_scale=2.0**16,
    )


@healthy
def regression(watch, seed):
    """A regression with large targets: a few skips until the scale fits."""
    torch.manual_seed(seed)
    model = MLP(8, 32, 1)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True) * 30
    train(watch, model, lambda s, m: F.mse_loss(model(x).float(), y), steps=40, lr=1e-5, init_scale=2.0**16)


@healthy
def growing(watch, seed):
    """A short growth interval: the scale probes upwards and is cut back, again and again."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 4), classes()
    train(
        watch,
        model,
        lambda s, m: F.cross_entropy(model(x).float(), y),
        steps=80,
        optimizer="adam",
        init_scale=2.0**14,
        growth_interval=8,
    )


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, pooling and a head."""

    def __init__(self):
        super().__init__()
        self.c1, self.b1, self.c2, self.b2 = (
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        """Return logits."""
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.b2(self.c2(x)))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


@healthy
def cnn(watch, seed):
    """A convolutional network with BatchNorm, evaluated after every few steps."""
    torch.manual_seed(seed)
    model = ConvNet()
    x, y = torch.randn(32, 1, 8, 8), torch.randint(0, 4, (32,))

    def evaluate(step):
        if step % 4 == 3:
            model.eval()
            with torch.no_grad(), half():
                model(x)
            model.train()

    train(
        watch,
        model,
        lambda s, m: F.cross_entropy(model(x), y),
        steps=16,
        optimizer="momentum",
        lr=1e-2,
        init_scale=2.0**16,
        after=evaluate,
    )


class Block(nn.Module):
    """A transformer block, masked by hand."""

    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2, self.heads = nn.LayerNorm(d), nn.LayerNorm(d), heads
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.Linear(d, 2 * d),
            nn.Linear(2 * d, d),
        )

    def forward(self, x, mask):
        """Attend, then transform."""
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        logits = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(mask, float("-inf"))
        x = x + self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


@healthy
def transformer(watch, seed):
    """A causal language model with padding: −inf masks are meant."""
    torch.manual_seed(seed)
    d, t = 16, 8
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(30, d),
            "blocks": nn.ModuleList([Block(d, 2), Block(d, 2)]),
            "norm": nn.LayerNorm(d),
            "head": nn.Linear(d, 30),
        }
    )

    def loss_of(step, micro):
        ids = torch.randint(1, 30, (4, t))
        length = torch.randint(3, t + 1, (4,))
        pad = torch.arange(t)[None] >= length[:, None]
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)[None, None] | pad[:, None, None]
        h = model["emb"](ids)
        for block in model["blocks"]:
            h = block(h, mask)
        logits = model["head"](model["norm"](h))
        target = ids.roll(-1, 1).masked_fill(pad, -100)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)

    train(watch, model, loss_of, steps=16, optimizer="adamw", init_scale=2.0**16, clip=1.0)


@healthy
def encoder_layer(watch, seed):
    """torch's own TransformerEncoderLayer with a causal mask and padding."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "inp": nn.Linear(6, 16),
            "enc": nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
            "head": nn.Linear(16, 1),
        }
    )
    causal = nn.Transformer.generate_square_subsequent_mask(7)

    def loss_of(step, micro):
        x, y = torch.randn(4, 7, 6), torch.randn(4, 7, 1)
        return F.mse_loss(model["head"](model["enc"](model["inp"](x), src_mask=causal)).float(), y)

    train(watch, model, loss_of, steps=12, optimizer="adam", init_scale=2.0**16)


@healthy
def sparse_embedding(watch, seed):
    """A large embedding with sparse gradients and its own optimizer: unseen rows have none."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"emb": nn.EmbeddingBag(200, 8, sparse=True), "head": MLP(8, 16, 1)})
    a, b = torch.optim.SparseAdam(model["emb"].parameters(), 1e-3), torch.optim.Adam(model["head"].parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    for _ in range(20):
        a.zero_grad()
        b.zero_grad()
        with half():
            loss = F.mse_loss(model["head"](model["emb"](torch.randint(0, 200, (8, 3)))).float(), torch.randn(8, 1))
        scaler.scale(loss).backward()
        scaler.step(a)
        scaler.step(b)
        scaler.update()


@healthy
def dense_embedding(watch, seed):
    """A dense embedding of which a batch sees few rows: most of its gradient is zero by nature."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"emb": nn.Embedding(500, 8, padding_idx=0), "head": MLP(8, 16, 2)})

    def loss_of(step, micro):
        ids = torch.randint(0, 40, (8, 4))
        return F.cross_entropy(model["head"](model["emb"](ids).mean(1)).float(), ids.sum(1) % 2)

    train(watch, model, loss_of, steps=20, optimizer="adam", init_scale=2.0**16)


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank addition whose B starts at zero."""

    def __init__(self, a, b, rank=2):
        super().__init__()
        self.base, self.A, self.B = nn.Linear(a, b), nn.Linear(a, rank, bias=False), nn.Linear(rank, b, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        """Add the low-rank part."""
        return self.base(x) + self.B(self.A(x)) * 2.0


@healthy
def lora(watch, seed):
    """LoRA: at the first step A's gradient is zero, since B is."""
    torch.manual_seed(seed)
    model, (x, y) = nn.Sequential(LoRA(16, 32), nn.ReLU(), LoRA(32, 4)), classes()
    train(watch, model, lambda s, m: F.cross_entropy(model(x), y), steps=20, optimizer="adamw", init_scale=2.0**16)


@healthy
def frozen_backbone(watch, seed):
    """Half-precision frozen backbone, FP32 head; the optimizer was given all parameters."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).half().requires_grad_(False)
    model, (x, y) = nn.ModuleDict({"body": body, "head": nn.Linear(16, 4)}), classes()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    for _ in range(20):
        opt.zero_grad()
        with half():
            loss = F.cross_entropy(model["head"](model["body"](x)), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@healthy
def gan(watch, seed):
    """Two networks, two optimizers, one scaler, one update; D's gradients of G's loss are thrown away."""
    torch.manual_seed(seed)
    nets = {"G": MLP(4, 16, 8), "D": MLP(8, 16, 1)}
    opts = {k: torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.999)) for k, m in nets.items()}
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, nets)
    for _ in range(20):
        real, z = torch.randn(16, 8), torch.randn(16, 4)
        opts["D"].zero_grad()
        with half():
            fake = nets["G"](z)
            d_loss = F.softplus(-nets["D"](real)).float().mean() + F.softplus(nets["D"](fake.detach())).float().mean()
        scaler.scale(d_loss).backward()
        scaler.step(opts["D"])
        opts["G"].zero_grad()
        with half():
            g_loss = F.softplus(-nets["D"](fake)).float().mean()
        scaler.scale(g_loss).backward()
        scaler.step(opts["G"])
        scaler.update()


@healthy
def gan_two_scalers(watch, seed):
    """A scaler of its own for each optimizer; one of them is watched with both networks."""
    torch.manual_seed(seed)
    nets = {"G": MLP(4, 16, 8), "D": MLP(8, 16, 1)}
    opts = {k: torch.optim.Adam(m.parameters(), 1e-3) for k, m in nets.items()}
    scalers = {k: torch.amp.GradScaler("cpu") for k in nets}
    watch(scalers["G"], nets)
    for _ in range(20):
        for k, other in (("D", "G"), ("G", "D")):
            opts[k].zero_grad()
            nets[other].requires_grad_(False)
            with half():
                out = nets["D"](nets["G"](torch.randn(16, 4)))
                loss = F.softplus(out if k == "D" else -out).float().mean()
            scalers[k].scale(loss).backward()
            nets[other].requires_grad_(True)
            scalers[k].step(opts[k])
            scalers[k].update()


@healthy
def rnn(watch, seed):
    """A recurrent network over a short sequence, clipped."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"cell": nn.RNNCell(6, 16), "head": nn.Linear(16, 3)})

    def loss_of(step, micro):
        x, h = torch.randn(8, 6, 6), torch.zeros(8, 16)
        for t in range(6):
            h = model["cell"](x[:, t], h)
        return F.cross_entropy(model["head"](h).float(), (x.sum((1, 2)) > 0).long())

    train(watch, model, loss_of, steps=20, optimizer="adam", init_scale=2.0**16, clip=0.5)


@healthy
def accumulation(watch, seed):
    """Four micro-batches a step, unscaled and clipped once."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 4), classes()
    train(watch, model, lambda s, m: F.cross_entropy(model(batches(x, y, 4 * s + m)[0]), batches(x, y, 4 * s + m)[1]), steps=15, optimizer="adamw", accumulate=4, clip=1.0,
          init_scale=2.0**16)  # fmt: skip


@healthy
def clipping(watch, seed):
    """Clipping to a small norm after unscaling: the clipped norm is the same at every step."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 4), classes()
    train(watch, model, lambda s, m: F.cross_entropy(model(x), y), steps=20, clip=0.01, lr=0.1, init_scale=2.0**16)


@healthy
def fused(watch, seed):
    """A fused optimizer, whose step() runs on skipped steps too."""
    torch.manual_seed(seed)
    model = MLP(8, 32, 1)
    opt = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    x = torch.randn(64, 8)
    for _ in range(20):
        opt.zero_grad()
        with half():
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True) * 20)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@healthy
def bf16(watch, seed):
    """BF16 autocast without a scaler."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 32, 4), classes()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(None, model, optimizer=opt)
    for _ in range(25):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()


@healthy
def bf16_disabled_scaler(watch, seed):
    """BF16 autocast with GradScaler(enabled=False), as many scripts switch."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 4), classes()
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    watch(scaler, model)
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()


@healthy
def fp32(watch, seed):
    """Plain FP32 training, for comparison."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 4), classes()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    watch(None, model, optimizer=opt)
    for _ in range(20):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


@healthy
def resumed(watch, seed):
    """A restart that restores model, optimizer and scaler."""
    torch.manual_seed(seed)
    x = torch.randn(32, 8)
    y = x.sum(1, keepdim=True) * 100.0
    model = MLP(8, 16, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    for step in range(50):
        if step == 30:
            state = model.state_dict(), opt.state_dict(), scaler.state_dict()
            model = MLP(8, 16, 1)
            opt, scaler = torch.optim.Adam(model.parameters(), 1e-4), torch.amp.GradScaler("cpu")
            if seed % 2:  # both orders are usual
                watch(scaler, model)
            model.load_state_dict(state[0])
            opt.load_state_dict(state[1])
            scaler.load_state_dict(state[2])
            if not seed % 2:
                watch(scaler, model)
        opt.zero_grad(set_to_none=seed % 2 == 0)
        with half():
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


@healthy
def scheduled(watch, seed):
    """A warm-up schedule that moves every step, with a skip or two at the start."""
    torch.manual_seed(seed)
    model = MLP(8, 32, 1)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 10))
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    x = torch.randn(64, 8)
    for _ in range(60):
        opt.zero_grad()
        with half():
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True) * 4)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()


@healthy
def outlier(watch, seed):
    """One batch in the middle overflows; the scaler skips it and training goes on."""
    torch.manual_seed(seed)
    model = MLP(8, 32, 1)

    def loss_of(step, micro):
        x = torch.randn(32, 8)
        return F.mse_loss(model(x).float(), x.sum(1, keepdim=True) * (3e3 if step == 30 else 1.0))

    train(watch, model, loss_of, steps=60, optimizer="adam", init_scale=2.0**12)


@healthy
def penalty(watch, seed):
    """A gradient penalty done right: gradients are unscaled before the penalty."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1, act=torch.tanh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    watch(scaler, model)
    for _ in range(15):
        opt.zero_grad()
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        with half():
            loss = F.mse_loss(model(x).float(), y)
        grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        with half():
            norm = sum((g * inverse).float().pow(2).sum() for g in grads).sqrt()
            total = loss + 1e-2 * norm
        scaler.scale(total).backward()
        scaler.step(opt)
        scaler.update()


@healthy
def autoencoder(watch, seed):
    """A variational autoencoder: exp, log and a KL term, dropout."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"enc": MLP(16, 32, 8), "dec": MLP(4, 32, 16)})
    x = torch.rand(64, 16)

    def loss_of(step, micro):
        mu, logvar = model["enc"](F.dropout(x, 0.1)).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar.float() - mu.float().pow(2) - logvar.float().exp()).sum(1).mean()
        return F.mse_loss(model["dec"](z).float(), x) + 1e-3 * kl

    train(watch, model, loss_of, steps=25, optimizer="adam", init_scale=2.0**16)


@healthy
def contrastive(watch, seed):
    """Normalised embeddings in FP32, a temperature, log-softmax: what the eps rule asks for."""
    torch.manual_seed(seed)
    model = MLP(16, 32, 8)

    def loss_of(step, micro):
        x = torch.randn(16, 16)
        a, b = (F.normalize(model(v).float(), dim=-1) for v in (x, x + 0.1 * torch.randn(16, 16)))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(16))

    train(watch, model, loss_of, steps=25, optimizer="adam", init_scale=2.0**16)


@healthy
def experts(watch, seed):
    """Two experts of which a batch uses one: the other has no gradient, or a zero one, in that step."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": MLP(8, 16, 1), "b": MLP(8, 16, 1)})

    def loss_of(step, micro):
        x = torch.randn(16, 8)
        return F.mse_loss(model["ab"[step % 2]](x).float(), x.sum(1, keepdim=True))

    train(watch, model, loss_of, steps=24, optimizer="adam", init_scale=2.0**14)


@healthy
def checkpointed(watch, seed):
    """Activation checkpointing: forward runs twice."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(seed)
    model, (x, y) = nn.ModuleDict({"a": MLP(16, 32, 16), "b": MLP(16, 32, 4)}), classes()
    train(
        watch,
        model,
        lambda s, m: F.cross_entropy(model["b"](checkpoint(model["a"], x, use_reentrant=False)), y),
        steps=15,
        optimizer="adam",
        init_scale=2.0**16,
    )


@healthy
def compiled(watch, seed):
    """A compiled model."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model, (x, y) = MLP(16, 32, 4), classes()
    net = torch.compile(model, backend="eager")
    train(watch, model, lambda s, m: F.cross_entropy(net(x), y), steps=12, optimizer="adam", init_scale=2.0**16)


@healthy
def constant_rate_zero(watch, seed):
    """A learning rate of zero (a dry run): every step has the same gradients."""
    torch.manual_seed(seed)
    model, (x, y) = MLP(16, 32, 4), classes()
    train(watch, model, lambda s, m: F.cross_entropy(model(x), y), steps=15, lr=0.0, init_scale=2.0**16)


@healthy
def closure_free_two_losses(watch, seed):
    """Two losses scaled and back-propagated one after the other, one optimizer."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"body": MLP(8, 16, 8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    opt = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    watch(scaler, model)
    for _ in range(15):
        x = torch.randn(16, 8)
        with half():
            h = model["body"](x)
            a, b = F.mse_loss(model["a"](h).float(), x[:, :1]), F.mse_loss(model["b"](h).float(), x[:, 1:2])
        a, b = scaler.scale([a, b])
        opt.zero_grad()
        a.backward(retain_graph=True)
        b.backward()
        scaler.step(opt)
        scaler.update()
