"""Where an operation belongs: the module stack around it and the user's file and line, from Python frames."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import torch

from ampscope.probe import names

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Place:
    """The modules around an operation, innermost first, and "file.py:line" of the user's code."""

    modules: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    where: str = ""
    function: str = ""
    scaling: bool = False
    """Inside `GradScaler.scale`."""
    recomputed: bool = False
    """A watched module's forward that runs inside backward (activation checkpointing)."""

    @property
    def module(self) -> str:
        """The innermost module, "" for the root or none."""
        return self.modules[0] if self.modules else ""


class Places:
    """Finds places; knows the watched modules by identity."""

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._names: dict[int, tuple[str, str]] = {}
        for prefix, root in models.items():
            for name, module in names.named_modules(root):
                full = f"{prefix}.{name}" if prefix and name else prefix or name
                self._names.setdefault(id(module), (full, type(module).__name__))

    def name_of(self, module: torch.nn.Module) -> str | None:
        """Return a watched module's name ("" for the root), or None."""
        found = self._names.get(id(module))
        return found[0] if found else None

    def here(self, backward: bool = False) -> Place:
        """Return the place of the operation that is being dispatched."""
        modules: list[str] = []
        types: list[str] = []
        where, function, scaling = "", "", False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            if backward and code.co_name == "_engine_run_backward":
                break
            if file.startswith(_TORCH):
                if code.co_name == "scale" and file.endswith("grad_scaler.py"):
                    scaling = True
            elif not where and not file.startswith(_HERE) and not file.startswith("<"):
                where, function = f"{short(file)}:{frame.f_lineno}", code.co_name
            if code.co_argcount and code.co_varnames[0] == "self":
                found = self._names.get(id(frame.f_locals.get("self")))
                if found is not None and (not modules or modules[-1] != found[0]):
                    modules.append(found[0])
                    types.append(found[1])
            frame = frame.f_back
        return Place(tuple(modules), tuple(types), where, function, scaling, backward and bool(modules))


def caller() -> str:
    """Return "file.py:line" of the innermost line that is neither torch's nor ampscope's; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            return f"{short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def short(path: str) -> str:
    """Return a path relative to the working directory, or its last part where it lies elsewhere."""
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return os.path.basename(path)
    return os.path.basename(path) if relative.startswith("..") else relative
