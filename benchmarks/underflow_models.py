"""Small models for benchmarks/underflow_accuracy.py: `MODELS[name]() -> (model, batch, loss_fn)`; linear layers mostly, FP16 convolutions are slow on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

MODELS = {}


def model(function):
    MODELS[function.__name__] = function
    return function


def classes(model, x, y):
    return model, (x, y), lambda m, b: F.cross_entropy(m(b[0]).float(), b[1])


@model
def mlp():
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return classes(net, torch.randn(32, 32), torch.randint(0, 10, (32,)))


@model
def relu_mlp_dead():
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        net[0].bias[:24] = -20.0
        net[2].bias[::3] = -20.0
    return classes(net, torch.randn(32, 32), torch.randint(0, 10, (32,)))


@model
def cnn():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 10)
    )  # fmt: skip
    x = torch.randn(4, 3, 12, 12)
    net(x)
    return classes(net, x, torch.randint(0, 10, (4,)))


@model
def deep_cnn_batchnorm():
    layers = []
    width = 3
    for _ in range(6):
        layers += [nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        width = 8
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return classes(net, torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))


class Tiny(nn.Module):
    def __init__(self, vocabulary=200, width=32, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


@model
def transformer():
    ids = torch.randint(0, 200, (4, 12))
    return classes(Tiny(), ids, ids.flatten().roll(1))


class Cell(nn.Module):
    """An LSTM written with linear layers, so that it runs in FP16 on CPU."""

    def __init__(self, width=32):
        super().__init__()
        self.inp, self.rec, self.head, self.width = (
            nn.Linear(16, 4 * width),
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(width, 5),
            width,
        )

    def forward(self, x):
        h = c = torch.zeros(x.shape[0], self.width)
        for t in range(x.shape[1]):
            i, f, g, o = (self.inp(x[:, t]) + self.rec(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h)


@model
def lstm_like():
    return classes(Cell(), torch.randn(8, 10, 16), torch.randint(0, 5, (8,)))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items, self.mix, self.head = (
            nn.Embedding(500, 16),
            nn.Embedding(300, 16),
            nn.Linear(32, 32),
            nn.Linear(32, 1),
        )

    def forward(self, pair):
        x = torch.cat([self.users(pair[:, 0]), self.items(pair[:, 1])], -1)
        return self.head(torch.relu(self.mix(x))).squeeze(-1)


@model
def embedding_heavy():
    pairs = torch.stack([torch.randint(0, 500, (64,)), torch.randint(0, 300, (64,))], 1)
    return Bag(), (pairs, torch.rand(64)), lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).float(), b[1])


class Lora(nn.Module):
    def __init__(self, inner, out, rank=4):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(inner, out),
            nn.Linear(inner, rank, bias=False),
            nn.Linear(rank, out, bias=False),
        )
        self.base.requires_grad_(False)
        nn.init.normal_(self.b.weight, std=0.01)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@model
def lora():
    net = nn.Sequential(Lora(32, 64), nn.GELU(), Lora(64, 64), nn.GELU(), Lora(64, 8))
    nn.init.zeros_(net[4].b.weight)
    return classes(net, torch.randn(16, 32), torch.randint(0, 8, (16,)))


@model
def deep_narrow():
    net = nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(24, 24), nn.Tanh())], nn.Linear(24, 1))
    for m in net:
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.06)
    x = torch.randn(64, 24)
    return net, (x, x.sum(1)), lambda m, b: F.mse_loss(m(b[0]).float().squeeze(-1), b[1])


class Residual(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@model
def residual_mlp():
    net = nn.Sequential(nn.Linear(16, 32), *[Residual() for _ in range(4)], nn.LayerNorm(32), nn.Linear(32, 100))
    return classes(net, torch.randn(16, 16), torch.randint(0, 100, (16,)))


@model
def sparse_features():
    """Inputs that are mostly zero: whole columns of the first weight's gradient are natural zeros."""
    net = nn.Sequential(nn.Linear(200, 32), nn.ReLU(), nn.Linear(32, 2))
    x = torch.randn(8, 200) * (torch.rand(8, 200) < 0.02)
    return classes(net, x, torch.randint(0, 2, (8,)))


@model
def autoencoder():
    net = nn.Sequential(
        nn.Linear(64, 16),
        nn.Sigmoid(),
        nn.Linear(16, 4),
        nn.Sigmoid(),
        nn.Linear(4, 16),
        nn.Sigmoid(),
        nn.Linear(16, 64),
    )
    x = torch.rand(32, 64)
    return net, (x, x), lambda m, b: F.mse_loss(m(b[0]).float(), b[1])
