"""Held-out models for benchmarks/underflow_accuracy.py --held-out: kinds that no constant of the estimate was fitted on.

`HELD_OUT[name]() -> (model, batch, loss_fn)`. Small, and FP16 convolutions few: they are slow on CPU.

Long because it is a collection: one short function a model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HELD_OUT = {}


def model(function):
    HELD_OUT[function.__name__] = function
    return function


def classes(net, x, y):
    return net, (x, y), lambda m, b: F.cross_entropy(m(b[0]).float(), b[1])


class Gru(nn.Module):
    """A GRU cell of linear layers, unrolled."""

    def __init__(self, width=24):
        super().__init__()
        self.x, self.h, self.head, self.width = (
            nn.Linear(12, 3 * width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, 6),
            width,
        )

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.width)
        for t in range(x.shape[1]):
            (a, b, c), (d, e, f) = self.x(x[:, t]).chunk(3, -1), self.h(h).chunk(3, -1)
            z, n = torch.sigmoid(b + e), torch.tanh(c + torch.sigmoid(a + d) * f)
            h = (1 - z) * n + z * h
        return self.head(h)


@model
def gru_loop():
    return classes(Gru(), torch.randn(6, 14, 12), torch.randint(0, 6, (6,)))


class Rnn(nn.Module):
    """A plain recurrent net, a loss at every step."""

    def __init__(self, width=20):
        super().__init__()
        self.inp, self.rec, self.out, self.width = (
            nn.Linear(8, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 3),
            width,
        )

    def forward(self, x):
        h, out = torch.zeros(x.shape[0], self.width), []
        for t in range(x.shape[1]):
            h = torch.relu(self.inp(x[:, t]) + self.rec(h))
            out.append(self.out(h))
        return torch.cat(out)


@model
def rnn_relu_every_step():
    return classes(Rnn(), torch.randn(5, 16, 8), torch.randint(0, 3, (80,)))


class Gated(nn.Module):
    """A language model of two minimal gated layers over an embedding (torch's own LSTM has no FP16 kernel on CPU)."""

    def __init__(self, vocabulary=60, width=20):
        super().__init__()
        self.embed, self.head, self.width = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary), width
        self.gates = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(2))

    def forward(self, ids):
        xs = list(self.embed(ids).unbind(1))
        for gate in self.gates:
            h, out = torch.zeros(len(ids), self.width), []
            for x in xs:
                keep, new = gate(torch.cat([x, h.to(x.dtype)], -1)).chunk(2, -1)
                h = h + torch.sigmoid(keep) * (torch.tanh(new) - h)
                out.append(h)
            xs = out
        return self.head(torch.cat(xs))


@model
def gated_language_model():
    ids = torch.randint(0, 60, (4, 12))
    return classes(Gated(), ids, ids.roll(-1, 1).T.flatten())


@model
def temporal_conv1d():
    net = nn.Sequential(
        nn.Conv1d(4, 16, 3, padding=2, dilation=2), nn.GELU(), nn.Conv1d(16, 16, 3, padding=4, dilation=4), nn.GELU(),
        nn.Conv1d(16, 16, 3, groups=4), nn.SiLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return classes(net, torch.randn(8, 4, 24), torch.randint(0, 5, (8,)))


@model
def conv_transpose_decoder():
    net = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 2, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 2, stride=2), nn.Sigmoid(),
    )  # fmt: skip
    return net, (torch.randn(6, 8), torch.rand(6, 3, 8, 8)), lambda m, b: F.mse_loss(m(b[0]).float(), b[1])


class Vit(nn.Module):
    """Patches, a class token, learned positions, pre-norm blocks."""

    def __init__(self, width=32):
        super().__init__()
        self.patch, self.token, self.place = (
            nn.Conv2d(3, width, 4, 4),
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.randn(1, 10, width) * 0.02),
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


@model
def vision_transformer():
    return classes(Vit(), torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,)))


