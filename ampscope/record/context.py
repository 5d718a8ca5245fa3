"""What the underflow estimate knows of the layers beside their counts: their order in backward, and who reads whose output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.record.step import Layer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Context:
    """Layers as the estimate sees them. All arrays have length L; indices are of layers, -1 where there is none."""

    order: Array
    """int64: layer indices in backward order."""
    reader: Array
    """int64: the matrix that reads this layer's output, so that its columns are this layer's rows."""
    owner: Array
    """int64: of a vector, the matrix of the same module with as many rows (its elements are those rows' biases)."""
    matrix: Array
    """bool: two or more dimensions."""
    table: Array
    """bool: rows are looked up (embeddings); an empty row was not."""
    bottleneck: Array
    """bool: fewer than half as many rows as columns, or as its reader's rows: a low-rank factor, its partner often zero at first."""
    adrift: Array
    """bool: no reader was found although matrices come before it in backward order: nothing can explain its empty rows."""
    rows: Array
    """int64: shape[0], or 1."""
    numel: Array
    """int64."""
    summed: bool = False
    """Gradients are averaged over ranks, so that their mantissa bits tell nothing."""

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        backward_order: Sequence[str] = (),
        tables: Sequence[str] = (),
        summed: bool = False,
    ) -> Context:
        """Describe layers. Without a known backward order, registration order is turned round."""
        index = {layer.name: i for i, layer in enumerate(layers)}
        known = list(dict.fromkeys(index[n] for n in backward_order if n in index))
        seen = set(known)
        owner = _owners(layers)
        order = _vectors_first(known + [i for i in reversed(range(len(layers))) if i not in seen], owner)
        reader = _readers(layers, order)
        shapes = [layer.shape for layer in layers]
        matrix = np.array([len(s) >= 2 for s in shapes], bool)
        bottleneck = np.array([_bottleneck(layers, i, int(r)) for i, r in enumerate(reader)], bool)
        place = np.empty(len(layers), np.int64)
        place[order] = np.arange(len(layers))
        first = place[matrix].min() if matrix.any() else len(layers)
        adrift = (reader < 0) & (place > first)
        for property_ in (bottleneck, adrift):
            property_[owner >= 0] = property_[owner[owner >= 0]]
        looked_up = set(tables)
        return cls(
            np.array(order, np.int64), reader, owner, matrix, np.array([x.name in looked_up for x in layers], bool), bottleneck, adrift,
            np.array([s[0] if len(s) >= 2 else 1 for s in shapes], np.int64), np.array([x.numel for x in layers], np.int64), summed,
        )  # fmt: skip


def _readers(layers: Sequence[Layer], order: Sequence[int]) -> Array:
    """Return, for each layer, the latest matrix before it in backward order whose shape[1] is its shape[0].

    Where none fits, the matrix right before it, if its shape[1] is a multiple (feature maps that were flattened).
    """
    reader = np.full(len(layers), -1, np.int64)
    latest: dict[int, int] = {}
    last = -1
    for i in order:
        shape = layers[i].shape
        if shape:
            reader[i] = latest.get(shape[0], -1)
            if reader[i] < 0 and last >= 0 and shape[0] > 1 and layers[last].shape[1] % shape[0] == 0:
                reader[i] = last
        if len(shape) >= 2:
            latest[shape[1]] = last = i
    return reader


def _vectors_first(order: Sequence[int], owner: Array) -> list[int]:
    """Return the order with each vector right before the matrix of its module: autograd reaches the two together, in either order."""
    owned: dict[int, list[int]] = {}
    for i in order:
        owned.setdefault(int(owner[i]), []).append(i)
    return [j for i in order if owner[i] < 0 for j in (*owned.get(i, ()), i)]


def _owners(layers: Sequence[Layer]) -> Array:
    """Return, for each vector, the matrix of its module with as many rows."""
    matrices: dict[tuple[str, int], int] = {}
    for i, layer in enumerate(layers):
        if len(layer.shape) >= 2:
            matrices.setdefault((layer.name.rpartition(".")[0], layer.shape[0]), i)
    found = [matrices.get((x.name.rpartition(".")[0], x.shape[0]), -1) if len(x.shape) == 1 else -1 for x in layers]
    return np.array(found, np.int64)


def _bottleneck(layers: Sequence[Layer], i: int, reader: int) -> bool:
    shape = layers[i].shape
    if reader < 0 or len(shape) != 2 or len(layers[reader].shape) != 2:
        return False
    return 2 * shape[0] <= min(shape[1], layers[reader].shape[0])
