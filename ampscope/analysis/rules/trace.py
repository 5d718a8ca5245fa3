"""Rules on what the tracer found: the operation where non-finite values were born, forward or backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ampscope.analysis.rules.context import Facts, finding, listing, modules, power, span
from ampscope.analysis.finding import Finding
from ampscope.record.step import Event

ATTENTION_OPS = {"bmm", "baddbmm", "matmul", "mul", "div", "add", "einsum", "mm"}
REDUCTIONS = {"sum", "mean", "norm", "linalg_vector_norm", "nansum", "prod", "cumsum", "var", "std", "var_mean", "logsumexp"}
SINGULAR = {"div", "reciprocal", "rsqrt", "sqrt", "log", "log1p", "pow", "div_", "acos", "asin", "atanh"}
RSTD_LARGE = 1e3
"""1/σ beyond which a normalisation multiplies gradients by more than FP16's usual 11 bits of headroom (σ² + eps < 1e-6)."""
DEPTH_BITS = 5.0
"""log2 growth of gradients from the output to the input that makes depth the cause: 32-fold over the network."""
DEPTH_SKIPS = 3
"""Skips from which a growing gradient is more than calibration."""
FP16_MAX = 65504.0


def classify(e: Event) -> str:
    """Return the rule id a traced birth speaks for, from its own fields alone."""
    d = e.data
    if d.get("in_scale"):
        return "scaled-loss-overflows-fp16"
    if e.phase == "backward":
        return _backward(e, d)
    nan = d.get("kind_of_value") == "nan"
    if d.get("softmax") and nan and d.get("masked_rows"):
        return "forward-nan-softmax-all-masked"
    if "attention" in e.op and nan and d.get("masked_rows"):
        return "forward-nan-softmax-all-masked"
    if d.get("eps") is not None and (d.get("zero_divisor") or e.op.startswith("log")):
        return "eps-underflow-division"
    if d.get("cast") and d.get("from_input"):
        return "input-exceeds-fp16-range"
    if "attention" in e.op or (d.get("feeds_softmax") and e.op in ATTENTION_OPS and not d.get("parameter")):
        return "forward-overflow-attention"
    if (d.get("reduction") or e.op in REDUCTIONS) and not nan:
        return "forward-overflow-reduction"
    return "forward-overflow-activation"


def _backward(e: Event, d: Any) -> str:
    if d.get("custom_function"):
        return "backward-overflow-custom-function"
    rstd = d.get("rstd_max")
    node = str(d.get("autograd_node", "")) + str(d.get("producer", ""))
    if ("Norm" in node or "norm" in e.op) and "Vector" not in node and "VectorNorm" not in node and (rstd is None or rstd > RSTD_LARGE):
        return "backward-overflow-norm-eps"
    if d.get("zero_divisor") or d.get("kind_of_value") == "nan" or (e.op in SINGULAR and d.get("fp32_ok") is not True):
        return "backward-nan-finite-forward"
    return "backward-overflow"


def blamed(events: Iterable[Event]) -> tuple[str, ...]:
    """Return the modules of traced births, the most frequent first, each followed by the modules around it."""
    count: Counter[str] = Counter()
    around: dict[str, tuple[str, ...]] = {}
    for e in events:
        if e.layers:
            count[e.layers[0]] += 1
            around.setdefault(e.layers[0], e.layers)
    out: list[str] = [name for name, _ in count.most_common(3)]
    for name in list(out):
        out += [x for x in around[name][1:] if x not in out]
    return tuple(out[:8])


def place(e: Event) -> str:
    """Return where a birth happened, for people."""
    if e.layers:
        return e.layers[0]
    return "the model's own forward" if not e.data.get("in_loss", True) else "the loss function"


def magnitude(e: Event) -> str:
    """Return the sizes involved, for people."""
    d = e.data
    parts = []
    if d.get("input_max") is not None:
        parts.append(f"largest input {d['input_max']:.4g}")
    if d.get("output_max_fp32") is not None and d.get("fp32_ok"):
        parts.append(f"the result would be {d['output_max_fp32']:.4g} (FP16 ends at 65504)")
    return ", ".join(parts)