class Mix(nn.Module):
    """One MLP-mixer block."""

    def __init__(self, tokens, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@model
def mlp_mixer():
    net = nn.Sequential(nn.Linear(12, 24), Mix(9, 24), Mix(9, 24), nn.LayerNorm(24), Mean(), nn.Linear(24, 10))
    return classes(net, torch.randn(6, 9, 12), torch.randint(0, 10, (6,)))


class Gcn(nn.Module):
    """Graph convolutions: messages summed with index_add."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 32), nn.Linear(32, 32), nn.Linear(32, 4)])

    def forward(self, graph):
        x, source, target = graph
        for i, layer in enumerate(self.layers):
            message = layer(x)[source]
            x = torch.zeros(len(x), message.shape[1]).index_add(0, target, message.float()) / 4
            x = torch.relu(x) if i < 2 else x
        return x


@model
def graph_convolution():
    """Few nodes have labels."""
    source, target = torch.randint(0, 60, (240,)), torch.randint(0, 60, (240,))
    graph, y = (torch.randn(60, 20), source, target), torch.randint(0, 4, (60,))
    return Gcn(), (graph, y), lambda m, b: F.cross_entropy(m(b[0]).float()[:10], b[1][:10])


class Experts(nn.Module):
    """Top-1 routing: experts that nobody chose have a gradient of zeros or none."""

    def __init__(self, width=16, experts=6):
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(10, width), nn.Linear(width, experts), nn.Linear(width, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(experts)
        )

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        weight = torch.softmax(self.gate(x).float(), -1)
        best = weight.argmax(-1, keepdim=True)
        mask = torch.zeros_like(weight).scatter(1, best, 1.0) * weight
        return self.out(x + sum(mask[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)))


@model
def mixture_of_experts():
    return classes(Experts(), torch.randn(12, 10), torch.randint(0, 5, (12,)))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 16))
        self.right = nn.Sequential(nn.Linear(30, 48), nn.GELU(), nn.Linear(48, 16))
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, pair):
        a, b = (F.normalize(t(x), dim=-1) for t, x in zip((self.left, self.right), pair, strict=True))
        return a @ b.T * self.heat.exp()


@model
def contrastive_towers():
    pair, y = (torch.randn(16, 20), torch.randn(16, 30)), torch.arange(16)

    def loss(m, b):
        scores = m(b[0]).float()
        return (F.cross_entropy(scores, b[1]) + F.cross_entropy(scores.T, b[1])) / 2

    return Towers(), (pair, y), loss


class Unet(nn.Module):
    """One level down, one skip connection; GroupNorm, SiLU."""

    def __init__(self, width=8):
        super().__init__()
        self.down, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width)
        self.deep, self.deep_norm = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width)
        self.up, self.last = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        a = F.silu(self.norm(self.down(x)))
        b = F.silu(self.deep_norm(self.deep(a)))
        return self.last(torch.cat([a, self.up(b)], 1))


@model
def unet_groupnorm():
    return (
        Unet(),
        (torch.randn(4, 1, 8, 8), (torch.rand(4, 1, 8, 8) < 0.2).float()),
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).float(), b[1]),
    )


@model
def weight_and_spectral_norm():
    weight, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    net = nn.Sequential(
        weight(nn.Linear(20, 40)), nn.SiLU(), spectral(nn.Linear(40, 40)), nn.Tanh(), weight(nn.Linear(40, 6))
    )
    return classes(net, torch.randn(16, 20), torch.randint(0, 6, (16,)))


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = nn.EmbeddingBag(400, 24, mode="mean"), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, ids):
        return self.head(F.leaky_relu(self.mix(self.words(ids))))


@model
def embedding_bag():
    return classes(BagOfWords(), torch.randint(0, 400, (10, 7)), torch.randint(0, 3, (10,)))


class Tied(nn.Module):
    """An autoregressive language model whose output layer is its embedding."""

    def __init__(self, vocabulary=90, width=24):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 3, 48, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids):
        n = ids.shape[1]
        x = self.embed(ids) + self.place(torch.arange(n))
        mask = torch.triu(torch.full((n, n), float("-inf")), 1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.linear(x, self.embed.weight).flatten(0, 1)


@model
def tied_language_model():
    """Half of the targets are padding that the loss ignores."""
    ids = torch.randint(0, 90, (4, 12))
    y = ids.roll(-1, 1).clone()
    y[:, 6:] = -100
    return Tied(), (ids, y.flatten()), lambda m, b: F.cross_entropy(m(b[0]).float(), b[1], ignore_index=-100)


class Heads(nn.Module):
    """A frozen part, two heads, one of them with a hundredth of the weight."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trunk = (
            nn.Linear(16, 32),
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()),
        )
        self.classify, self.place = nn.Linear(32, 7), nn.Linear(32, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.trunk(torch.relu(self.frozen(x)))
        return self.classify(x), self.place(x)


@model
def two_heads_partly_frozen():
    def loss(m, b):
        a, c = m(b[0])
        return F.cross_entropy(a.float(), b[1]) + 0.01 * F.smooth_l1_loss(c.float(), b[2])

    return Heads(), (torch.randn(20, 16), torch.randint(0, 7, (20,)), torch.randn(20, 2)), loss


@model
def dropout_mlp():
    net = nn.Sequential(
        nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)
    )
    return classes(net, torch.randn(6, 24), torch.randint(0, 4, (6,)))


