"""`ampscope export`: what is in the file is what is in the run, and a file is whole or not there."""

import csv
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

import ampscope
from ampscope.cli import export
from ampscope.cli.main import main
from ampscope.record.step import Layer
from tests.helpers_log import bulk_run, make_layers, records, write_run


@pytest.fixture
def run(tmp_path):
    """Return a run with skips, NaN, custom scalars and unsampled steps."""
    layers = make_layers(3)
    rows = records(25, layers, skip=[4], nan={9: 1}, no_grad={6: 0}, every=2)
    rows[2].custom = {"accuracy": 0.5, "step": 7.0, "grad_norm/block.0.weight": 1.0}
    return ampscope.open_run(write_run(tmp_path / "logs", layers, rows))


def same(a, b):
    """Assert equality, NaN included."""
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_parquet_holds_every_scalar_and_metric(run, tmp_path, capsys):
    """Column by column, bit for bit; one line says what was written."""
    file = tmp_path / "run.parquet"
    assert main(["export", str(run.path), "-o", str(file)]) == 0
    table = pq.read_table(file)
    same(table["step"], run.steps)
    for name in run.scalars:
        column = f"logged/{name}" if name in ("step", "grad_norm/block.0.weight") else name
        same(table[column], run.scalar(name))
    for metric in run.metrics:
        values = run.metric(metric)
        for i, layer in enumerate(run.layers):
            same(table[f"{metric}/{layer.name}"], values[:, i])
    assert len(set(table.column_names)) == len(table.column_names) == 1 + len(run.scalars) + len(run.metrics) * 3
    assert table.schema.metadata[b"ampscope.run"] == b"run"
    out, err = capsys.readouterr()
    assert out == f"{file}: run run, 25 rows, {table.num_columns} columns, {file.stat().st_size:,} bytes\n"
    assert err == ""


def test_csv_holds_the_same_in_full_precision(run, tmp_path):
    """Numbers read back equal; NaN and inf are there as such."""
    file = tmp_path / "run.csv"
    assert main(["export", str(run.path), "-o", str(file), "--metric", "grad_norm", "--metric", "headroom_bits"]) == 0
    with open(file, encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))
    assert [int(r["step"]) for r in rows] == run.steps.tolist()
    same([float(r["loss"]) for r in rows], run.scalar("loss"))
    norm = np.array([[float(r[f"grad_norm/{x.name}"]) for x in run.layers] for r in rows], np.float32)
    same(norm, run.metric("grad_norm"))
    assert math.isnan(norm[6, 0])
    assert float(rows[4]["headroom_bits/block.1.weight"]) == -math.inf
    assert not any(c.startswith("zero_ratio/") for c in rows[0])


def test_without_layers_there_are_scalars_alone(run, tmp_path):
    """`--metric none`."""
    file = tmp_path / "run.parquet"
    assert main(["export", str(run.path), "-o", str(file), "--metric", "none"]) == 0
    assert pq.read_table(file).num_columns == 1 + len(run.scalars)


def test_it_is_written_piece_by_piece(tmp_path, monkeypatch):
    """A large run never stands in memory whole; the pieces make the whole."""
    monkeypatch.setattr(export, "VALUES_AT_ONCE", 5000)
    path = bulk_run(tmp_path / "logs", 700, 4)
    run = ampscope.open_run(path)
    sizes = [t.num_rows for t in export.Pieces(run, ["grad_norm"])]
    assert len(sizes) > 2
    assert sum(sizes) == 700
    file = tmp_path / "x.parquet"
    assert main(["export", str(path), "-o", str(file), "--metric", "grad_norm"]) == 0
    assert pq.ParquetFile(file).num_row_groups == len(sizes)
    same(pq.read_table(file)["grad_norm/block.1.bias"], run.metric("grad_norm")[:, 3])


def test_nothing_is_overwritten_without_force(run, tmp_path, capsys):
    """The old file stays as it is, and the message names the option."""
    file = tmp_path / "run.csv"
    file.write_text("precious")
    assert main(["export", str(run.path), "-o", str(file)]) == 2
    assert file.read_text() == "precious"
    assert capsys.readouterr().err == f"ampscope: {str(file)!r} exists: pass --force to overwrite it\n"
    assert main(["export", str(run.path), "-o", str(file), "--force"]) == 0
    assert file.read_text().startswith('"step"')


def test_a_failure_leaves_the_old_file_and_no_part(run, tmp_path, monkeypatch):
    """A disk that fills up midway."""
    file = tmp_path / "run.csv"
    file.write_text("precious")

    class Full:
        def __init__(self, path, schema):
            path.write_text("half")

        def write(self, table):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(export, "csv", Full)
    assert main(["export", str(run.path), "-o", str(file), "--force"]) == 2
    assert file.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "run.csv"]


def test_runs_and_ranks_are_chosen(tmp_path):
    """`--run` and `--rank`; what does not exist is one line."""
    layers = make_layers(2)
    write_run(tmp_path, layers, records(5, layers), name="old")
    for rank in (0, 1):
        write_run(tmp_path, layers, records(7, layers, seed=rank), name="new", rank=rank, world_size=2, launch_key="k")
    run = ampscope.open_run(tmp_path / "new")
    one = tmp_path / "one.parquet"
    assert main(["export", str(tmp_path), "-o", str(one), "--run", "old"]) == 0
    assert pq.read_table(one).num_rows == 5
    two = tmp_path / "two.parquet"
    assert main(["export", str(tmp_path), "-o", str(two), "--run", "new", "--rank", "1"]) == 0
    same(pq.read_table(two)["grad_norm/block.0.bias"], run.metric("grad_norm", 1)[:, 1])
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "x.csv"), "--run", "new", "--rank", "5"]) == 2
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "x.csv"), "--metric", "nope"]) == 2
    assert main(["export", str(tmp_path), "-o", str(tmp_path), "--force"]) == 2
    assert not (tmp_path / "x.csv").exists()


def test_hostile_names_are_quoted(tmp_path):
    """Quotes, commas and line breaks in a layer's name stay within its column."""
    name = 'a"b,c\nd'
    layers = [Layer(name, (4, 16), 64, "float32", "")]
    path = write_run(tmp_path, layers, records(3, layers))
    file = tmp_path / "x.csv"
    assert main(["export", str(path), "-o", str(file), "--metric", "grad_norm"]) == 0
    with open(file, encoding="utf-8", newline="") as text:
        assert f"grad_norm/{name}" in next(csv.reader(text))


def test_a_run_without_steps_makes_an_empty_table(tmp_path):
    """The columns are there, the rows are not."""
    path = write_run(tmp_path, make_layers(2), [])
    for ending in ("csv", "parquet"):
        assert main(["export", str(path), "-o", str(tmp_path / f"x.{ending}")]) == 0
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 0
