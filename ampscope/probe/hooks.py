"""The only module that installs hooks, enters dispatch modes or swaps a class. What goes in here comes out again.

Every function returns a handle with `remove()`; removing twice is harmless. "Training is unchanged" rests on this file: a
swapped scaler calls its original methods with the user's own arguments, hooks return None, and errors pass unchanged.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Handle(Protocol):
    """Something installed that can be taken out."""

    def remove(self) -> None:
        """Take it out; harmless when it is out already."""


class Handles:
    """Several handles removed together."""

    def __init__(self, handles: Iterable[Handle] = ()) -> None:
        self._handles = list(handles)

    def add(self, handle: Handle) -> None:
        """Keep one more."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all of them."""
        while self._handles:
            self._handles.pop().remove()


class SwappedClass:
    """An object whose class was replaced, in place, by a subclass made for it alone."""

    def __init__(self, obj: Any, swapped: type, original: type) -> None:
        self.obj, self.swapped, self.original = obj, swapped, original

    def remove(self) -> None:
        """Give the object its own class back, unless somebody else changed it since."""
        if type(self.obj) is self.swapped:
            self.obj.__class__ = self.original


def swap_class(obj: Any, methods: dict[str, Any]) -> SwappedClass:
    """Give `obj` a subclass of its own class with `methods` added. `isinstance` and `type(obj).__name__` stay as they were.

    Pickles, copies and deep copies are of the original class: they load without ampscope and are not watched. (A class is
    swapped, since `with` looks methods up on the type, and since instance attributes would travel with copies.)
    """
    original = type(obj)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)  # type: ignore[call-arg]  # an unbound method
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        args = tuple(original if a is swapped else a for a in args)
        # pickle refuses __newobj__ and __newobj_ex__ with a class other than the object's own.
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            bare: Any = object.__new__
            if len(args) == 1 and original.__new__ is bare:
                make, args = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
            else:
                make, args = functools.partial(original.__new__, *args), ()
        elif make is copyreg.__newobj_ex__:  # type: ignore[attr-defined]
            cls, positional, named = args
            make, args = functools.partial(cls.__new__, cls, *positional, **named), ()
        return (original if make is swapped else make, args, *rest)

    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__slots__": (),
        "__reduce_ex__": __reduce_ex__,
        **methods,
    }
    metaclass: Any = type(original)
    swapped: type = metaclass(original.__name__, (original,), body)
    obj.__class__ = swapped
    return SwappedClass(obj, swapped, original)


def capturing() -> bool:
    """Whether a CUDA graph is being captured.

    What is launched then becomes part of the graph, and asking an event, or for pinned memory, breaks the capture.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def hands_off() -> bool:
    """Whether nothing may be done beside the user's own work: torch.compile traces this code, or a CUDA graph is being captured."""
    return bool(torch.compiler.is_compiling()) or capturing()


