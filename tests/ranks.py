"""Run by test_watch_ranks.py under torchrun: several processes of one launch share run folders. Argument: the log folder."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import ampscope
from tests.loops import batch, forward, net


def train(model, scaler, steps=6, spike=None):
    """Train on this rank's batches; `spike` overflows on rank 1 alone."""
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        opt.zero_grad()
        x, y = batch(step * 2 + dist.get_rank())
        if step == spike and dist.get_rank() == 1:
            y = y + 1e7
        scaler.scale(forward(model, x, y)).backward()
        scaler.step(opt)
        scaler.update()
    return [p.detach().clone() for p in model.parameters()]


def replicated(folder):
    """DDP: watched and unwatched parameters are equal; two watches in one launch have a folder each."""
    want = train(nn.parallel.DistributedDataParallel(net()), torch.amp.GradScaler("cpu", init_scale=2.0**10), spike=3)
    model = nn.parallel.DistributedDataParallel(net())
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2))
    ampscope.watch(scaler, model, log_dir=folder, tensorboard=dist.get_rank() == 0)
    ampscope.watch(other, net(1), log_dir=folder, tensorboard=False)
    got = train(model, scaler, spike=3)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    print("FOLDER", ampscope.handle(scaler).run_dir.name, ampscope.handle(other).run_dir.name, flush=True)
    ampscope.unwatch(scaler)
    ampscope.unwatch(other)


def sharded(folder):
    """FSDP and its ShardedGradScaler, under a name of the user's."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def run(watched):
        model = FullyShardedDataParallel(
            net(), use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.FULL_SHARD
        )
        scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10)
        if watched:
            ampscope.watch(scaler, model, log_dir=folder, run="fsdp", tensorboard=False)
        out = train(model, scaler, 4)
        ampscope.unwatch(scaler)
        return out

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def main():
    """Run both."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", message=".*ampscope.*")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    replicated(sys.argv[1])
    dist.barrier()
    sharded(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


main()