class Skipping(nn.Module):
    """Residual blocks, each left out at random: its parameters then have a gradient of zeros."""

    def __init__(self, width=24, depth=5):
        super().__init__()
        self.inp, self.head = nn.Linear(12, width), nn.Linear(width, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.SiLU(), nn.Linear(48, width))
            for _ in range(depth)
        )

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x) * (torch.rand(()) < 0.6).float()
        return self.head(x)


@model
def stochastic_depth():
    return classes(Skipping(), torch.randn(10, 12), torch.randint(0, 6, (10,)))


@model
def gan_pair():
    net = nn.ModuleDict({
        "G": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh()),
        "D": nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    })  # fmt: skip

    def loss(m, b):
        fake = m["G"](b[0])
        judge = lambda x, y: F.binary_cross_entropy_with_logits(m["D"](x).float(), torch.full((len(x), 1), y))  # noqa: E731
        return judge(b[1], 1.0) + judge(fake.detach(), 0.0) + judge(fake, 1.0)

    return net, (torch.randn(12, 8), torch.randn(12, 16)), loss


class Translate(nn.Module):
    """Cross-attention over padded sources."""

    def __init__(self, width=24):
        super().__init__()
        self.source, self.target = nn.Embedding(70, width, padding_idx=0), nn.Embedding(50, width)
        self.own, self.cross = (
            nn.MultiheadAttention(width, 4, batch_first=True),
            nn.MultiheadAttention(width, 4, batch_first=True),
        )
        self.first, self.second, self.head = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, pair):
        source, target = pair
        x, memory, n = self.target(target), self.source(source), target.shape[1]
        causal = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
        x = self.first(x + self.own(x, x, x, attn_mask=causal, need_weights=False)[0])
        x = self.second(x + self.cross(x, memory, memory, key_padding_mask=source == 0, need_weights=False)[0])
        return self.head(x).flatten(0, 1)


@model
def masked_cross_attention():
    source = torch.randint(1, 70, (4, 9))
    source[:, 5:] = 0
    return classes(Translate(), (source, torch.randint(0, 50, (4, 7))), torch.randint(0, 50, (28,)))


class Points(nn.Module):
    """A net on sets: features by maximum, so that few points carry gradients."""

    def __init__(self):
        super().__init__()
        self.point, self.head = (
            nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64)),
            nn.Sequential(nn.Linear(64, 32), nn.ELU(), nn.Linear(32, 4)),
        )

    def forward(self, x):
        return self.head(self.point(x).amax(1))


@model
def point_set_maximum():
    return classes(Points(), torch.randn(6, 20, 3), torch.randint(0, 4, (6,)))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.mean, self.spread = (
            nn.Sequential(nn.Linear(40, 32), nn.Softplus()),
            nn.Linear(32, 6),
            nn.Linear(32, 6),
        )
        self.decode = nn.Sequential(nn.Linear(6, 32), nn.Softplus(), nn.Linear(32, 40))

    def forward(self, x):
        h = self.encode(x)
        mean, spread = self.mean(h).float(), self.spread(h).float()
        return self.decode(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


@model
def variational_autoencoder():
    def loss(m, x):
        out, mean, spread = m(x)
        return F.mse_loss(out.float(), x) - 5e-4 * (1 + spread - mean**2 - spread.exp()).mean()

    return Vae(), torch.rand(16, 40), loss


@model
def triplets():
    """Most margins are met: those triplets carry no gradient."""
    net = nn.Sequential(nn.Linear(24, 64), nn.Hardswish(), nn.Linear(64, 64), nn.Hardswish(), nn.Linear(64, 16))
    near = torch.randn(24, 24)

    def loss(m, b):
        return F.triplet_margin_loss(*(m(x).float() for x in b), margin=0.2)

    return net, (near, near + 0.1 * torch.randn(24, 24), torch.randn(24, 24)), loss


@model
def grouped_conv_residual():
    class Block(nn.Module):
        def __init__(self, width=12):
            super().__init__()
            self.depth, self.point, self.norm = (
                nn.Conv2d(width, width, 3, padding=1, groups=width),
                nn.Conv2d(width, width, 1, bias=False),
                nn.BatchNorm2d(width),
            )

        def forward(self, x):
            return x + F.relu6(self.norm(self.point(self.depth(x))))

    net = nn.Sequential(nn.Conv2d(2, 12, 3), Block(), Block(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    return classes(net, torch.randn(3, 2, 8, 8), torch.randint(0, 4, (3,)))