def wraps_method(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Keep name, docstring and signature of a wrapped scaler method (GradScaler inspects signatures of optimizers only)."""
    return functools.wraps(original, updated=())


def optimizer_steps(
    before: Callable[[torch.optim.Optimizer], None],
    after: Callable[[torch.optim.Optimizer], None],
    optimizer: torch.optim.Optimizer | None = None,
) -> Handles:
    """Call `before` and `after` around every `step()` of every optimizer of this process, or of one optimizer.

    An optimizer's own hooks do not travel with its copies and pickles. In a compiled `step` they are silent: a dispatch mode that is left
    within a compiled call leaves the process's dispatcher in disorder.
    """

    def pre(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not hands_off():
            before(optimizer)

    def post(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not hands_off():
            after(optimizer)

    if optimizer is not None:
        return Handles([optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)])
    return Handles([register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)])


def post_accumulate(params: Iterable[torch.Tensor], callback: Callable[[torch.Tensor], None]) -> Handles:
    """Call `callback(param)` whenever a gradient was accumulated into a leaf parameter (in backward order).

    A bound method is held weakly: a model that is kept does not keep a watch that is not.
    """
    call = _weakly(callback)

    def hook(param: torch.Tensor) -> None:
        call(param)

    leaves = [p for p in params if p.requires_grad and p.is_leaf]
    return Handles(p.register_post_accumulate_grad_hook(hook) for p in leaves)  # type: ignore[no-untyped-call]


def _weakly(callback: Callable[..., None]) -> Callable[..., None]:
    """Return a call of `callback` that does not keep a bound method's object alive."""
    if not isinstance(callback, MethodType):
        return callback
    weak = weakref.WeakMethod(callback)

    def call(*args: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return call


def on_backward(tensor: torch.Tensor, callback: Callable[[], None]) -> Handle | None:
    """Call `callback()` when a gradient with respect to `tensor` is computed; None where it takes no gradient."""
    if not tensor.requires_grad:
        return None

    def hook(grad: torch.Tensor) -> None:
        callback()

    return tensor.register_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def on_loss_backward(tensor: torch.Tensor, callback: Callable[[bool], None]) -> Handle | None:
    """Call `callback(accumulates)` when `tensor` is differentiated: True in `backward()`, False in `autograd.grad()`.

    A gradient penalty differentiates a scaled loss by `autograd.grad` that is never the objective of the step. Returns None where the
    tensor takes no gradient.
    """
    if not tensor.requires_grad:
        return None
    leaf = [_some_leaf(tensor)]

    def hook(grad: torch.Tensor) -> None:
        accumulates = _accumulates(leaf[0])
        leaf[0] = None  # the node holds its parameter
        callback(accumulates)

    return tensor.register_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def _some_leaf(tensor: torch.Tensor, most: int = 200) -> Any:
    """Return the accumulating node of a leaf that `tensor` depends on; None if none is found within a few hundred nodes.

    The way along last inputs is short in most graphs (weights come after inputs), the one along first inputs in most others.
    """
    for way in (-1, 0):
        node: Any = tensor.grad_fn
        for _ in range(most):
            following = [n for n, _ in node.next_functions if n is not None] if node is not None else []
            if not following:
                break
            node = following[way]
            if node.name().endswith("::AccumulateGrad"):
                return node
    return None


def _accumulates(leaf: Any) -> bool:
    """Whether the backward now running adds to the `.grad` of this leaf (taken for granted where it cannot be told)."""
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    if leaf is None or ask is None:
        return True
    try:
        return bool(ask(leaf))
    except RuntimeError:  # the leaf is an input of autograd.grad(): its gradient is captured
        return False


def on_gradient(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> Handle | None:
    """Call `callback(gradient)` when the gradient with respect to `tensor` is computed; None where it takes no gradient."""
    if not tensor.requires_grad:
        return None

    def hook(grad: torch.Tensor) -> None:
        callback(grad)

    return tensor.register_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def forward_pre(module: nn.Module, callback: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> Handle:
    """Call `callback(module, args, kwargs)` before a module's forward. Copies and pickles of the module are without it."""
    call = _weakly(callback)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch._C._get_tracing_state() and (torch.compiler.is_compiling() or not capturing()):
            call(module, args, kwargs)

    return _Hidden(module, module.register_forward_pre_hook(hook, with_kwargs=True))


def forward_post(module: nn.Module, callback: Callable[[nn.Module, tuple[Any, ...], Any], None]) -> Handle:
    """Call `callback(module, args, output)` after a module's forward, also when it raised (then output is None).

    Copies and pickles of the module are without it.
    """
    call = _weakly(callback)

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch._C._get_tracing_state() and (torch.compiler.is_compiling() or not capturing()):
            call(module, args, output)

    return _Hidden(module, module.register_forward_hook(hook, always_call=True))


class _Hidden:
    """A module's hook that its copies and pickles do not have."""

    def __init__(self, module: nn.Module, handle: RemovableHandle) -> None:
        self._module, self._handle = weakref.ref(module), handle
        reduce = module.__dict__.get("__reduce_ex__")
        if not isinstance(reduce, _Reduce):
            reduce = module.__dict__["__reduce_ex__"] = _Reduce(module)
        reduce.hidden.add(handle.id)

    def remove(self) -> None:
        """Remove the hook; with the last one the module pickles as it always did."""
        self._handle.remove()
        module = self._module()
        reduce = module.__dict__.get("__reduce_ex__") if module is not None else None
        if module is not None and isinstance(reduce, _Reduce):
            reduce.hidden.discard(self._handle.id)
            if not reduce.hidden:
                del module.__dict__["__reduce_ex__"]


class _Reduce:
    """`__reduce_ex__` of one module (copy.deepcopy and pickle ask the object first), which leaves our hooks out of its state."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.hidden: set[int] = set()

    def __call__(self, protocol: Any) -> Any:
        module = self._module()
        cls: Any = type(module)
        reduced = cls.__reduce_ex__(module, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = {k: self._without(v) if k.startswith("_forward") else v for k, v in reduced[2].items() if v is not self}
        return (*reduced[:2], state, *reduced[3:])

    def _without(self, hooks: Any) -> Any:
        if not isinstance(hooks, dict):
            return hooks
        return type(hooks)((k, v) for k, v in hooks.items() if k not in self.hidden)