def innocence(e: Event) -> str:
    """Say whether FP32 has the fault too."""
    ok = e.data.get("fp32_ok")
    if ok is True:
        return " In FP32 the same operation on the same inputs is finite."
    if ok is False:
        return " The same operation is non-finite in FP32 too: not AMP's fault."
    return ""


def _evidence(f: Facts, events: list[Event]) -> str:
    e = events[0]
    sizes = magnitude(e)
    steps = listing(sorted({x.step for x in events}))
    kind = {"nan": "NaN", "+inf": "inf", "-inf": "-inf"}.get(str(e.data.get("kind_of_value")), "non-finite values")
    text = f"At step {steps} {e.op or 'an operation'} in {place(e)} made {kind} from finite {e.data.get('dtype', '')} inputs"
    text += f" ({sizes})." if sizes else "."
    return text + innocence(e)


def _of(f: Facts, rule: str, events: list[Event] | None = None) -> list[Event]:
    return [e for e in (f.roots if events is None else events) if not e.data.get("opaque") and classify(e) == rule]


def _steps(f: Facts, events: list[Event], pool: Iterable[int] = ()) -> tuple[int, int, int]:
    """Return the steps a fault shows at: those traced, and those of the free record that look the same."""
    return span(sorted({e.step for e in events} | set(pool)))


def _forward(f: Facts, rule: str, title: str, remedy: str, events: list[Event] | None = None) -> Finding | None:
    found = _of(f, rule, events)
    if not found:
        return None
    e = found[0]
    pool = f.lost_loss_steps if e.data.get("loss_bad") else ()
    return finding(
        rule, "error", title.format(place=place(e), op=e.op), "forward", blamed(found), e.op, e.where, _steps(f, found, pool), _evidence(f, found), remedy
    )


def nonfinite_input(f: Facts) -> Finding | None:
    """The batch holds NaN or inf."""
    if not f.inputs:
        return None
    e = f.inputs[0]
    samples = ", ".join(map(str, e.data.get("samples", [])))
    text = f"At step {listing(x.step for x in f.inputs)} argument {e.data.get('argument')} of the model held {e.data.get('count')} non-finite values, in sample {samples} of the batch, before the first layer ran."
    if f.skipped_steps:
        text += f" Skipped steps: {listing(f.skipped_steps)}. FP32 would fail as well."
    return finding(
        "nonfinite-input", "error", "The model's input holds NaN or inf", "data", (), "-", e.where, _steps(f, f.inputs, f.lost_loss_steps), text,
        "Clean or validate the data: reject a batch unless torch.isfinite(x).all() before the forward. AMP is not at fault.",
    )  # fmt: skip


def input_exceeds(f: Facts) -> Finding | None:
    """A finite input overflows on the cast to FP16."""
    found = _of(f, "input-exceeds-fp16-range") or _of(f, "input-exceeds-fp16-range", f.hidden)
    if not found:
        return None
    e = found[0]
    return finding(
        "input-exceeds-fp16-range", "error", "The input is finite but too large for FP16", "data", blamed(found), e.op, e.where,
        _steps(f, found, f.lost_loss_steps), f"The model's input reaches {e.data.get('input_max') or 0:.4g}; autocast turns values from 65520 into inf." + innocence(e),
        "Normalise the input (for example x / x.abs().max(), or standardise it) before the model, or keep the first layer in FP32.",
    )  # fmt: skip


def scaled_loss(f: Facts) -> Finding | None:
    """loss × scale overflows because the loss is an FP16 tensor."""
    found = _of(f, "scaled-loss-overflows-fp16")
    half = f.usage("half_loss")
    if not found and not (half and f.skipped.any() and not f.loss_bad[f.skipped].any() and _all_bad(f)):
        return None
    where = found[0].where if found else ""
    shape = half.data.get("shape", "?")
    finite = f.loss[np.isfinite(f.loss)]
    size = f" The loss is about {np.median(finite):.3g}, times {power(float(f.scale[0]))} it passes 65504." if len(finite) else ""
    return finding(
        "scaled-loss-overflows-fp16", "error", "loss × scale overflows: the loss is an FP16 tensor", "forward", (), "mul", where,
        _steps(f, found, f.skipped_steps), f"The loss that went into scale() is float16 of shape {shape}, so the product with the loss scale is float16 too.{size}",
        "Make the loss a FP32 scalar before scaling: scaler.scale(loss.float().mean()).backward().",
    )  # fmt: skip


