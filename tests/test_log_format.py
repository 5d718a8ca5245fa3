"""docs/log-format.md against the code: every column with its type, every header field, metric, tag and observed name."""

import re
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pytest

from ampscope.log import schema
from ampscope.log.schema import BASE, Header, make_schema
from ampscope.log.streams import STREAM
from ampscope.log.tensorboard import LAYER_TAGS, TAGS
from ampscope.record.step import Event, Layer
from ampscope.run.metrics import METRICS
from tests.helpers_log import make_layers

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "log-format.md").read_text(encoding="utf-8")


def section(title):
    """Return the text of a section."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M)[1]


def named(text):
    """Return everything in backquotes in the first column of the tables of a text."""
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]


def describe(kind, count):
    """Return a type as the table writes it."""
    if pa.types.is_fixed_size_list(kind):
        return f"{'count' if kind.value_type == count and kind.value_type == COUNT else kind.value_type}[L]"
    if pa.types.is_map(kind):
        return "map<utf8, double>"
    if pa.types.is_list(kind):
        return "list<struct>" if pa.types.is_struct(kind.value_type) else f"list<{kind.value_type}>"
    return str(kind)


COUNT = schema.count_type(make_layers(1))


def test_the_table_of_columns_is_exact():
    """Names, order and types; a count is told by the columns that change with the layers' size."""
    small, large = (make_schema(Header([Layer("a", (n,), n, "float32")] * 3)) for n in (8, 1 << 31))
    want = []
    for a, b in zip(small, large, strict=True):
        text = describe(a.type, None)
        if a.type != b.type:
            assert (str(COUNT), "int64") == (str(a.type.value_type), str(b.type.value_type))
            text = text.replace(str(COUNT), "count")
        want.append((a.name, text))
    lines = [line for line in section("Columns").split("Names in `observed`")[0].splitlines() if line.startswith("| `")]
    have = [tuple(cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:3]) for line in lines]
    assert have == want


def test_base_columns_come_first():
    """They are one stretch of a batch, read at once."""
    assert tuple(make_schema(Header(make_layers(2))).names[: len(BASE)]) == BASE


def test_header_fields_are_documented():
    """Every one, and no other."""
    assert sorted(named(section("Header"))) == sorted(f.name for f in fields(Header))


def test_event_fields_are_documented():
    """In the row of `events`."""
    row = next(line for line in TEXT.splitlines() if line.startswith("| `events`"))
    assert set(re.findall(r"`(\w+)`", row)) - {"events"} == {f.name for f in fields(Event)}
    assert [f.name for f in schema.EVENT] == [f.name for f in fields(Event)]


def test_metrics_and_tags_are_documented():
    """Every one, and no other."""
    assert sorted(named(section("Layer metrics"))) == sorted(METRICS)
    tags = [f"amp/{t}" for t in TAGS] + [f"{t}/LAYER" for t in LAYER_TAGS]
    assert sorted(named(section("TensorBoard"))) == sorted(tags)


def test_observed_names_are_documented():
    """Every name the probe passes to `observe`, found in its source."""
    used = set()
    for file in (ROOT / "ampscope" / "probe").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        for call in re.findall(r"\bobserve\((.*)", source) + re.findall(r"observed\[(.*?)\] ?=", source):
            used |= {re.sub(r"\{[^}]*\}", "*", s) for s in re.findall(r'f?"([^"]+)"', call)}
    documented = {re.sub(r"[A-Z]{2,}", "*", n) for n in named(TEXT.split("Names in `observed`")[1].split("## ")[0])}
    assert used - {"*"} <= documented, "add the names to the table in docs/log-format.md"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("ampscope-0-rank0.arrows", ("0", "0", None, None)),
        ("ampscope-12-rank3-part4.arrows", ("12", "3", "4", None)),
        ("ampscope-0-rank0.activations.arrows", ("0", "0", None, "activations")),
        ("ampscope-0-rank0.tail.arrows", None),
        ("ampscope-0-rank0.lock", None),
        (".ampscope-0-rank0.arrows.9.new", None),
    ],
)
def test_file_names_of_streams(name, want):
    """Tails, locks and half-made files are not taken for streams."""
    found = STREAM.match(name)
    assert (found.groups() if found else None) == want
