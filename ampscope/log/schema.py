"""The schema of the log: header, columns. docs/log-format.md has it as a table."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.errors import LogError
from ampscope.record.step import Layer

FORMAT_VERSION = 1
HEADER_KEY = b"ampscope"
CHECK_KEY = b"ampscope.check"

SCALARS = (
    "time", "loss", "loss_scale", "growth_tracker", "skipped", "micro_steps", "lr", "step_seconds", "overhead_seconds",
    "peak_memory_bytes", "grad_norm", "headroom_bits", "underflow_ratio", "zero_ratio", "nonfinite_layers",
)  # fmt: skip
"""float64 columns of every row."""

COUNTS = ("zeros", "nan", "pos_inf", "neg_inf", "subnormal", "low_octave", "lowest", "below_grid", "below_unscaled")
"""Columns of counts, one a layer."""

COUNT_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
"""Type of a count: the first unless a layer has 2^31 elements or more (it compresses to two thirds)."""

LAYER_COLUMNS: tuple[tuple[str, pa.DataType | None], ...] = (
    ("state", pa.uint8()),
    *((name, None) for name in COUNTS),
    ("max_abs", pa.float32()),
    ("sum_squares", pa.float64()),
    ("low_bits", pa.uint32()),
    ("zero_rows", pa.int32()),
    ("zero_cols", pa.int32()),
    ("median_bin", pa.uint8()),
)
"""Columns that hold a fixed-size list, one value a layer in layer order; None: a count's type."""


def layer_types(layers: Sequence[Layer]) -> dict[str, pa.DataType]:
    """Return the value type of every column in `LAYER_COLUMNS` for a stream of these layers."""
    count = count_type(layers)
    return {name: count if kind is None else kind for name, kind in LAYER_COLUMNS}


def count_type(layers: Sequence[Layer]) -> pa.DataType:
    """Return the type of counts in a stream of these layers."""
    large = any(layer.numel >= 1 << 31 for layer in layers)
    return pa.from_numpy_dtype(COUNT_DTYPES[large])


EVENT = pa.struct(
    [
        ("step", pa.int64()),
        ("kind", pa.utf8()),
        ("rank", pa.int32()),
        ("phase", pa.utf8()),
        ("layers", pa.list_(pa.utf8())),
        ("op", pa.utf8()),
        ("where", pa.utf8()),
        ("message", pa.utf8()),
        ("data", pa.utf8()),
    ]
)


@dataclass(frozen=True)
class Header:
    """What is known of a stream before its first row; JSON in the schema's metadata under `ampscope`."""

    layers: Sequence[Layer]
    session: int = 0
    rank: int = 0
    world_size: int = 1
    part: int = 0
    first_step: int = 0
    scaler: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    device_name: str = ""
    gradients: str = ""
    """ "replicated" (DDP: every rank holds the same; never add up), "sharded" (FSDP: add up) or "" (one process)."""
    settings: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    pid: int = 0
    host: str = ""
    kind: str = "gradients"
    version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """Return the header as JSON bytes."""
        return json.dumps(asdict(self), default=str).encode()

    @classmethod
    def from_json(cls, raw: bytes, path: str) -> Header:
        """Read a header back.

        Raises:
            LogError: it is damaged, or of a newer version.
        """
        try:
            data = json.loads(raw)
            version = int(data["version"])
        except (ValueError, KeyError, TypeError):
            raise LogError(f"{path}: the header is damaged") from None
        if version > FORMAT_VERSION:
            raise LogError(
                f"{path} was written in log format {version}; this ampscope reads up to {FORMAT_VERSION}: "
                "upgrade ampscope"
            )
        try:
            layers = [
                Layer(x["name"], tuple(map(int, x["shape"])), int(x["numel"]), str(x["dtype"]), str(x["optimizer"]))
                for x in data.pop("layers")
                if isinstance(x["name"], str)
            ]
            known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
            return cls(layers=layers, **known)
        except (KeyError, TypeError, ValueError):
            raise LogError(f"{path}: the header is damaged") from None

    @classmethod
    def from_schema(cls, schema: pa.Schema, path: str) -> Header:
        """Read the header back from a stream's schema.

        Raises:
            LogError: not an ampscope log, one of a newer version, or a damaged one.
        """
        metadata = schema.metadata or {}
        if HEADER_KEY not in metadata:
            raise LogError(f"{path} is not an ampscope log (no header in its schema)")
        header = cls.from_json(metadata[HEADER_KEY], path)
        if metadata.get(CHECK_KEY) != _check(metadata[HEADER_KEY], schema):
            raise LogError(f"{path}: the header is damaged")
        return header


def _check(header: bytes, schema: pa.Schema) -> bytes:
    """Return the CRC-32 of a header and the columns beside it, as eight hexadecimal digits."""
    columns = ";".join(f"{f.name}:{_kind(f.type)}" for f in schema)
    return b"%08x" % zlib.crc32(header + columns.encode())


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_fixed_size_list(kind):
        return f"{kind.value_type}[{kind.list_size}]"
    return "nested" if pa.types.is_nested(kind) else str(kind)


BASE = ("row", "is_step", "step", *SCALARS, "custom", "observed", "events", "has_histograms")
"""Columns a reader takes from every row; they come first, so that they are one stretch of a batch."""
HISTOGRAM_COLUMNS = ("hist_layer", "hist_first", "hist_length", "hist_counts", "hist_exact")


def make_schema(header: Header) -> pa.Schema:
    """Return the Arrow schema of a stream of `len(header.layers)` layers."""
    n = len(header.layers)
    fields = [pa.field("row", pa.int64()), pa.field("is_step", pa.bool_()), pa.field("step", pa.int64())]
    fields += [pa.field(name, pa.float64()) for name in SCALARS]
    fields += [
        pa.field("custom", pa.map_(pa.utf8(), pa.float64())),
        pa.field("observed", pa.map_(pa.utf8(), pa.float64())),
        pa.field("events", pa.list_(EVENT)),
        pa.field("has_histograms", pa.bool_()),
    ]
    fields += [pa.field(name, pa.list_(kind, n)) for name, kind in layer_types(header.layers).items()]
    count = count_type(header.layers)
    fields += [
        pa.field("weight_norm", pa.list_(pa.float32())),
        pa.field("probed_flushed", pa.list_(count)),
        pa.field("hist_layer", pa.list_(pa.int32())),
        pa.field("hist_first", pa.list_(pa.uint8())),
        pa.field("hist_length", pa.list_(pa.uint16())),
        pa.field("hist_counts", pa.list_(count)),
        pa.field("hist_exact", pa.list_(count)),
    ]
    schema = pa.schema(fields)
    raw = header.to_json()
    return schema.with_metadata({HEADER_KEY: raw, CHECK_KEY: _check(raw, schema)})


def buffers_a_column(schema: pa.Schema) -> list[int]:
    """Return how many buffers each column has in a record batch's message."""
    return [len(pa.array([], field.type).buffers()) for field in schema]
