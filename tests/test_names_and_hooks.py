"""Names of parameters, and hooks that leave no trace."""

import copy
import gc
import pickle

import torch
from torch import nn

from ampscope.probe import hooks, names


class Holder(nn.Module):
    """A user's module with a submodule called `module`."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.DataParallel(nn.Linear(2, 1))


class Wrapper(nn.Module):
    """Looks like a checkpoint wrapper by name."""

    def __init__(self, inner):
        super().__init__()
        self._checkpoint_wrapped_module = inner


CheckpointWrapper = type("CheckpointWrapper", (Wrapper,), {})


def listed(module):
    """Return the names."""
    return [n for n, _ in names.named_parameters(module)]


def test_only_wrappers_prefixes_go():
    """`module` of a user's own stays, also inside a wrapper, and wrappers inside others go."""
    plain = ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert listed(Holder()) == plain
    assert listed(nn.DataParallel(Holder())) == plain
    assert listed(torch.compile(nn.DataParallel(Holder()), backend="eager")) == plain
    assert listed(nn.Sequential(CheckpointWrapper(nn.Linear(1, 1)))) == ["0.weight", "0.bias"]


def test_names_are_those_of_named_parameters():
    """Same names, same order, tied ones once."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model.layers[1].linear1.weight = model.layers[0].linear1.weight
    assert listed(model) == [n for n, _ in model.named_parameters()]
    shared = nn.ModuleDict({"a": nn.Linear(1, 1)})
    shared["b"] = shared["a"]
    assert listed(shared) == [n for n, _ in shared.named_parameters()]


def test_flat_parameters_of_wrappers_have_the_wrappers_place():
    """FSDP keeps `_flat_param` on the wrapper: one name each."""
    inner = nn.Sequential(nn.ReLU(), nn.ReLU())
    for i in range(2):
        fsdp = type("FullyShardedDataParallel", (nn.Module,), {})()
        fsdp._fsdp_wrapped_module = inner[i]
        fsdp._flat_param = nn.Parameter(torch.zeros(3))
        inner[i] = fsdp
    assert listed(inner) == ["0._flat_param", "1._flat_param"]


def test_complex_and_sharded_parameters_are_counted_in_reals():
    """Two a complex element."""
    layer = names.make_layer("c", torch.zeros(3, 2, dtype=torch.complex64))
    assert (layer.numel, layer.shape, layer.dtype) == (12, (3, 2), "complex64")


class Listener:
    """Counts calls."""

    def __init__(self):
        self.calls = 0

    def called(self, *args):
        """Count."""
        self.calls += 1


def test_module_hooks_are_not_in_copies_and_pickles():
    """Those of the user's are, in their order; afterwards nothing is left."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].register_forward_hook(print)
    before = pickle.dumps(model)
    listener = Listener()
    handles = hooks.Handles(
        [
            hooks.forward_pre(model, listener.called),
            hooks.forward_post(model, listener.called),
            hooks.forward_post(model[0], listener.called),
        ]
    )
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(nn.ModuleList([model]))[0]]
    for other in made:
        assert not other._forward_hooks
        assert not other._forward_pre_hooks
        assert not other._forward_pre_hooks_with_kwargs
        assert not other._forward_hooks_always_called
        assert list(other[0]._forward_hooks.values()) == [print]
        assert "__reduce_ex__" not in other.__dict__
        assert torch.equal(other[0].weight, model[0].weight)
    model[0]._forward_hooks.popitem(last=False)
    for other in made:
        other[0]._forward_hooks.clear()
        other(torch.ones(1, 2))
    assert listener.calls == 0
    model(torch.ones(1, 2))
    assert listener.calls == 3
    handles.remove()
    handles.remove()
    model(torch.ones(1, 2))
    assert listener.calls == 3
    assert "__reduce_ex__" not in model.__dict__
    model[0].register_forward_hook(print)
    assert len(pickle.dumps(model)) == len(before)


def test_hooks_do_not_keep_their_listener_alive():
    """A model that is kept does not keep a watch that is not."""
    import weakref

    model = nn.Linear(1, 1)
    listener = Listener()
    hooks.forward_pre(model, listener.called)
    hooks.post_accumulate(model.parameters(), listener.called)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    model(torch.ones(1, 1)).sum().backward()


def test_accumulation_hooks_fire_in_backward_order():
    """And are gone when removed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen = []
    handle = hooks.post_accumulate(model.parameters(), seen.append)
    model(torch.ones(1, 2)).sum().backward()
    assert [next(i for i, p in enumerate(model.parameters()) if p is s) for s in seen][-1] in (0, 1)
    assert len(seen) == 4
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 4


def test_optimizers_hooks_are_not_in_their_copies():
    """One optimizer's, and everybody's."""
    a, b = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1) for _ in range(2))
    one, all_ = [], []
    handles = [
        hooks.optimizer_steps(one.append, one.append, a),
        hooks.optimizer_steps(all_.append, all_.append),
    ]
    a.step()
    b.step()
    assert one == [a, a]
    assert all_ == [a, a, b, b]
    copy.deepcopy(a).step()
    pickle.loads(pickle.dumps(a)).step()
    assert len(one) == 2
    for handle in handles:
        handle.remove()
    a.step()
    assert len(one) == 2
    assert len(all_) == 8
