"""The op-by-op tracer: a dispatch mode over forward and backward that finds where non-finite values are born.

A *birth* is an operation whose output is non-finite while its inputs are finite. Births are followed ("taint") to see whether they
reach the loss, or are healed on the way (divided away, squashed by exp). Nothing of the user's is changed: the mode runs the operation
as it was asked for, looks at its output, and returns it.

Flags stay on the device: on CPU they are read through NumPy at once, elsewhere all of them with one copy at the end. docs/tracing.md
has the meaning of every field of an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampscope.probe.births import Birth, Trace, of_sum, taint_is_bad
from ampscope.probe.deferred import Deferred
from ampscope.probe.epsilons import Epsilons
from ampscope.probe.growth import Growth
from ampscope.probe.masks import Candidates, of_cast, of_masks
from ampscope.probe.operations import CONSTANTS, GARBAGE, LOGS, MATMULS, NORMS, REDUCTIONS
from ampscope.probe.places import Place, Places
from ampscope.probe.shadow import Shadow
from ampscope.probe.steep import Steep
from ampscope.probe.values import FLOATS, bad_rows, host, judged, key, kinds, repeated, summary, tensors


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
        self._candidates, self._shadow, self._steep = Candidates(), Shadow(), Steep()
        self._eps = Epsilons()
        self._inputs: set[int] = set()
        self._nodes: dict[int, tuple[Place, str]] = {}
        self._growth = Growth(self.trace.growth)
        self._casts: dict[int, str] = {}
        """Storage of an FP16 copy → the parameter it was cast from."""
        self._wide: list[torch.Tensor] | None = None
        """The newest birth's results in FP32."""
        self._open = False
        self.passive = False
        self.evaluating = False
        """Whether an evaluation forward is running."""
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
            if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or t.numel() == 0:
                continue
            if t.is_sparse or t.requires_grad or key(t) in self._taint:
                continue
            self._inputs.add(key(t))
            if not host(t):
                continue
            bad, largest = summary(t)
            if bad:
                rows = [int(r) for r in bad_rows(t)]
                note = {"argument": i, "shape": list(t.shape), "samples": rows[:8], "count": bad}
                if kinds(t) == (False, False, True):
                    self._candidates.add(t, note)
                else:
                    self.trace.bad_inputs.append(note)
            if largest > self.trace.input_max:
                self.trace.input_max = largest

    def see_loss(self, loss: torch.Tensor) -> None:
        """Note the loss that goes into `scale()`."""
        if self._away(loss):
            self.deferred.see(loss, loss=True)
        elif host(loss) and summary(loss)[0]:
            self.trace.loss_bad = True
            roots = self._taint.get(key(loss), frozenset())
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
            for root in self._taint.get(key(grad), frozenset()):
                self.trace.births[root].healed = False

    # Every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then look at what it made."""
        kwargs = kwargs or {}
        if self.passive:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        mutable = func._schema.is_mutable
        inputs = [t for t in tensors((args, kwargs)) if t.dtype in FLOATS]
        before = [summary(t) for t in inputs if host(t)] if mutable else None
        away = [t for t in inputs if self._away(t)]
        flags = self.deferred.before(away, key) if away else []
        kept = (
            [t.detach().clone() if isinstance(t, torch.Tensor) and t.numel() < 1 << 20 else t for t in args]
            if mutable and before
            else None
        )
        out = func(*args, **kwargs)
        if name not in GARBAGE:
            self.trace.ops += 1
            if away or self._force_deferred:
                outputs = [t for t in tensors(out) if t.dtype in FLOATS and t.numel() and self._away(t)]
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
        self.deferred.after(birth, name, inputs, flags, outputs, key, name in CONSTANTS, name in LOGS)

    def _look(
        self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], before: Any, kept: Any, out: Any
    ) -> None:
        outputs = [t for t in tensors(out) if t.dtype in FLOATS and t.numel() and host(t)]
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
        self._eps.see(name, args, inputs, outputs[0])
        taint = frozenset().union(*(self._taint.get(key(t), frozenset()) for t in inputs)) if inputs else frozenset()
        masked = any(key(t) in self._masked for t in inputs)
        if taint and name == "_softmax":
            for i in taint:
                self.trace.births[i].feeds_softmax = True
        summaries = [summary(t) for t in outputs]
        if backward:
            self._see_growth(outputs, summaries)
        finite = not any(bad for bad, _ in summaries)
        if not backward:
            self._steep.see(name, inputs, outputs, self._parameters, self._places)
            right = self._shadow.follow(func, args, kwargs, kept, outputs, finite) if self._shadow else None
            for i in taint if finite else ():
                self.trace.births[i].healed_right.append(bool(right))
        if finite:
            for t in outputs:
                at = key(t)
                self._taint.pop(at, None)
                self._masked.discard(at)
            return
        worst = next(t for t, (bad, _) in zip(outputs, summaries, strict=True) if bad)
        states = before if before is not None else [summary(t) for t in inputs if host(t)]
        bad_inputs = any(bad for bad, _ in states)
        nan, pos, neg = kinds(worst)
        for note in self._candidates.used(name, inputs, outputs, nan, pos) if bad_inputs and not backward else ():
            masked = False
            if isinstance(note, Birth):
                note.meant = False
                taint |= {note.order if any(b is note for b in self.trace.births) else self._keep(note)}
            else:
                self.trace.bad_inputs.append(note)
        if bad_inputs and not taint and not masked:
            taint, masked = self._unseen(name, inputs, states, backward, place)
        poles = [b for b in (self.trace.births[i] for i in taint) if b.meant and b.op in LOGS] if nan and masked else []
        for pole in poles:  # log(0) was the fault after all: 0 · -inf
            pole.meant = False
        if bad_inputs and (poles or not (masked and nan and not taint_is_bad(self.trace, taint))):
            self._spread(outputs, summaries, taint, masked and not nan)
            return
        birth = self._birth(func, name, args, kwargs, inputs, states, kept, worst, backward, place)
        birth.nan, birth.pos_inf, birth.neg_inf = nan, pos, neg
        constant = name in CONSTANTS or (name in ("add", "mul", "sub") and masked) or of_masks(name, inputs, nan, pos)
        birth.meant = not nan and (constant or (name in LOGS and not pos))
        if not birth.meant and not backward and of_cast(name, inputs, nan, pos):
            birth.meant = True
            self._candidates.add(worst, birth)
        birth.of_poles = bad_inputs
        birth.masks_added = birth.masked_rows and any(of_sum(self.trace.births[i]) for i in taint)
        if not (backward or birth.meant or bad_inputs):
            self._shadow.begin(outputs, self._wide)
        self._spread(outputs, summaries, taint | {self._keep(birth)}, birth.meant)

    def _keep(self, birth: Birth) -> int:
        birth.order = len(self.trace.births)
        birth.evaluation = self.evaluating and birth.phase != "backward"
        self.trace.births.append(birth)
        return birth.order

    def _spread(
        self, outputs: list[torch.Tensor], summaries: list[tuple[int, float]], taint: frozenset[int], masked: bool
    ) -> None:
        for t, (bad, _) in zip(outputs, summaries, strict=True):
            at = key(t)
            if bad:
                self._taint[at] = taint
                (self._masked.add if masked else self._masked.discard)(at)
            else:
                self._taint.pop(at, None)
                self._masked.discard(at)

    def _unseen(
        self, name: str, inputs: list[torch.Tensor], states: Any, backward: bool, place: Place | None
    ) -> tuple[frozenset[int], bool]:
        """A non-finite input nobody saw being made. Return its taint, and whether it is meant.

        It is an additive mask (only -inf: meant), data that went past the model (a target), the model's input, a parameter or
        buffer, or came out of a compiled part.
        """
        bad = [t for t, (count, _) in zip((t for t in inputs if host(t)), states, strict=False) if count]
        if bad and all(kinds(t) == (False, False, True) for t in bad):
            for t in bad:
                if not backward and not t.requires_grad and key(t) not in self._inputs:
                    self._candidates.add(t, self._data(name, inputs, t, place))
            return frozenset(), True
        known = any(key(t) in self._inputs or key(t) in self._taint or t.data_ptr() in self._parameters for t in inputs)
        if backward or known:
            return frozenset(), False
        if bad and not any(t.requires_grad for t in inputs if t.data_ptr() in {b.data_ptr() for b in bad}):
            return frozenset({self._keep(self._data(name, inputs, bad[0], place))}), False
        self.trace.opaque = True
        self.trace.opaque_place = self._places.here()
        return frozenset(), False

    def _data(self, name: str, inputs: list[torch.Tensor], bad: torch.Tensor, place: Place | None) -> Birth:
        """Return a birth that stands for data that was non-finite from the start."""
        birth = self._placed(name, inputs, bad, False, place)
        birth.phase, birth.fp32_ok = "data", False
        birth.nan, birth.pos_inf, birth.neg_inf = kinds(bad)
        birth.sizes = (tuple(bad.shape),)
        birth.elements = int((~torch.isfinite(bad.detach())).sum().numpy())
        return birth

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
        birth.aside = not backward and not place.modules and not any(t.requires_grad for t in inputs)
        birth.from_input = any(key(t) in self._inputs for t in inputs)
        found_names = (self._parameters.get(t.data_ptr()) or self._casts.get(key(t)) for t in inputs)
        birth.parameter = next((n for n in found_names if n), "")
        return birth

    def _birth(
        self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], states: Any, kept: Any, worst: torch.Tensor,
        backward: bool, place: Place | None,
    ) -> Birth:  # fmt: skip
        birth = self._placed(name, inputs, worst, backward, place)
        node_name = birth.node
        birth.input_max = max((m for _, m in states), default=float("nan"))
        birth.producer = self._growth.maker(inputs)
        if birth.softmax and inputs and host(inputs[0]):
            birth.masked_rows = bool(torch.isneginf(inputs[0]).all(-1).any().numpy())
        if name in ("div", "div_", "reciprocal", "rsqrt", "rsqrt_", "log", "log2", "log10", "log_", "sqrt") and inputs:
            divisor = inputs[-1]
            birth.zero_divisor = bool((divisor == 0).any().numpy()) if host(divisor) else False
            birth.eps = self._eps.of(divisor)
        if any(n in name for n in NORMS) or any(
            n in node_name.lower().replace("_", "") for n in ("layernorm", "batchnorm", "groupnorm", "rmsnorm")
        ):
            small = [t for t in inputs if t.numel() < inputs[0].numel()]
            birth.rstd_max = max((summary(t)[1] for t in small if host(t)), default=None)
        if backward:
            birth.steep = self._steep.at(birth.place)
        self._wide = repeated(func, kept if kept is not None else args, kwargs)
        birth.fp32_ok, birth.fp32_max = judged(self._wide)
        if birth.eps is not None and birth.zero_divisor:
            birth.fp32_ok = True
        elif birth.zero_divisor and (backward or birth.dtype == "float16"):
            birth.fp32_ok = None  # the zero may itself be an FP16 rounding
        return birth

    # What a healthy step shows too

    def _see_cast(self, source: torch.Tensor, target: torch.Tensor) -> None:
        name = self._parameters.get(source.data_ptr())
        if name is None or not host(source):
            return
        self._casts[key(target)] = name
        nonzero = source != 0
        count = int(nonzero.sum().numpy())
        lost = int((nonzero & (target == 0)).sum().numpy())
        self.trace.flushed_weights[name] = lost / count if count else 0.0
        infinite = int((torch.isinf(target) & torch.isfinite(source)).sum().numpy())
        if infinite:
            self.trace.overflowed_weights[name] = infinite

    def _see_growth(self, outputs: list[torch.Tensor], summaries: list[tuple[int, float]]) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            sequence = getattr(node, "_sequence_nr", None)
            number = sequence() if sequence else -1
            place = self._nodes.get(number, (None, ""))[0]
            self._growth.see(node, number, place, outputs, max(m for _, m in summaries))


def _sequence() -> int | None:
    """Return the sequence number of the newest autograd node of this thread."""
    get = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return int(get()) - 1 if get is not None else None
