"""Who takes part in a run: parameters, their layers, and the optimizers that hold them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ampscope.probe import names
from ampscope.probe.stats import remember
from ampscope.record.step import Layer


class Plan:
    """The parameters of one optimizer as last seen, and their layers."""

    __slots__ = ("_looks", "groups", "index", "kind", "label", "last", "optimizer", "params", "places", "whole")

    def __init__(
        self, optimizer: torch.optim.Optimizer, label: str, params: list[torch.Tensor], index: list[int]
    ) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.label = label
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self.params = params
        self.places = index
        self.index, self.whole = np.array(index, np.int64), frozenset(index)
        self.last = remember()
        self._looks = [(p.shape, p.dtype) for p in params]

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the optimizer still holds exactly these parameters (300 of them take 10 µs to compare)."""
        return len(groups) == len(self.groups) and all(
            len(mine) == len(group["params"]) and all(map(operator.is_, mine, group["params"]))
            for mine, group in zip(self.groups, groups, strict=True)
        )

    def looks_as_before(self) -> bool:
        """Whether the parameters' shapes and dtypes are those of before (`param.data = ...` changes them beneath the same object)."""
        return self._looks == [(p.shape, p.dtype) for p in self.params]


class Roster:
    """Parameters (`parameters`), their `layers` in the same order, and every optimizer seen so far.

    Optimizers are held weakly: one that the user makes anew each epoch takes its state with it. `changed` is set when layers were
    added or described anew; whoever hands the layers on clears it.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.models = models
        self.optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
        self.changed = False
        self._plans: dict[int, Plan] = {}
        self._made = 0
        found = names.collect(models)
        self.parameters: list[torch.Tensor] = [p for _, p in found]
        self.layers: list[Layer] = [names.make_layer(n, p) for n, p in found]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._places = {layer.name: i for i, layer in enumerate(self.layers)}
        self._cuda: list[torch.device] | None = None
        self.weights = remember()
        """For `stats.measure` of the parameters."""

    def index(self, param: torch.Tensor) -> int | None:
        """Return the layer of a parameter, or None."""
        return self._index.get(id(param))

    def label(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the optimizer's name in the log, e.g. "Adam.0"."""
        known = self._plans.get(id(optimizer))
        return known.label if known is not None and known.optimizer() is optimizer else self.plan(optimizer).label

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer was seen before or holds a watched parameter."""
        if self.optimizers.get(id(optimizer)) is optimizer:
            return True
        known = self._index
        return any(id(p) in known for group in optimizer.param_groups for p in group["params"])

    def plan(self, optimizer: torch.optim.Optimizer, closely: bool = False) -> Plan:
        """Return the optimizer's parameters, looked up anew where it is new or its groups have changed; `closely`: or they themselves."""
        old = self._plans.get(id(optimizer))
        if old is not None and old.optimizer() is optimizer and old.fits(optimizer.param_groups):
            if not closely or old.looks_as_before():
                return old
            for at, param in zip(old.places, old.params, strict=True):
                self.layers[at] = names.make_layer(self.layers[at].name, param, old.label)
            self.changed = True
        return self._learn(optimizer, old)

    def _learn(self, optimizer: torch.optim.Optimizer, old: Plan | None) -> Plan:
        label = old.label if old is not None and old.optimizer() is optimizer else self._new_label(optimizer)
        self.optimizers[id(optimizer)] = optimizer
        params: list[torch.Tensor] = []
        index: list[int] = []
        renamed: dict[int, str] | None = None
        for g, i, param in names.optimizer_parameters(optimizer):
            at = self._index.get(id(param))
            if at is None:
                if renamed is None:  # a module added since, or parameters replaced by model.to()
                    renamed = {id(p): n for n, p in names.collect(self.models)}
                at = self._add(param, renamed.get(id(param)), f"optimizer.{g}.{i}", label)
            elif self.layers[at].optimizer != label or self.layers[at].numel == 0:
                self.layers[at] = names.make_layer(self.layers[at].name, param, label)
                self.changed = True
            params.append(param)
            index.append(at)
        plan = self._plans[id(optimizer)] = Plan(optimizer, label, params, index)
        self._cuda = None
        return plan

    def _new_label(self, optimizer: torch.optim.Optimizer) -> str:
        """An optimizer made anew for the same parameters goes on under its old name."""
        first = next((id(p) for _, _, p in names.optimizer_parameters(optimizer)), 0)
        for key, plan in list(self._plans.items()):
            if (
                plan.optimizer() is None
                and plan.kind == type(optimizer).__name__
                and plan.params
                and id(plan.params[0]) == first
            ):
                del self._plans[key]
                return plan.label
        self._made += 1
        return f"{type(optimizer).__name__}.{self._made - 1}"

    def _add(self, param: torch.Tensor, named: str | None, unnamed: str, label: str) -> int:
        """Add a parameter met in an optimizer; one that took the place of another under its name takes its layer."""
        self.changed = True
        if named is not None and named in self._places:
            at = self._places[named]
            self._index.pop(id(self.parameters[at]), None)  # its id may be another parameter's soon
            self.parameters[at] = param
            self.layers[at] = names.make_layer(named, param, label)
        else:
            name = named or unnamed
            if name in self._places:
                name = f"optimizer.{label}.{unnamed.removeprefix('optimizer.')}"
            at = self._places[name] = len(self.parameters)
            self.parameters.append(param)
            self.layers.append(names.make_layer(name, param, label))
        self._index[id(param)] = at
        return at

    def without_gradient(self) -> list[int]:
        """Return the layers that no optimizer holds and that have no gradient."""
        return [i for i, layer in enumerate(self.layers) if not layer.optimizer and self.parameters[i].grad is None]

    def cuda_devices(self) -> list[torch.device]:
        """Return the CUDA devices that hold parameters."""
        if self._cuda is None:
            self._cuda = list({p.device for p in self.parameters if p.device.type == "cuda"})
        return self._cuda
