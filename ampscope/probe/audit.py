"""`ampscope.audit`: one batch, differentiated in FP32 and under autocast at several loss scales, compared element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ampscope.errors import AmpscopeError
from ampscope.probe import names
from ampscope.probe.objective import loss_of

Array = np.ndarray[Any, np.dtype[np.float64]]
DEFAULT_SCALES = tuple(2.0**k for k in (0, 4, 8, 12, 16))


@dataclass(frozen=True)
class Audit:
    """What one batch loses at each scale. Arrays are float64 [S, L]: scales × layers; shares of the layer's elements, 0..1.

    `flushed`: zero under autocast, non-zero in FP32. `subnormal`: 0 < |g_s| < the format's smallest normal (fewer bits survive).
    `overflowed`: inf or NaN under autocast. All three are NaN where the loss does not use the layer. `error`: ‖g_half/S − g_fp32‖ / ‖g_fp32‖ (L2; NaN where either is not finite or FP32's is zero).
    """

    layers: tuple[str, ...]
    scales: tuple[float, ...]
    dtype: str
    loss: float
    flushed: Array
    subnormal: Array
    overflowed: Array
    error: Array

    def __str__(self) -> str:
        """Return a table: a row a layer, for each scale the flushed share, `inf` where it overflows, and the error."""
        width = max([len(n) for n in self.layers] + [5])
        width = min(width, 36)
        head = f"{'layer':{width}s}" + "".join(f"  S={_power(s):>8s}" for s in self.scales)
        lines = [
            f"flushed to zero in {self.dtype} (and relative error of the gradient), one batch, loss {self.loss:.4g}",
            head,
        ]
        for i, name in enumerate(self.layers):
            cells = []
            for s in range(len(self.scales)):
                if np.isnan(self.flushed[s, i]):
                    cells.append("         -")
                elif self.overflowed[s, i] > 0:
                    cells.append("       inf")
                else:
                    error = self.error[s, i]
                    tail = f"({error:.0e})" if np.isfinite(error) else ""
                    cells.append(f"{self.flushed[s, i]:.0%}{tail}".rjust(10))
            shown = name if len(name) <= width else "…" + name[-width + 1 :]
            lines.append(f"{shown:{width}s}  " + "  ".join(cells))
        best = self.best_scale()
        lines.append(
            f"best of these scales: {_power(best)}"
            if best is not None
            else "no scale fits every layer without overflow"
        )
        return "\n".join(lines)

    def best_scale(self) -> float | None:
        """Return the scale without overflow that flushes least (the smallest of equals), or None."""
        clean = [s for s in range(len(self.scales)) if not (self.overflowed[s] > 0).any()]
        if not clean:
            return None
        return self.scales[min(clean, key=lambda s: (round(float(np.nansum(self.flushed[s])), 6), self.scales[s]))]

    def figure(self) -> Any:
        """Return a Plotly figure: flushed share by layer and scale, overflow marked.

        Raises:
            AmpscopeError: Plotly is not installed.
        """
        try:
            import plotly.graph_objects as go
        except ImportError:
            raise AmpscopeError("Audit.figure() needs plotly: pip install plotly") from None
        over = self.overflowed.T > 0
        text = np.array([[_cell(x) for x in row] for row in self.flushed.T], object)
        text = np.where(over, "inf", text)
        figure = go.Figure(
            go.Heatmap(z=self.flushed.T.tolist(), x=[_power(s) for s in self.scales], y=list(self.layers), zmin=0, zmax=1, colorscale="Cividis",
                       text=text.tolist(), texttemplate="%{text}", colorbar={"title": "flushed"})
        )  # fmt: skip
        figure.update_layout(
            title=f"Which gradients does {self.dtype} flush to zero, at which loss scale?",
            xaxis_title="loss scale",
            yaxis={"autorange": "reversed"},
        )
        return figure


def _cell(share: float) -> str:
    return "" if np.isnan(share) else f"{share:.0%}"


def _power(x: float) -> str:
    k = np.log2(x) if x > 0 else np.nan
    return f"2^{round(float(k))}" if k == round(float(k)) else f"{x:g}"


def audit(
    model: torch.nn.Module | Sequence[torch.nn.Module] | dict[str, torch.nn.Module],
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    scales: Sequence[float] = DEFAULT_SCALES,
    dtype: torch.dtype = torch.float16,
) -> Audit:
    """Compare the gradients of one batch under autocast, at each loss scale, with those of FP32. The model is left as it was.

    FP32's are taken with weights rounded to `dtype`: what a weight loses on the cast is another fault (`parameter-underflow-on-cast`).
    Gradients, buffers, random state and training mode are restored; every pass sees the same random numbers.

    Args:
        model: what is differentiated; all parameters that require a gradient are compared.
        loss_fn: called as `loss_fn(model, batch)`, with one argument as `loss_fn(batch)`; a module or function of `torch.nn` is
            called as `loss_fn(model(inputs), target)`. Returns a scalar loss of shape [] (forward and loss both run under autocast).
        batch: handed to `loss_fn`.
        scales: loss scales to try, positive.
        dtype: torch.float16 or torch.bfloat16.

    Raises:
        AmpscopeError: no scale, a scale that is not positive, another dtype, or a loss that is not a scalar that requires a gradient.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise AmpscopeError(f"audit(): dtype must be torch.float16 or torch.bfloat16, not {dtype}")
    if not scales or not all(float(s) > 0 for s in scales):
        raise AmpscopeError(f"audit(): scales must be positive numbers, not {scales!r}")
    models = names.as_models(model)
    pairs = [(n, p) for n, p in names.collect(models) if p.requires_grad]
    if not pairs:
        raise AmpscopeError("audit(): the model has no parameter that requires a gradient")
    layers = [n for n, _ in pairs]
    params = [p for _, p in pairs]
    device = params[0].device.type
    shape = (len(scales), len(layers))
    flushed, subnormal, overflowed, error = (np.full(shape, np.nan) for _ in range(4))
    tiny = torch.finfo(dtype).tiny
    with _Kept(models), _Rounded(params, dtype):
        loss, truth = _gradients(model, loss_fn, batch, params, 1.0, None, device)
    for s, scale in enumerate(scales):
        with _Kept(models):
            _, grads = _gradients(model, loss_fn, batch, params, float(scale), dtype, device)
        for i, (g, t) in enumerate(zip(grads, truth, strict=True)):
            if g is None or t is None or not g.size:
                continue
            size = np.abs(g)
            finite = np.isfinite(g)
            flushed[s, i] = ((g == 0) & (t != 0)).mean()
            subnormal[s, i] = ((size > 0) & (size < tiny)).mean()
            overflowed[s, i] = (~finite).mean()
            norm = float(np.linalg.norm(t))
            if finite.all() and norm > 0 and np.isfinite(norm):
                error[s, i] = float(np.linalg.norm(g / float(scale) - t)) / norm
    kind = "FP16" if dtype is torch.float16 else "BF16"
    return Audit(tuple(layers), tuple(float(s) for s in scales), kind, loss, flushed, subnormal, overflowed, error)


def _gradients(
    model: Any,
    loss_fn: Any,
    batch: Any,
    params: list[torch.Tensor],
    scale: float,
    dtype: torch.dtype | None,
    device: str,
) -> tuple[float, list[Array | None]]:
    outer = torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    with outer, _InnerAutocast(dtype), torch.enable_grad():
        loss = loss_of(loss_fn, model, batch)
    grads = torch.autograd.grad(loss, params, torch.full_like(loss, scale, dtype=loss.dtype), allow_unused=True)
    out: list[Array | None] = []
    found: list[torch.Tensor | None] = list(grads)  # None where unused, whatever the stubs say
    for g in found:
        if g is None:
            out.append(None)
            continue
        dense = g.to_dense() if g.layout is not torch.strided else g
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        out.append(real.detach().double().cpu().numpy())
    return float(loss.detach().double()), out


class _InnerAutocast:
    """Autocast that the model or `loss_fn` enters itself has this dtype too, and with None is off: else nothing would be FP32 in it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        dtype, enter = self._dtype, torch.autocast.__enter__
        self._original = enter

        def entered(inner: Any) -> Any:
            found = enter(inner)  # type: ignore[no-untyped-call]  # its __exit__ restores what was before, whatever is set now
            if torch.is_autocast_enabled(inner.device):
                if dtype is None:
                    torch.set_autocast_enabled(inner.device, False)
                else:
                    torch.set_autocast_dtype(inner.device, dtype)
            return found

        torch.autocast.__enter__ = entered  # type: ignore[method-assign]

    def __exit__(self, *exc: object) -> None:
        torch.autocast.__enter__ = self._original  # type: ignore[method-assign]


class _Kept:
    """Buffers and random state come back as they were."""

    def __init__(self, models: dict[str, torch.nn.Module]) -> None:
        self._buffers = [b for root in models.values() for b in root.buffers()]
        self._cuda = any(p.device.type == "cuda" for root in models.values() for p in root.parameters())

    def __enter__(self) -> None:
        self._values = [b.detach().clone() for b in self._buffers]
        self._random = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if self._cuda else []

    def __exit__(self, *exc: object) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._devices)


class _Rounded:
    """FP32 parameters hold the values that autocast would compute with."""

    def __init__(self, params: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._params, self._dtype = [p for p in params if p.dtype is torch.float32], dtype

    def __enter__(self) -> None:
        self._values = [p.detach().clone() for p in self._params]
        with torch.no_grad():
            for p in self._params:
                p.copy_(p.to(self._dtype))

    def __exit__(self, *exc: object) -> None:
        with torch.no_grad():
            for p, value in zip(self._params, self._values, strict=True):
                p.copy_(value)
