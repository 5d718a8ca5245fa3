"""Synthetic runs through the real writer's parts, without torch: for every test that needs a log.

`write_run` goes record by record through the real encoder and sink; `bulk_run` writes large runs straight as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampscope.log.arrows import ArrowSink
from ampscope.log.encode import encode
from ampscope.log.rundir import claim
from ampscope.log.schema import Header
from ampscope.log.tensorboard import make_sink
from ampscope.record.step import BINS, MEASURED, Event, Layer, LayerStats, StepRecord

START = 1_700_000_000.0


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float = 1.0) -> float:
        """Let time pass; return the time."""
        self.now += seconds
        return self.now


def make_layers(n: int, numel: int = 1024, optimizer: str = "Adam.0") -> list[Layer]:
    """Return n layers named like a stack of blocks: block.0.weight, block.0.bias, ..."""
    names = [f"block.{i // 2}.{'weight' if i % 2 == 0 else 'bias'}" for i in range(n)]
    return [Layer(name, (numel // 16, 16), numel, "float32", optimizer) for name in names]


def stats_of(grads: Sequence[Any]) -> LayerStats:
    """Return the statistics of gradients (arrays, or None for no gradient): slow, obvious, float64."""
    out = LayerStats.empty(len(grads))
    for i, grad in enumerate(grads):
        if grad is None:
            out.state[i] = 1
            continue
        g = np.asarray(grad, np.float32)
        flat = g.reshape(-1).astype(np.float64)
        finite = flat[np.isfinite(flat)]
        nonzero = np.abs(finite[finite != 0])
        out.state[i] = MEASURED
        out.zeros[i] = (finite == 0).sum()
        out.nan[i] = np.isnan(flat).sum()
        out.pos_inf[i], out.neg_inf[i] = (flat == np.inf).sum(), (flat == -np.inf).sum()
        out.max_abs[i] = np.abs(finite).max() if len(finite) else np.nan
        out.sum_squares[i] = (finite**2).sum()
        bits = np.abs(finite.astype(np.float32)).view(np.uint32)
        out.low_bits[i] = np.bitwise_or.reduce(bits & 0x7FFFFF) if len(bits) else 0
        rows = g.reshape(g.shape[0] if g.ndim else 1, -1)
        out.zero_rows[i], out.zero_cols[i] = (rows == 0).all(1).sum(), (rows == 0).all(0).sum()
        k = np.clip(np.frexp(nonzero)[1] - 1 + 127, 0, BINS - 1)
        out.exponents[i] = np.bincount(k, minlength=BINS)
        out.exact[i] = np.bincount(k[np.frexp(nonzero)[0] == 0.5], minlength=BINS)
    return out


def iter_records(
    n: int,
    layers: Sequence[Layer],
    *,
    first: int = 0,
    scale: float = 2.0**16,
    skip: Iterable[int] = (),
    nan: dict[int, int] | None = None,
    no_grad: dict[int, int] | None = None,
    every: int = 1,
    exponents_every: int = 10,
    growth_interval: int = 100,
    seed: int = 0,
    begin: float = START,
    spread: float = 1e-4,
    loss: float = 1.0,
) -> Iterator[StepRecord]:
    """Yield n records of FP16-born gradients of standard deviation `spread` (unscaled), from step `first` on.

    `skip` are steps that overflow (the last layer has an inf): they are skipped, and the scale halves. `nan` maps a step to
    the index of a layer that is all NaN (skipped as well), `no_grad` to one without a gradient.
    """
    rng = np.random.default_rng(seed)
    skip, nan, no_grad = set(skip), nan or {}, no_grad or {}
    tracker = 0
    for step in range(first, first + n):
        skipped = step in skip or step in nan
        scalars = {
            "loss": loss * float(np.exp(-step / 500.0)), "loss_scale": scale, "growth_tracker": float(tracker),
            "skipped": float(skipped), "micro_steps": 1.0, "lr": 1e-3, "step_seconds": 1.0, "overhead_seconds": 1e-3,
        }  # fmt: skip
        record = StepRecord(step, begin + (step - first), scalars, observed={"skipped/Adam.0": float(skipped)})
        if step % every == 0 or skipped:
            with np.errstate(over="ignore"):
                scaled = [rng.standard_normal(x.shape) * spread * scale for x in layers]
                grads: list[Any] = [g.astype(np.float16).astype(np.float32) for g in scaled]
            if step in skip:
                grads[-1].flat[0] = np.inf
            if step in nan:
                grads[nan[step]][:] = np.nan
            if step in no_grad:
                grads[no_grad[step]] = None
            record.layers = stats_of(grads)
            record.keep_exponents = step % exponents_every == 0 or skipped
        if step % exponents_every == 0:
            record.weight_norm = np.linspace(1.0, 2.0, len(layers))
        if skipped:
            culprit, told = layers[nan.get(step, -1)].name, {"optimizers": ["Adam.0"]}
            record.events.append(Event(step, "skip", layers=(culprit,), message="step skipped", data=told))
            change = {"from": scale, "to": scale / 2}
            record.events.append(Event(step, "backoff", message="loss scale halved", data=change))
            scale, tracker = scale / 2, 0
        else:
            tracker += 1
            if tracker == growth_interval:
                change = {"from": scale, "to": scale * 2}
                record.events.append(Event(step, "growth", message="loss scale doubled", data=change))
                scale, tracker = scale * 2, 0
        yield record


def records(n: int, layers: Sequence[Layer], **options: Any) -> list[StepRecord]:
    """Return the records of `iter_records` as a list."""
    return list(iter_records(n, layers, **options))


def write_run(
    log_dir: Path,
    layers: Sequence[Layer],
    rows: Iterable[StepRecord],
    *,
    name: str = "run",
    step: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    launch_key: str | None = None,
    tensorboard: bool = False,
    finish: bool = True,
    flush_every: int = 0,
    batch: int = 0,
    **header: Any,
) -> Path:
    """Write one session of one rank through the real sinks; return the run's folder.

    A run of that name goes on with the next session. `finish=False` leaves it as a killed process does (all rows on disk).
    `flush_every=k` flushes every k rows, as a slow run does; `batch=k` makes big batches of k rows.
    """
    found = claim(log_dir, name, rank=rank, world_size=world_size, launch_key=launch_key, step=step)
    scaler = {
        "enabled": True, "type": "GradScaler", "init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5,
        "growth_interval": 100, "growth_tracker": 0,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "session": found.session, "rank": rank, "world_size": world_size, "first_step": found.first_step, "scaler": scaler,
        "versions": {"ampscope": "0", "torch": "2.4.0"}, "created": START, "settings": {"every": 1, "exponents_every": 10},
    }  # fmt: skip
    head = Header(layers=list(layers), **(fields | header))
    sink = ArrowSink(found.path, head)
    sink.rows.big = batch or sink.rows.big
    events = make_sink(tensorboard, found.path, head, START)
    numel = np.array([x.numel for x in layers], np.int64)
    for i, record in enumerate(rows):
        row = encode(record, i, layers, numel)
        if events is not None:
            events.write(row)
        sink.write(row)
        if len(sink.rows) >= sink.rows.big or (flush_every and (i + 1) % flush_every == 0):
            sink.flush()
    sink.flush()
    if events is not None:
        events.close()
    if finish:
        sink.close()
    else:
        sink.abandon()
    found.release()
    return found.path


def bulk_run(
    log_dir: Path,
    n_steps: int,
    n_layers: int,
    *,
    name: str = "bulk",
    exponents_every: int = 10,
    bins: int = 12,
    numel: int = 65536,
    skip_every: int = 997,
    batch: int = 1000,
    finish: bool = True,
    seed: int = 0,
) -> Path:
    """Write a large run fast (100,000 steps × 200 layers in well under a minute): random columns straight into big batches."""
    layers = make_layers(n_layers, numel)
    found = claim(log_dir, name)
    scaler = {
        "enabled": True,
        "type": "GradScaler",
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    }
    head = Header(
        layers=layers,
        scaler=scaler,
        versions={"torch": "2.4.0"},
        created=START,
        settings={"every": 1, "exponents_every": exponents_every},
    )
    sink = ArrowSink(found.path, head)
    rng = np.random.default_rng(seed)
    base = rng.integers(100, 400, (batch, n_layers))
    norms = rng.random((batch, n_layers)) + 0.5
    bits = rng.integers(0, 1 << 10, (batch, n_layers)) << 13
    for start in range(0, n_steps, batch):
        steps = np.arange(start, min(start + batch, n_steps))
        n = len(steps)
        wave = 1 + 0.5 * np.sin(steps / 5000.0)[:, None]
        skipped = (steps % skip_every == skip_every - 1).astype(float)
        scale = 2.0 ** (16 - (steps // skip_every) % 3)
        chunk: dict[str, Any] = {
            "row": steps, "is_step": np.ones(n, bool), "step": steps, "time": START + steps * 0.1,
            "loss": np.exp(-steps / 20000.0), "loss_scale": scale, "growth_tracker": (steps % skip_every).astype(float),
            "skipped": skipped, "micro_steps": np.ones(n), "lr": np.full(n, 1e-3), "step_seconds": np.full(n, 0.1),
            "overhead_seconds": np.full(n, 1e-3), "grad_norm": 1 + 0.1 * np.sin(steps / 300.0),
            "headroom_bits": np.where(skipped > 0, -np.inf, 4.0), "underflow_ratio": np.full(n, 0.01),
            "zero_ratio": np.full(n, 0.02), "nonfinite_layers": skipped,
            "observed": (np.arange(n + 1), ["skipped/Adam.0"] * n, skipped),
            "state": np.full((n, n_layers), MEASURED), "zeros": base[:n], "subnormal": (base[:n] * wave).astype(np.int64),
            "pos_inf": np.zeros((n, n_layers), np.int64), "low_octave": base[:n] // 2, "lowest": base[:n] // 8,
            "below_grid": np.zeros((n, n_layers), np.int64),
            "below_unscaled": base[:n] * 3, "max_abs": norms[:n] * 100 * wave, "sum_squares": norms[:n] * 1e4 * wave,
            "low_bits": bits[:n], "zero_rows": np.zeros((n, n_layers)), "zero_cols": np.zeros((n, n_layers)),
            "median_bin": np.full((n, n_layers), 120), "has_histograms": steps % exponents_every == 0,
        }  # fmt: skip
        chunk["pos_inf"][skipped > 0, n_layers // 2] = 3
        kept = np.flatnonzero(steps % exponents_every == 0)
        width = np.zeros(n, np.int64)
        width[kept] = n_layers
        a = np.concatenate([[0], np.cumsum(width)])
        chunk["hist_layer"] = a, np.tile(np.arange(n_layers), len(kept))
        chunk["hist_first"] = a, np.full(len(kept) * n_layers, 112)
        chunk["hist_length"] = a, np.full(len(kept) * n_layers, bins)
        counts = rng.integers(0, numel // bins, (len(kept) * n_layers, bins)).reshape(-1)
        chunk["hist_counts"] = a * bins, counts
        chunk["hist_exact"] = a * bins, counts // 1024
        if skipped.any():
            chunk["events"] = [
                [{"step": int(s), "kind": "skip", "rank": 0, "phase": "backward", "layers": [layers[n_layers // 2].name], "op": "",
                  "where": "", "message": "step skipped", "data": "{}"}] if bad else []
                for s, bad in zip(steps, skipped, strict=True)
            ]  # fmt: skip
        sink.append(chunk)
    sink.close() if finish else sink.abandon()
    found.release()
    return found.path