def _all_bad(f: Facts) -> bool:
    return all(f.culprits[s].data.get("all_bad", True) for s in f.skipped_steps if s in f.culprits)


def softmax_masked(f: Facts) -> Finding | None:
    """A fully masked softmax row."""
    return _forward(
        f, "forward-nan-softmax-all-masked", "A softmax row is masked completely and gives NaN ({place})",
        "Never mask a whole row: let padded queries attend to one position, or use torch.where(mask.all(-1, keepdim=True), 0, softmax). FP32 gives NaN here too.",
    )  # fmt: skip


def eps_underflow(f: Facts) -> Finding | None:
    """An epsilon that FP16 rounds to zero."""
    found = _of(f, "eps-underflow-division") or _of(f, "eps-underflow-division", f.hidden)
    if not found:
        return None
    e = found[0]
    eps = e.data.get("eps")
    return finding(
        "eps-underflow-division", "error", f"eps={eps:g} is zero in FP16 and {e.op} divides by it ({place(e)})", "forward", blamed(found), e.op, e.where,
        _steps(f, found, f.lost_loss_steps), f"{_evidence(f, found)} The constant {eps:g} is at or below 2^-25 = 3e-8 and becomes zero in FP16, so the denominator is exactly 0.",
        "Do this step in FP32 (x.float(), or a torch.autocast(enabled=False) block), or use an eps that FP16 holds (1e-4 or larger), or BF16.",
    )  # fmt: skip


def attention(f: Facts) -> Finding | None:
    """Attention logits beyond FP16."""
    return _forward(
        f, "forward-overflow-attention", "Attention logits overflow FP16 before the softmax in {place}",
        "Scale the query before the product (q / sqrt(d) first, then q @ k.T), normalise q and k, or compute the logits in FP32 or BF16. A lower loss scale cannot help.",
    )  # fmt: skip


def reduction(f: Facts) -> Finding | None:
    """A sum over many FP16 elements."""
    made = _forward(
        f, "forward-overflow-reduction", "{op} over FP16 elements overflows in {place}",
        "Reduce in FP32: x.float().sum(), or sum(dtype=torch.float32); in a loss, call it on pred.float(). A lower loss scale cannot help.",
    )  # fmt: skip
    if made is None:
        return None
    e = _of(f, "forward-overflow-reduction")[0]
    extra = f" The reduction runs over {e.data.get('elements', 0):,} elements."
    return replace(made, evidence={**made.evidence, "summary": str(made.evidence["summary"]) + extra})


def activation(f: Facts) -> Finding | None:
    """A forward output beyond FP16 (or, in FP32 too, a NaN born in forward)."""
    found = _of(f, "forward-overflow-activation")
    if found:
        e = found[0]
        if e.data.get("fp32_ok") is False:
            title = f"{e.op} in {place(e)} gives non-finite values in forward, in FP32 too"
            remedy = f"Fix the arguments of {e.op} (clamp them to its domain, add a safe epsilon). AMP is not at fault, and no loss scale helps."
        elif e.data.get("cast"):
            title = f"A value beyond 65504 is cast to FP16 in {place(e)}"
            remedy = "Keep the values below 65504 (normalise), or run this part in FP32 or the model in BF16. A lower loss scale cannot help."
        else:
            title = f"The forward output of {e.op} in {place(e)} exceeds FP16's range"
            remedy = f"Run {place(e)} in FP32 (torch.autocast(enabled=False) and .float()), normalise or rescale its weights, or train in BF16. A lower loss scale cannot help."
        return finding("forward-overflow-activation", "error", title, "forward", blamed(found), e.op, e.where, _steps(f, found, f.lost_loss_steps), _evidence(f, found), remedy)
    opaque = [e for e in f.roots if e.data.get("opaque")]
    broken = [s for s in f.lost_loss_steps if s in f.culprits]
    if not broken or f.inputs or f.roots and not opaque:
        return None
    if not (f.bad_layers[f.loss_bad] > 0).any():
        return None
    where = opaque[0].where if opaque else ""
    layers = opaque[0].layers if opaque else ()
    seen = "what lies outside the compiled part is sound" if opaque else "no traced step showed the operation"
    return finding(
        "forward-overflow-activation", "error", "The forward pass gives a non-finite loss", "forward", layers, "", where, span(broken),
        f"The loss was not finite before backward at step {listing(broken)}; {seen}. Every gradient that followed was lost with it.",
        "Run one such step without torch.compile under ampscope.trace(model) to name the operation; then FP32 for that part, or BF16. A lower loss scale cannot help.",
    )  # fmt: skip


