"""The arguments of `watch`, checked: each fault is one line that says what is wrong and what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ampscope.errors import AmpscopeError
from ampscope.probe import names

WATCHED = "_ampscope_watch"
"""Attribute of a watched scaler's class."""


def check(scaler: Any, models: Mapping[str, torch.nn.Module], **options: Any) -> None:
    """Check everything but `model` (see `names.as_models`) and the folder.

    Raises:
        AmpscopeError: an argument is wrong.
    """
    for name, least in (("every", 1), ("exponents_every", 1), ("probe_every", 0)):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AmpscopeError(f"watch(): {name} must be an integer of at least {least}, not {value!r}")
    step = options["step"]
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise AmpscopeError(f"watch(): step must be a non-negative integer or None, not {step!r}")
    if not isinstance(options["activations"], bool):
        raise AmpscopeError(f"watch(): activations must be True or False, not {options['activations']!r}")
    board = options["tensorboard"]
    if not isinstance(board, bool) and not callable(getattr(board, "add_scalar", None)):
        kind = type(board).__name__
        raise AmpscopeError(f"watch(): tensorboard must be True, False or a SummaryWriter, not {kind}")
    if not isinstance(options["log_dir"], (str, os.PathLike)):
        raise AmpscopeError(f"watch(): log_dir must be a path, not {type(options['log_dir']).__name__}")
    optimizer = options["optimizer"]
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise AmpscopeError(f"watch(): optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is None:
        _check_optimizer(optimizer, models)
    else:
        _check_scaler(scaler)


def _check_optimizer(optimizer: torch.optim.Optimizer | None, models: Mapping[str, torch.nn.Module]) -> None:
    if optimizer is None:
        raise AmpscopeError("watch(): with scaler=None pass optimizer=, whose steps delimit the records")
    known = {id(p) for _, p in names.collect(models)}
    if not any(id(p) in known for _, _, p in names.optimizer_parameters(optimizer)):
        raise AmpscopeError(
            "watch(): optimizer= holds none of the model's parameters; pass the optimizer that trains this model"
        )


def _check_scaler(scaler: Any) -> None:
    if isinstance(scaler, torch.nn.Module):
        raise AmpscopeError("watch(): the first argument is a module; the call is watch(scaler, model)")
    if isinstance(scaler, type):
        raise AmpscopeError(f"watch(): the first argument is a class; pass a scaler, {scaler.__name__}(...)")
    if not isinstance(scaler, torch.amp.GradScaler):
        kind = type(scaler).__name__
        raise AmpscopeError(f"watch(): the first argument must be a torch.amp.GradScaler or None, not {kind}")
    if getattr(type(scaler), WATCHED, None) is not None:
        raise AmpscopeError("watch(): this scaler is watched already; call ampscope.unwatch(scaler) first")
