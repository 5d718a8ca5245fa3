"""ResNet-18 with Adam, first in FP32, then with AMP: same data, same seed, both watched.

    python examples/resnet18.py [--steps 50] [--log-dir logs]

Prints both step times, the speed-up, the peak memory and the run folders. The AMP run is then saved (model, optimizer, scaler), rebuilt
from the checkpoint as after a restart, and goes on in the same run. The data are scikit-learn's digits, enlarged. On CUDA: batches of
128 at 224 x 224, 50 steps. On a CPU: batches of 4 at 32 x 32 and a handful of steps, since most CPUs compute FP16 convolutions slowly.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torchvision.models import resnet18

import ampscope


def batches(steps, batch, size, device, start=0):
    """Yield the same batches at each call: (images [batch, 3, size, size], labels [batch])."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    for step in range(start, start + steps):
        pick = torch.randint(0, len(labels), (batch,), generator=torch.Generator().manual_seed(step))
        x = F.interpolate(images[pick].to(device), size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
        yield x.contiguous(), labels[pick].to(device)


def build(amp, device):
    """Return model, optimizer and scaler; the scaler is switched off for FP32, so that one loop serves both."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # On a CPU a handful of steps is too few to come down from 65536, where this model begins to overflow.
    init_scale = 2.0**16 if device == "cuda" else 2.0**8
    return model, optimizer, torch.amp.GradScaler(device, init_scale=init_scale, enabled=amp)


def train(model, optimizer, scaler, data, device):
    """Train; return the seconds of each step."""
    seconds = []
    for images, labels in data:
        wait(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=scaler.is_enabled()):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        wait(device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def wait(device):
    """Let CUDA finish, so that the clock is right."""
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    """Train twice, compare, save, restore."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50 if device == "cuda" else 3)
    parser.add_argument("--log-dir", default="logs")
    args = parser.parse_args()
    batch, size = (128, 224) if device == "cuda" else (4, 32)
    if device == "cpu":
        print("No CUDA device: a few small steps on the CPU. FP16 is slow there, so AMP will not look good.")

    began = time.strftime("%Y-%m-%d_%H-%M-%S")
    median, memory, folders = {}, {}, {}
    for name in ("FP32", "AMP"):
        model, optimizer, scaler = build(name == "AMP", device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = f"resnet18-{name.lower()}-{began}"
        with ampscope.watch(scaler, model, log_dir=args.log_dir, run=run):
            folders[name] = ampscope.handle(scaler).run_dir
            seconds = train(model, optimizer, scaler, batches(args.steps, batch, size, device), device)
        median[name] = sorted(seconds)[len(seconds) // 2]
        memory[name] = (
            f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device == "cuda" else "not measured on a CPU"
        )
        print(f"{name:4}  {median[name] * 1e3:8.1f} ms a step   peak memory {memory[name]}   run {folders[name]}")

    ratio = median["FP32"] / median["AMP"]
    print(f"AMP is {ratio:.2f}x faster" if ratio >= 1 else f"AMP is {1 / ratio:.2f}x slower")

    # A restart: everything is saved, built anew and loaded. Without the scaler's state the loss scale would begin anew.
    checkpoint = folders["AMP"] / "checkpoint.pt"
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, checkpoint
    )
    state = torch.load(checkpoint, map_location=device)
    model, optimizer, scaler = build(True, device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    with ampscope.watch(scaler, model, log_dir=args.log_dir, run=folders["AMP"].name):
        first = ampscope.handle(scaler).step
        train(model, optimizer, scaler, batches(1, batch, size, device, start=args.steps), device)
    print(f"restored from {checkpoint}, went on at step {first} with loss scale {state['scaler']['scale']:g}")
    print(f"\nNext: ampscope compare {folders['FP32']} {folders['AMP']}")


if __name__ == "__main__":
    main()