def loss_value_only(f: Facts) -> Finding | None:
    """The loss is inf, gradients are finite."""
    bad = f.loss_bad & (f.bad_layers == 0) & ~f.skipped
    if not bad.any() or (f.loss_bad & (f.bad_layers > 0)).any():
        return None
    steps = [int(s) for s in f.steps[bad]]
    roots = [e for e in f.roots if e.phase == "forward"]
    e = roots[0] if roots else None
    return finding(
        "forward-overflow-loss-value-only", "warning", "The loss value is not finite although every gradient is", "forward",
        blamed(roots), e.op if e else "", e.where if e else "", span(steps),
        f"At step {listing(steps)} the loss was not finite and no gradient was; no step was skipped." + (f" {_evidence(f, roots)}" if roots else ""),
        "Compute the loss in FP32 (pred.float()): logging, early stopping and plateau schedulers need its value. The updates themselves are sound.",
    )  # fmt: skip


def backward_nan(f: Facts) -> Finding | None:
    """A derivative is NaN or inf at that point."""
    found = _of(f, "backward-nan-finite-forward")
    if not found:
        return _untraced_nan(f)
    e = found[0]
    node = str(e.data.get("autograd_node", ""))
    name = (e.data.get("forward_op") or node.removesuffix("0").removesuffix("Backward")).lower()
    own = _own_layer(f, found)
    if own:
        return own
    return finding(
        "backward-nan-finite-forward", "error", f"The derivative of {name} is not finite in {place(e)}, the forward is", "backward", blamed(found),
        f"{name} backward ({e.op})", e.where, _steps(f, found, [s for s, c in f.culprits.items() if c.data.get("nan")]),
        f"{_evidence(f, found)} It happened in {node}, while the loss was finite.",
        f"Keep the argument of {name} away from the point where its derivative is infinite: clamp it with a bound FP16 can hold (2^-10, not 1e-6), or compute this part in FP32.",
    )  # fmt: skip


def _own_layer(f: Facts, found: list[Event]) -> Finding | None:
    """One module's own derivative, and nobody else's: single-layer-nan."""
    e = found[0]
    if not e.layers:
        return None
    bad = [c for s, c in f.culprits.items() if c.data.get("nan")]
    if not bad:
        return None
    owners = {m for c in bad for m in modules(c.layers)}
    if len(owners) != 1 or any(c.data.get("all_bad") for c in bad):
        return None
    owner = next(iter(owners))
    if not (e.layers[0] == owner or owner.startswith(e.layers[0] + ".") or e.layers[0].startswith(owner + ".")):
        return None
    return _single(f, owner, e.op, e.where, span([c.step for c in bad]), _evidence(f, found))


def _single(f: Facts, owner: str, op: str, where: str, steps: tuple[int, int, int], evidence: str) -> Finding:
    return finding(
        "single-layer-nan", "error", f"Only {owner} has NaN gradients", "backward", (owner,), op, where, steps,
        evidence + f" No other layer was non-finite before unscaling: the fault is in {owner}'s own derivative. Clipping by global norm spreads it to all.",
        f"Look at {owner}'s own computation (sqrt, norm or division at 0): add an epsilon FP16 can hold or compute it in FP32; clip with error_if_nonfinite=True while searching.",
    )  # fmt: skip


