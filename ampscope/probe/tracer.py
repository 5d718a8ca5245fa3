"""The op-by-op tracer: a dispatch mode over forward and backward that finds where non-finite values are born.

A *birth* is an operation whose output is non-finite while its inputs are finite. Births are followed ("taint") to see whether they
reach the loss, or are healed on the way (divided away, squashed by exp). Nothing of the user's is changed: the mode runs the operation
as it was asked for, looks at its output, and returns it.

Flags stay on the device: on CPU they are read through NumPy at once, elsewhere all of them with one copy at the end. docs/tracing.md
has the meaning of every field of an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ampscope.probe.deferred import Deferred
from ampscope.probe.places import Place, Places

GARBAGE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_", "_efficientzerotensor",
}  # fmt: skip
"""Operations that return memory nobody has written."""
CONSTANTS = {
    "full", "full_like", "fill", "fill_", "masked_fill", "masked_fill_", "new_full", "scalar_tensor", "where", "lift_fresh", "lift_fresh_copy",
    "index_fill", "index_fill_", "index_put", "index_put_", "masked_scatter", "triu", "tril", "constant_pad_nd", "copy_", "_local_scalar_dense",
    "scatter", "scatter_",
}  # fmt: skip
"""Operations that write a constant the user gave: an inf from them is meant (attention masks)."""
LOGS = {"log", "log2", "log10", "log1p", "logit", "xlogy", "special_xlogy", "special_log_ndtr", "log_", "log1p_"}
"""Operations with a pole: -inf from them may be meant, and exp heals it."""
MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm", "matmul", "addbmm", "mv", "addmv", "dot", "mkldnn_linear",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "mkldnn_convolution", "cudnn_convolution",
}  # fmt: skip
REDUCTIONS = {
    "sum",
    "mean",
    "norm",
    "linalg_vector_norm",
    "nansum",
    "prod",
    "cumsum",
    "var",
    "std",
    "var_mean",
    "logsumexp",
    "frobenius_norm",
}
NORMS = ("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm")
VIEWS_KEEP = {
    "sqrt",
    "rsqrt",
    "reciprocal",
    "pow",
    "mul",
    "neg",
    "abs",
    "clone",
    "expand",
    "unsqueeze",
    "view",
    "_to_copy",
    "maximum",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP16_FLUSH = 2.0**-25


@dataclass(slots=True)
class Birth:
    """An operation that made non-finite values out of finite ones."""

    op: str
    place: Place
    phase: str
    node: str
    custom: str | None
    dtype: str
    elements: int
    nan: bool = False
    pos_inf: bool = False
    neg_inf: bool = False
    meant: bool = False
    """-inf written by a constant or a pole: a fault only if it reaches the loss as NaN."""
    input_max: float = float("nan")
    fp32_ok: bool | None = None
    fp32_max: float = float("nan")
    cast: bool = False
    reduction: bool = False
    zero_divisor: bool = False
    eps: float | None = None
    softmax: bool = False
    masked_rows: bool = False
    rstd_max: float | None = None
    recomputed: bool = False
    parameter: str = ""
    from_input: bool = False
    producer: str = ""
    healed: bool = True
    """Whether no non-finite value that came of it reached the loss (or, in backward, a gradient)."""
    forward_op: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    feeds_softmax: bool = False
    """Whether what came of it went into a softmax (not the log-softmax of a loss)."""
    order: int = 0


@dataclass
class Trace:
    """What one traced step showed."""

    births: list[Birth] = field(default_factory=list)
    matmuls: dict[str, int] = field(default_factory=dict)
    """Matrix products in forward, by dtype."""
    flushed_weights: dict[str, float] = field(default_factory=dict)
    """Parameter → share of its non-zero elements that became zero when they were cast to FP16."""
    overflowed_weights: dict[str, int] = field(default_factory=dict)
    growth: list[tuple[str, float]] = field(default_factory=list)
    """(module, largest |gradient|) in backward order."""
    bad_inputs: list[dict[str, Any]] = field(default_factory=list)
    input_max: float = 0.0
    inputs_seen: bool = False
    loss_bad: bool = False
    loss_root: int | None = None
    gradients_bad: bool = False
    opaque: bool = False
    """A non-finite value came out of something the tracer did not see (a compiled part)."""
    opaque_place: Place = field(default_factory=Place)
    ops: int = 0
    activation_max: list[tuple[str, str, float]] = field(default_factory=list)
    closed: bool = False


class OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """The dispatch mode. `enter` and `leave` may be called from different functions; `trace` fills meanwhile."""

    def __init__(
        self, places: Places, parameters: Mapping[int, str], training: bool = True, deferred: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._places, self._training = places, training
        self._parameters = parameters
        """data_ptr → name."""
        self._taint: dict[int, frozenset[int]] = {}
        self._masked: set[int] = set()
        self._eps: dict[int, float] = {}
        self._inputs: set[int] = set()
        self._nodes: dict[int, tuple[Place, str]] = {}
        self._producer: dict[int, str] = {}
        self._casts: dict[int, str] = {}
        """Storage of an FP16 copy → the parameter it was cast from."""
        self._open = False
        self.passive = False
        self._force_deferred = deferred
        """Treat tensors of the host as if they lay on a device; for tests."""
        self.deferred = Deferred()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled parts compiled: what runs inside them is not seen."""
        return True

    # Life

    def enter(self) -> None:
        """Begin to see operations of this thread (and of the backward threads it starts)."""
        self._open = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop. If another mode lies above, this one only falls silent: popping it would pop the other."""
        if not self._open:
            return
        self.passive = True
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if stack and stack[-1] is self:
            self._open = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.trace.closed = True

    @property
    def still_on(self) -> bool:
        """Whether the mode could not be taken off the stack yet."""
        return self._open

    def see_inputs(self, args: Any) -> None:
        """Look at the tensors a model's forward was given."""
        self.trace.inputs_seen = True
        for i, t in enumerate(tree_leaves(args)):
            if (
                not isinstance(t, torch.Tensor)
                or t.dtype not in FLOATS
                or t.numel() == 0
                or t.is_sparse
                or t.requires_grad
            ):
                continue
            if _key(t) in self._taint:
                continue
            self._inputs.add(_key(t))
            if not host(t):
                continue
            bad, largest = summary(t)
            if bad and kinds(t) != (False, False, True):  # an additive attention mask holds -inf on purpose
                rows = [int(r) for r in _bad_rows(t)]
                self.trace.bad_inputs.append({"argument": i, "shape": list(t.shape), "samples": rows[:8], "count": bad})
            if largest > self.trace.input_max:
                self.trace.input_max = largest

    def see_loss(self, loss: torch.Tensor) -> None:
        """Note the loss that goes into `scale()`."""
        if self._away(loss):
            self.deferred.see(loss, loss=True)
        elif host(loss) and summary(loss)[0]:
            self.trace.loss_bad = True
            roots = self._taint.get(_key(loss), frozenset())
            for root in roots:
                self.trace.births[root].healed = False
            if roots and self.trace.loss_root is None:
                self.trace.loss_root = min(roots)

    def see_gradient(self, grad: torch.Tensor) -> None:
        """Note a parameter's gradient: births that reached it are not healed."""
        if self._away(grad):
            self.deferred.see(grad, loss=False)
        elif host(grad) and summary(grad)[0]:
            self.trace.gradients_bad = True
            for root in self._taint.get(_key(grad), frozenset()):
                self.trace.births[root].healed = False

    # Every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then look at what it made."""
        kwargs = kwargs or {}
        if self.passive:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        mutable = func._schema.is_mutable
        inputs = [t for t in _tensors((args, kwargs)) if t.dtype in FLOATS]
        before = [summary(t) for t in inputs if host(t)] if mutable else None
        away = [t for t in inputs if self._away(t)]
        flags = self.deferred.before(away, _key) if away else []
        kept = (
            [t.detach().clone() if isinstance(t, torch.Tensor) and t.numel() < 1 << 20 else t for t in args]
            if mutable and before
            else None
        )
        out = func(*args, **kwargs)
        if name not in GARBAGE:
            self.trace.ops += 1
            if away or self._force_deferred:
                outputs = [t for t in _tensors(out) if t.dtype in FLOATS and t.numel() and self._away(t)]
                if outputs:
                    self._look_later(name, away, flags, outputs)
                    return out
            self._look(func, name, args, kwargs, inputs, before, kept, out)
        return out

    def _away(self, t: torch.Tensor) -> bool:
        """Whether a tensor's values can only be asked for, not read."""
        plain = t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter) and t.numel() > 0
        return plain and t.device.type != "meta" and (self._force_deferred or t.device.type != "cpu")

    def _look_later(
        self, name: str, inputs: list[torch.Tensor], flags: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Keep flags of an operation on a device; they are read when the step is over."""
        backward = torch._C._current_graph_task_id() != -1
        sequence = None if backward else _sequence()
        place = self._nodes.get(-1 if sequence is None else sequence, (None, ""))[0]
        if not backward and place is None:
            place = self._places.here()
            if sequence is not None:
                self._nodes[sequence] = (place, name)
        if not backward and name in MATMULS:
            kind = str(outputs[0].dtype).removeprefix("torch.")
            self.trace.matmuls[kind] = self.trace.matmuls.get(kind, 0) + 1
        birth = self._placed(name, inputs, outputs[0], backward, place)
        self.deferred.after(birth, name, inputs, flags, outputs, _key, name in CONSTANTS, name in LOGS)

    def _look(
        self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], before: Any, kept: Any, out: Any
    ) -> None:
        outputs = [t for t in _tensors(out) if t.dtype in FLOATS and t.numel() and host(t)]
        if not outputs:
            return
        backward = torch._C._current_graph_task_id() != -1
        place: Place | None = None
        if not backward:
            # The newest autograd node is this operation's, or that of the custom function whose forward it belongs to.
            sequence = _sequence()
            if sequence is not None and sequence not in self._nodes:
                place = self._places.here()
                self._nodes[sequence] = (place, name)
        if not backward and name in MATMULS:
            kind = str(outputs[0].dtype).removeprefix("torch.")
            self.trace.matmuls[kind] = self.trace.matmuls.get(kind, 0) + 1
        if name == "_to_copy" and outputs[0].dtype is torch.float16 and inputs:
            self._see_cast(inputs[0], outputs[0])
        self._see_eps(name, args, inputs, outputs)
        taint = frozenset().union(*(self._taint.get(_key(t), frozenset()) for t in inputs)) if inputs else frozenset()
        masked = any(_key(t) in self._masked for t in inputs)
        if taint and name == "_softmax":
            for i in taint:
                self.trace.births[i].feeds_softmax = True
        summaries = [summary(t) for t in outputs]
        if backward:
            self._see_growth(outputs, summaries)
        if not any(bad for bad, _ in summaries):
            for t in outputs:
                key = _key(t)
                self._taint.pop(key, None)
                self._masked.discard(key)
            return
        worst = next(t for t, (bad, _) in zip(outputs, summaries, strict=True) if bad)
        states = before if before is not None else [summary(t) for t in inputs if host(t)]
        bad_inputs = any(bad for bad, _ in states)
        nan, pos, neg = kinds(worst)
        if bad_inputs and not (masked and nan and not taint_is_bad(self.trace, taint)):
            if not taint and not masked:
                taint = self._unseen(inputs, backward)
            self._spread(outputs, summaries, taint, masked and not nan)
            return
        birth = self._birth(func, name, args, kwargs, inputs, states, kept, worst, backward, place)
        birth.nan, birth.pos_inf, birth.neg_inf = nan, pos, neg
        constant = name in CONSTANTS or (name in ("add", "mul", "sub") and masked)
        birth.meant = not nan and (constant or (name in LOGS and not pos))
        birth.order = len(self.trace.births)
        self.trace.births.append(birth)
        self._spread(outputs, summaries, taint | {birth.order}, birth.meant)

    def _spread(
        self, outputs: list[torch.Tensor], summaries: list[tuple[int, float]], taint: frozenset[int], masked: bool
    ) -> None:
        for t, (bad, _) in zip(outputs, summaries, strict=True):
            key = _key(t)
            if bad:
                self._taint[key] = taint
                (self._masked.add if masked else self._masked.discard)(key)
            else:
                self._taint.pop(key, None)
                self._masked.discard(key)

    def _unseen(self, inputs: list[torch.Tensor], backward: bool) -> frozenset[int]:
        """A non-finite input nobody saw being made: the model's input, a parameter or buffer, or a compiled part."""
        keys = {_key(t) for t in inputs}
        if not backward and not keys & self._inputs and not any(t.data_ptr() in self._parameters for t in inputs):
            self.trace.opaque = True
            self.trace.opaque_place = self._places.here()
        return frozenset()

    def _placed(
        self, name: str, inputs: list[torch.Tensor], worst: torch.Tensor, backward: bool, place: Place | None
    ) -> Birth:
        """Return a birth with what is known without looking at values: where it belongs, node, dtype, kind."""
        node = torch._C._current_autograd_node() if backward else None
        node_name, custom, forward_op = "", None, ""
        if backward:
            found = self._places.here(backward=True)
            if found.recomputed:
                place = found
            elif node is not None:
                node_name = str(node.name())
                cls = getattr(node, "_forward_cls", None)
                if cls is not None and not str(cls.__module__).startswith("torch."):
                    custom = cls.__name__
                sequence = getattr(node, "_sequence_nr", None)
                place, forward_op = self._nodes.get(sequence() if sequence else -1, (found, ""))
                if custom and found.where:
                    place = Place(place.modules, place.types, found.where, found.function)
        place = place or self._places.here()
        recomputed = backward and place.recomputed
        birth = Birth(
            name, place, "backward" if backward and not recomputed else "forward", node_name, custom,
            str(worst.dtype).removeprefix("torch."), max((t.numel() for t in inputs), default=worst.numel()),
        )  # fmt: skip
        birth.recomputed, birth.forward_op = recomputed, forward_op
        birth.cast = name == "_to_copy"
        birth.reduction = name in REDUCTIONS
        birth.softmax = "softmax" in name
        birth.sizes = tuple(tuple(t.shape) for t in inputs[:3])
        birth.from_input = any(_key(t) in self._inputs for t in inputs)
        found_names = (self._parameters.get(t.data_ptr()) or self._casts.get(_key(t)) for t in inputs)
        birth.parameter = next((n for n in found_names if n), "")
        return birth

    def _birth(
        self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], states: Any, kept: Any, worst: torch.Tensor,
        backward: bool, place: Place | None,
    ) -> Birth:  # fmt: skip
        birth = self._placed(name, inputs, worst, backward, place)
        node_name = birth.node
        birth.input_max = max((m for _, m in states), default=float("nan"))
        birth.producer = next((self._producer.get(_key(t), "") for t in inputs if _key(t) in self._producer), "")
        if birth.softmax and inputs and host(inputs[0]):
            birth.masked_rows = bool(torch.isneginf(inputs[0]).all(-1).any().numpy())
        if name in ("div", "div_", "reciprocal", "rsqrt", "rsqrt_", "log", "log2", "log10", "log_", "sqrt") and inputs:
            divisor = inputs[-1]
            birth.zero_divisor = bool((divisor == 0).any().numpy()) if host(divisor) else False
            birth.eps = self._eps.get(_key(divisor))
        if any(n in name for n in NORMS) or any(
            n in node_name.lower().replace("_", "") for n in ("layernorm", "batchnorm", "groupnorm", "rmsnorm")
        ):
            small = [t for t in inputs if t.numel() < inputs[0].numel()]
            birth.rstd_max = max((summary(t)[1] for t in small if host(t)), default=None)
        birth.fp32_ok, birth.fp32_max = in_fp32(func, kept if kept is not None else args, kwargs)
        if birth.eps is not None and birth.zero_divisor:
            birth.fp32_ok = True
        elif backward and birth.zero_divisor:
            birth.fp32_ok = None  # the zero may itself be an FP16 rounding
        return birth

    # What a healthy step shows too

    def _see_cast(self, source: torch.Tensor, target: torch.Tensor) -> None:
        name = self._parameters.get(source.data_ptr())
        if name is None or not host(source):
            return
        self._casts[_key(target)] = name
        nonzero = source != 0
        count = int(nonzero.sum().numpy())
        lost = int((nonzero & (target == 0)).sum().numpy())
        self.trace.flushed_weights[name] = lost / count if count else 0.0
        infinite = int((torch.isinf(target) & torch.isfinite(source)).sum().numpy())
        if infinite:
            self.trace.overflowed_weights[name] = infinite

    def _see_eps(self, name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Follow an epsilon that FP16 cannot hold: clamp_min(x, 1e-12), x + 1e-8."""
        out = outputs[0]
        key = _key(out)
        if out.dtype is torch.float16:
            scalars = [a for a in args if isinstance(a, float) and 0 < abs(a) <= FP16_FLUSH]
            if scalars and name.rstrip("_") in ("clamp_min", "clamp", "add", "maximum", "sub"):
                self._eps[key] = scalars[0]
                return
        carried = [self._eps[_key(t)] for t in inputs if _key(t) in self._eps]
        if carried and name.rstrip("_") in VIEWS_KEEP:
            self._eps[key] = carried[0]
        else:
            self._eps.pop(key, None)

    def _see_growth(self, outputs: list[torch.Tensor], summaries: list[tuple[int, float]]) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        sequence = getattr(node, "_sequence_nr", None)
        found = self._nodes.get(sequence() if sequence else -1)
        for t in outputs:
            self._producer[_key(t)] = str(node.name())
        if found is None or not found[0].modules:
            return
        name, largest = found[0].modules[0], max(m for _, m in summaries)
        growth = self.trace.growth
        if growth and growth[-1][0] == name:
            growth[-1] = (name, max(growth[-1][1], largest))
        elif len(growth) < 4096:
            growth.append((name, largest))


def taint_is_bad(trace: Trace, taint: frozenset[int]) -> bool:
    """Whether any of these births is a fault by itself, not a mask."""
    return any(not trace.births[i].meant for i in taint)


def _key(t: torch.Tensor) -> int:
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(t)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _sequence() -> int | None:
    get = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return int(get()) - 1 if get is not None else None


def host(t: torch.Tensor) -> bool:
    """Whether a tensor can be looked at without a synchronisation."""
    return t.device.type == "cpu" and t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter)


def summary(t: torch.Tensor) -> tuple[int, float]:
    """Return (non-finite elements, largest finite |x|) of a tensor on the host."""
    x = t.detach()
    if x.numel() == 0:
        return 0, 0.0
    top = x.abs().amax()
    value = float(top.float().numpy())
    if value == value and value != float("inf"):
        return 0, value
    finite = torch.isfinite(x)
    bad = x.numel() - int(finite.sum().numpy())
    rest = torch.where(finite, x, torch.zeros((), dtype=x.dtype))
    return bad, float(rest.abs().amax().float().numpy())


def kinds(t: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return whether a tensor on the host holds NaN, +inf, -inf."""
    x = t.detach()
    return bool(x.isnan().any().numpy()), bool(x.isposinf().any().numpy()), bool(x.isneginf().any().numpy())


def _bad_rows(t: torch.Tensor) -> Any:
    bad = ~torch.isfinite(t.detach())
    flat = bad.reshape(t.shape[0], -1).any(1) if t.dim() else bad.reshape(1)
    return flat.numpy().nonzero()[0]


def in_fp32(func: Any, args: Any, kwargs: Any) -> tuple[bool | None, float]:
    """Evaluate an operation on the same inputs in FP32 (FP64 where they are FP32): (is it finite there, its largest |x|).

    None where it cannot be repeated: random, or a size or dtype that does not go.
    """
    if any(w in func.overloadpacket.__name__ for w in ("dropout", "rand", "bernoulli", "normal_", "uniform_")):
        return None, float("nan")
    leaves = [t for t in _tensors((args, kwargs)) if t.dtype in FLOATS]
    wide = torch.float64 if leaves and all(t.dtype in (torch.float32, torch.float64) for t in leaves) else torch.float32

    def up(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(wide) if t.dtype in FLOATS else t

    try:
        with torch.no_grad():
            wide_kwargs = {
                k: wide if k == "dtype" and v in FLOATS else v
                for k, v in tree_map_only(torch.Tensor, up, kwargs).items()
            }
            wide_args = [
                wide if isinstance(a, torch.dtype) and a in FLOATS else a
                for a in tree_map_only(torch.Tensor, up, list(args))
            ]
            if func._schema.is_mutable and wide_args and isinstance(wide_args[0], torch.Tensor):
                wide_args[0] = wide_args[0].clone()
            out = [t for t in _tensors(func(*wide_args, **wide_kwargs)) if t.dtype in FLOATS and t.numel()]
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return None, float("nan")
    found = [summary(t) for t in out if host(t)]
    if not found:
        return None, float("nan")
    return not any(bad for bad, _ in found), max(m for _, m in found)
