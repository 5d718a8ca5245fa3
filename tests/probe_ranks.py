"""Run by test_underflow_ranks.py under torchrun: the underflow probe in two processes. Argument: the log folder."""

import contextlib
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampscope

WEIGHT = 1e-6
"""Of the loss: small enough that a good share is flushed at scale 4."""


class Net(nn.Module):
    """Two blocks, the first under non-reentrant checkpointing if asked; a branch that is used in even steps only."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.head, self.extra = (
            nn.Sequential(nn.Linear(16, 32), nn.Tanh()),
            nn.Linear(32, 4),
            nn.Linear(32, 4),
        )
        self.checkpointed = checkpointed

    def forward(self, x, extra=True):
        """Predict."""
        h = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        return self.head(h) + (self.extra(h) if extra else 0)


def batch(step):
    """Return this rank's images of a step."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))


def train(folder, name, *, watched, micro=1, some_unused=False, checkpointed=False, wrap=None, steps=4, **ddp):
    """Train under DDP (or what `wrap` makes); return the parameters."""
    torch.manual_seed(0)
    plain = Net(checkpointed)
    model = wrap(plain) if wrap else nn.parallel.DistributedDataParallel(plain, **ddp)
    opt = torch.optim.SGD(model.parameters(), lr=1e4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if watched:
        ampscope.watch(scaler, model, log_dir=folder, run=name, probe_every=1, tensorboard=False)
    for step in range(steps):
        opt.zero_grad()
        for i in range(micro):
            last = i == micro - 1
            with contextlib.nullcontext() if last or wrap else model.no_sync():
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = (
                        model(batch(step * micro + i), extra=not (some_unused and step % 2)).float().pow(2).mean()
                        * WEIGHT
                    )
                scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def same(folder, name, **kwargs):
    """Train unwatched and watched; the parameters are equal bit for bit."""
    want, got = train(folder, name, watched=False, **kwargs), train(folder, name, watched=True, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), name


def exact(folder):
    """The first step's shares are those of FP32 gradients averaged over ranks."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half())
    (model(batch(0)).pow(2).mean() * WEIGHT).backward()
    truth = []
    for p in model.parameters():
        dist.all_reduce(p.grad)
        truth.append(p.grad / 2)
    torch.manual_seed(0)
    half = nn.parallel.DistributedDataParallel(Net())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = half(batch(0)).float().pow(2).mean() * WEIGHT
    (loss * 4.0).backward()
    shares = [float(((p.grad == 0) & (t != 0)).float().mean()) for p, t in zip(half.parameters(), truth, strict=True)]
    if dist.get_rank() == 0:
        Path(folder, "truth.txt").write_text(" ".join(map(repr, shares)), encoding="utf-8")


def sharded(folder):
    """FSDP2: said once, and off."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def wrap(model):
        fully_shard(model, mesh=mesh)
        return model

    want = train(folder, "fsdp2", watched=False, wrap=wrap)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = train(folder, "fsdp2", watched=True, wrap=wrap)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    said = [str(w.message) for w in caught if "underflow probe is off" in str(w.message)]
    assert len(said) == 1, said
    assert "FSDP" in said[0]


def main():
    """Run all."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message=".*ampscope.*")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = sys.argv[1]
    exact(folder)
    same(folder, "plain")
    same(folder, "no_sync", micro=3)
    same(folder, "unused", some_unused=True, find_unused_parameters=True)
    same(folder, "static", static_graph=True)
    same(folder, "checkpointed", checkpointed=True)
    same(folder, "view", gradient_as_bucket_view=True)
    sharded(folder)
    dist.barrier()
    dist.destroy_process_group()


main()