def _untraced_nan(f: Facts) -> Finding | None:
    """NaN in gradients with a finite loss that no traced step showed again."""
    if f.roots or f.inputs:
        return None
    bad = [c for c in f.culprits.values() if c.data.get("nan") and c.data.get("loss_finite") and c.data.get("first_has_nan") and not c.data.get("pos_inf") and not c.data.get("neg_inf")]
    if not bad:
        return None
    owners = modules(bad[0].layers)
    steps = span([c.step for c in bad])
    if len(owners) == 1 and not bad[0].data.get("all_bad"):
        return _single(f, owners[0], "", "", steps, f"At step {listing(c.step for c in bad)} {len(bad[0].layers)} of {bad[0].data['measured']} layers had NaN and none had inf.")
    front = bad[0].layers[0] if bad[0].layers else ""
    return finding(
        "backward-nan-finite-forward", "error", f"NaN is born in backward at or behind {front}", "backward", owners[:4], "", "", steps,
        f"At step {listing(c.step for c in bad)} the loss was finite and {len(bad[0].layers)} of {bad[0].data['measured']} layers had NaN (no inf, so no overflow), first in backward order {front}.",
        "Run such a batch under ampscope.trace(model) to name the operation; look for sqrt, log, division or norm at 0 there.",
    )  # fmt: skip


def custom_function(f: Facts) -> Finding | None:
    """A custom autograd.Function's backward."""
    found = _of(f, "backward-overflow-custom-function")
    hidden = [e for e in f.hidden if e.phase == "backward" and e.data.get("custom_function")]
    if not found and not hidden:
        return None
    e = (found or hidden)[0]
    name = e.data["custom_function"]
    return finding(
        "backward-overflow-custom-function", "error", f"The backward of the custom function {name} overflows FP16 ({place(e)})", "backward",
        blamed(found or hidden), f"{e.op} in {name}", e.where, _steps(f, [*found, *hidden], [s for s in f.skipped_steps if found]),
        f"{_evidence(f, found or hidden)} It happened inside {name}.backward; the gradient that came in was finite.",
        f"Decorate {name}.forward with torch.amp.custom_fwd(device_type=..., cast_inputs=torch.float32) and backward with custom_bwd, so that it computes in FP32.",
    )  # fmt: skip


def norm_eps(f: Facts) -> Finding | None:
    """A normalisation's backward over near-constant input."""
    found = _of(f, "backward-overflow-norm-eps")
    if not found:
        return None
    e = found[0]
    rstd = e.data.get("rstd_max")
    size = f" 1/σ reached {rstd:.3g}." if rstd else ""
    return finding(
        "backward-overflow-norm-eps", "error", f"The backward of the normalisation {place(e)} overflows over (near-)constant input", "backward", blamed(found),
        e.op, e.where, _steps(f, found, [s for s in f.skipped_steps if s in f.culprits and f.culprits[s].data.get("loss_finite")]),
        f"{_evidence(f, found)}{size} Rows without variance are divided by sqrt(eps) alone.",
        "Use a larger eps (1e-5), mask constant (padded) rows before the normalisation, or run it in FP32.",
    )  # fmt: skip


def depth(f: Facts) -> Finding | None:
    """Gradients grow towards the input until they overflow."""
    found = _of(f, "backward-overflow")
    skips = [s for s in f.skipped_steps if s in f.culprits and f.culprits[s].data.get("loss_finite") and not f.culprits[s].data.get("all_bad")]
    if len(skips) < DEPTH_SKIPS:
        return None
    rise, first, last = growth(f)
    if rise < DEPTH_BITS:
        return None
    fronts = [f.culprits[s].layers[0] for s in skips if f.culprits[s].layers]
    layers = [*blamed([e for e in found if e.step in skips][:1]), *modules(fronts)]
    e = found[0] if found else None
    return finding(
        "backward-overflow-depth", "warning", "Gradients grow layer by layer towards the input until they overflow", "backward", tuple(dict.fromkeys(layers))[:8],
        e.op if e else "", e.where if e else "", span(skips),
        f"{len(skips)} steps were skipped with a finite loss; the first bad layer in backward order was {listing(dict.fromkeys(fronts), 4)}, while layers nearer the output stayed finite. "
        f"Gradients grow {2**rise:.3g}-fold from {last} to {first}. The scale ended at {power(float(f.scale[-1]))}.",
        "Bound the growth: normalise between blocks, keep the residual stream in FP32, or train in BF16. A low loss scale starves the last layers.",
    )  # fmt: skip


