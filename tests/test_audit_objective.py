"""`ampscope.audit` takes a loss function in each form that people have at hand."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ampscope


@pytest.fixture
def batch():
    """A few inputs and classes."""
    made = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=made), torch.randint(0, 3, (8,), generator=made)


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def test_every_form_gives_the_same_table(batch):
    """`(model, batch)`, `(batch)`, `(batch, **defaults)`, a criterion module and a function of `torch.nn.functional`."""
    model = _model()
    forms = (
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        lambda b: F.cross_entropy(model(b[0]), b[1]),
        lambda b, smoothing=0.0: F.cross_entropy(model(b[0]), b[1], label_smoothing=smoothing),
        torch.nn.CrossEntropyLoss(),
        F.cross_entropy,
    )
    found = [ampscope.audit(model, f, batch) for f in forms]
    assert found[0].loss > 0
    for other in found[1:]:
        assert other.loss == found[0].loss
        assert np.array_equal(other.flushed, found[0].flushed)


@pytest.mark.parametrize(
    ("loss_fn", "given", "words"),
    [
        (torch.nn.CrossEntropyLoss(), torch.zeros(2, 6), "a criterion needs"),
        ("mse", None, "must be callable"),
        (lambda m, b: 3.0, None, "scalar tensor"),
        (lambda m, b: m(b[0]), None, "scalar tensor"),
        (lambda m, b: torch.zeros(()), None, "scalar tensor"),
    ],
)
def test_what_cannot_be_a_loss_is_said_in_one_line(batch, loss_fn, given, words):
    """And not as a stack trace of another fault."""
    with pytest.raises(ampscope.AmpscopeError, match=words) as said:
        ampscope.audit(_model(), loss_fn, batch if given is None else given)
    assert "\n" not in str(said.value)
