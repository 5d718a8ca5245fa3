"""Usage faults seen from outside: what the rules on ranks, sessions and devices need, and what must not be taken for a fault."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from ampscope.analysis.rules import scale, setup
from ampscope.analysis.rules.context import Facts
from ampscope.probe.factors import divides
from ampscope.probe.stamps import Sizes
from ampscope.probe.state import _steps_behind, has_tensor_cores
from ampscope.record.step import Event
from tests.cases.common import MLP, half
from tests.casing import play
from tests.healthy import RUNS


@pytest.mark.parametrize(
    ("name", "major", "cores"),
    [
        ("Tesla P100-PCIE", 6, False),
        ("Tesla V100", 7, True),
        ("NVIDIA GeForce GTX 1660 Ti", 7, False),
        ("NVIDIA GeForce RTX 2080", 7, True),
        ("NVIDIA H100", 9, True),
    ],
)
def test_gpus_with_and_without_fp16_tensor_cores(name, major, cores):
    """From compute capability 7.0 on, the GeForce 16 series excepted."""
    assert has_tensor_cores(name, major) is cores


def test_a_gpu_without_tensor_cores_is_told_as_info(tmp_path):
    """The rule needs the note and FP16 in use."""
    facts = Facts(play(lambda watch: RUNS["mlp"](watch, 0), tmp_path).run)
    assert setup.tensor_cores(facts) is None
    note = Event(
        0,
        "note",
        phase="usage",
        message="Tesla P100 has none",
        data={"topic": "usage", "what": "no_tensor_cores", "capability": [6, 0]},
    )
    facts.by_topic.setdefault("usage", []).append(note)
    found = setup.tensor_cores(facts)
    assert (found.rule, found.severity) == ("no-fp16-tensor-cores", "info")


class Ranks:
    """A run of two ranks, made of one recorded run; rank 1 skips at one step more."""

    def __init__(self, run, differ):
        self._run, self._differ = run, differ
        self.ranks = [0, 1]

    def __getattr__(self, name):
        return getattr(self._run, name)

    def scalar(self, name, rank=None):
        values = self._run.scalar(name).copy()
        if rank == 1 and self._differ:
            if name == "skipped":
                values[10] = 1.0
            if name == "loss_scale":
                values[11:] /= 2
        return values


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_that_disagree_are_told(differ, tmp_path):
    """One rank saw an inf that the other did not: from then on their scales differ."""
    run = play(lambda watch: RUNS["mlp"](watch, 0), tmp_path).run
    found = scale.ranks(Facts(Ranks(run, differ)))
    if not differ:
        assert found is None
    else:
        assert (found.rule, found.steps) == ("scales-differ-across-ranks", (10, 39, 30))


@pytest.mark.parametrize("how", ["times", "division", "tensor", "none", "other"])
def test_a_division_by_the_scale_is_found_in_a_graph(how):
    """By a Python number or a tensor; another factor is not taken for it."""
    factor = torch.tensor(64.0)
    g = torch.randn(3, requires_grad=True)
    done = {"times": g * (1 / 64.0), "division": g / 64.0, "tensor": g * (1.0 / factor), "none": g, "other": g * 0.5}[
        how
    ]
    assert divides((done * 2.0).pow(2).sum(), factor) is (how in ("times", "division", "tensor"))


def test_gradients_kept_in_an_accumulation_are_not_stale(tmp_path):
    """An overflow in the middle of an accumulation, cleared in time, accuses nobody."""

    def main(watch):
        torch.manual_seed(0)
        model = MLP(8, 16, 1)
        opt = torch.optim.SGD(model.parameters(), 1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        watch(scaler, model)
        for i in range(40):
            with half():
                loss = model(torch.randn(8, 8)).float().pow(2).mean() * (1e8 if i == 17 else 1.0)
            scaler.scale(loss / 4).backward()
            if i % 4 == 3:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=False)

    outcome = play(main, tmp_path)
    assert "grads_kept" not in outcome.run.scalars
    assert outcome.serious == []


@pytest.mark.parametrize(
    "name",
    ["clip_before_unscale", "stale_nonfinite_grads", "scale_changed_within_accumulation", "optimizer_without_grads"],
)
def test_a_fault_of_the_loop_names_a_line_of_it(name, tmp_path):
    """Where the call itself is not seen, the line that steps the optimizer tells which loop it is."""
    case = importlib.import_module(f"tests.cases.{name}")
    found = play(case.main, tmp_path, **case.VARIANTS[0]).first
    assert found.where.startswith("tests/cases/")


@pytest.mark.parametrize(
    ("make", "behind"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0.0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), None),
        (lambda p: torch.optim.Adam(p, 0.1), 2.0),
    ],
    ids=["no state", "no counter", "counter"],
)
def test_steps_an_optimizer_has_behind_it(make, behind):
    """Counted where its state counts them, not made up where it does not."""
    weight = nn.Parameter(torch.ones(3))
    opt = make([weight])
    assert _steps_behind(opt) == 0.0
    for _ in range(2):
        weight.grad = torch.ones(3)
        opt.step()
    assert _steps_behind(opt) == behind


def test_sizes_see_a_division_through_data():
    """The ratio is that of the largest elements, of any means by which they were changed; None where nothing was noted."""
    weights = [nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(7))]
    sizes = Sizes(weights)
    assert sizes.ratio(weights) is None
    for weight in weights:
        weight.grad = torch.arange(weight.numel(), dtype=torch.float32).reshape(weight.shape)
        sizes.note(weight)
    assert float(sizes.ratio(weights)) == 1.0
    for weight in weights:
        weight.grad.data.div_(64.0)
    assert float(sizes.ratio(weights)) == 1 / 64


def test_sizes_of_sparse_and_empty_gradients():
    """A sparse gradient is left out, an empty one counts as zero."""
    weights = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(()))]
    weights[0].grad = torch.sparse_coo_tensor([[1]], [[1.0, 2.0]], (4, 2))
    weights[1].grad, weights[2].grad = torch.zeros(0), torch.tensor(8.0)
    sizes = Sizes(weights)
    for weight in weights:
        sizes.note(weight)
    weights[2].grad.mul_(0.5)
    assert float(sizes.ratio(weights)) == 0.5