def growth(f: Facts) -> tuple[float, str, str]:
    """Return (log2 growth of the typical gradient from output to input, input-most layer, output-most layer)."""
    order = [n for n in f.run.backward_order if n in f.names]
    index = {n: i for i, n in enumerate(f.names)}
    matrices = [n for n in order if len(f.run.layers[index[n]].shape) >= 2]
    if len(matrices) < 4:
        return 0.0, "", ""
    values = f.metric("grad_max")[~f.skipped[f.rows]]
    if not len(values):
        values = f.metric("grad_max")
    with np.errstate(all="ignore"):
        logs = np.log2(np.nanmedian(values[:20], axis=0))[[index[n] for n in matrices]]
    good = np.isfinite(logs)
    if good.sum() < 4:
        return 0.0, "", ""
    kept = [n for n, ok in zip(matrices, good, strict=True) if ok]
    logs = logs[good]
    third = max(len(logs) // 3, 1)
    ranks = np.argsort(np.argsort(logs))
    trend = float(np.corrcoef(ranks, np.arange(len(logs)))[0, 1])
    if not trend > 0.6:  # a jump at one layer is no growth by depth
        return 0.0, "", ""
    return float(np.median(logs[-third:]) - np.median(logs[:third])), kept[-1], kept[0]


def buffers(f: Facts) -> Finding | None:
    """Running statistics were poisoned."""
    if not f.buffers:
        return None
    e = f.buffers[0]
    names = list(e.data.get("buffers", []))
    root = next((r for r in f.roots if r.step <= e.step and r.phase == "forward"), None)
    cause = f" The forward overflowed in {place(root)} at step {root.step}." if root else ""
    return finding(
        "batchnorm-buffers-nonfinite", "error", f"Running statistics are poisoned: {', '.join(names[:2])}", "forward",
        tuple(dict.fromkeys([*e.layers, *(blamed([root]) if root else ())])), root.op if root else "", root.where if root else "", (e.step, int(f.steps[-1]), 1),
        f"At step {e.step} {len(names)} buffers became non-finite ({', '.join(names[:4])}).{cause} GradScaler skipped the step and kept the weights, but the statistics were updated in forward and stay so: every evaluation from then on is NaN.",
        "Call reset_running_stats() on these modules now; prevent it by rejecting outlier batches or keeping the layer before the normalisation in FP32.",
    )  # fmt: skip


def evaluation(f: Facts) -> Finding | None:
    """Finite in training, overflow in evaluation."""
    if not f.evaluations or f.loss_bad.any() or f.buffers:
        return None
    found = f.evaluations
    e = found[0]
    return finding(
        "eval-only-forward-overflow", "error", f"The model overflows in evaluation mode only ({place(e)})", "forward", blamed(found), e.op, e.where, _steps(f, found),
        f"{_evidence(f, found)} Training forwards were finite: the two modes compute different things (dropout scaling, running statistics).",
        f"Run {place(e)} in FP32 for evaluation, or evaluate under BF16 or without autocast; check running statistics against batch statistics.",
    )  # fmt: skip


def silent(f: Facts) -> Finding | None:
    """An overflow that is divided away."""
    found = [e for e in f.hidden if e.phase == "forward" and e.data.get("kind_of_value") in ("+inf", "-inf", "nan") and not e.data.get("loss_bad")]
    found = [e for e in found if classify(e) not in ("eps-underflow-division", "input-exceeds-fp16-range")]
    if not found:
        return None
    e = found[0]
    return finding(
        "silent-forward-overflow", "warning", f"{e.op} in {place(e)} overflows and nobody notices", "forward", blamed(found), e.op, e.where, _steps(f, found),
        f"{_evidence(f, found)} The value was healed on the way (divided away, masked or squashed): the loss is finite, the branch behind it is dead.",
        f"Compute this part in FP32 or rescale it; what it feeds gets 0 or a constant instead of a signal.",
    )  # fmt: skip
