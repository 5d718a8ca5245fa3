"""The statistics of gradients on CPU: numba and torch operations beside a slow reference.

One file: one table of inputs for every backend.
"""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.probe.stats import BACKENDS, backends, measure, remember, rows, torch_ops
from ampscope.record.step import BINS, LayerStats
from tests import stats_cases

CASES = stats_cases.cases()
EXPECTED = {name: stats_cases.reference(tensor) for name, tensor in CASES.items()}


def by_numba(tensors, threads=1, team=None):
    """Measure with a numba kernel of its own."""
    numba_cpu = pytest.importorskip("ampscope.probe.stats.numba_cpu")
    return rows.to_stats(*numba_cpu.CpuKernel(threads, team).measure(tensors))


def by_torch(tensors):
    """Measure with torch operations."""
    plains = [rows.plain(t) for t in tensors]
    order, ints, reals = torch_ops.measure(plains)
    back = np.argsort(order)
    ints, reals = ints.numpy()[back], reals.numpy()[back]
    rows.amend(ints, reals, [(i, p.note) for i, p in enumerate(plains) if p.note])
    return rows.to_stats(ints, reals)


BOTH = pytest.mark.parametrize("backend", [by_numba, by_torch])


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_the_reference(backend, name):
    """Each kind of gradient, alone."""
    stats_cases.assert_equal(backend([CASES[name]]), 0, EXPECTED[name], name)


@BOTH
def test_a_mixed_list_keeps_its_order(backend):
    """All of them in one call."""
    stats = backend(list(CASES.values()))
    for i, name in enumerate(CASES):
        stats_cases.assert_equal(stats, i, EXPECTED[name], name)


def test_measure_returns_what_is_ready_and_in_order():
    """The public entry, with whatever backend is there."""
    BACKENDS.warm(wait=True)
    pending = measure(list(CASES.values()))
    assert pending.ready()
    stats = pending.resolve()
    assert (stats.state == 2).all()
    for i, name in enumerate(CASES):
        stats_cases.assert_equal(stats, i, EXPECTED[name], name)


def test_measure_of_nothing():
    """No gradient at all is no fault."""
    stats = measure([]).resolve()
    assert len(stats.state) == 0
    assert stats.exponents.shape == (0, 256)


@pytest.mark.parametrize(
    ("dtype", "view", "width"),
    [
        (np.float32, torch.float32, 32),
        (np.float64, torch.float64, 64),
        (np.uint16, torch.float16, 16),
        (np.uint16, torch.bfloat16, 16),
    ],
    ids=["FP32", "FP64", "FP16", "BF16"],
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arbitrary_bit_patterns(dtype, view, width, data):
    """Whatever the bits are, both backends agree with the reference."""
    bits = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=40))
    times = data.draw(st.sampled_from([1, 7, 300]))
    array = np.array(bits * times, dtype=f"uint{width}").view(dtype)
    tensor = torch.from_numpy(array.view(np.int16) if width == 16 else array).view(view)
    expected = stats_cases.reference(tensor)
    stats_cases.assert_equal(by_numba([tensor]), 0, expected, "numba")
    stats_cases.assert_equal(by_torch([tensor]), 0, expected, "torch")


@pytest.mark.parametrize("kind", ["Thread", "OpenMP"])
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_count_what_one_counts(kind, threads):
    """The threads take chunks in turn; sums do not depend on who took what. Places may be left over or lacking."""
    stats_team = pytest.importorskip("ampscope.probe.stats.team")
    team = stats_team.Thread() if kind == "Thread" else stats_team.find_team()
    if type(team).__name__ != kind:
        pytest.skip("torch uses another OpenMP runtime here")
    g = torch.Generator().manual_seed(1)
    tensors = [torch.relu(torch.randn(700, 613, generator=g)) for _ in range(3)] + list(CASES.values())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        one, more = by_numba(tensors, 1), by_numba(tensors, threads, team)
    finally:
        torch.set_num_threads(before)
    for field in (*stats_cases.INTEGERS, "max_abs", "sum_squares"):
        np.testing.assert_array_equal(getattr(one, field), getattr(more, field), err_msg=field)


def test_as_many_threads_as_torch_uses():
    """`torch.set_num_threads(1)` holds for the statistics too."""
    stats_team = pytest.importorskip("ampscope.probe.stats.team")
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert stats_team.OpenMP(None, 0).size() == threads
            assert stats_team.Thread().size() == min(threads, len(os.sched_getaffinity(0)), 2)
    finally:
        torch.set_num_threads(before)


def test_torch_operations_in_slices(monkeypatch):
    """A tensor larger than a slice is looked at in parts."""
    monkeypatch.setattr(torch_ops, "SLICE", 1000)
    monkeypatch.setattr(torch_ops, "SMALL", 500)
    stats = by_torch(list(CASES.values()))
    for i, name in enumerate(CASES):
        stats_cases.assert_equal(stats, i, EXPECTED[name], name)


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e25, 3e38])
@BOTH
def test_norms_outside_the_range_of_fp32_squares(backend, size):
    """Squares below 1e-44 and above 1e38 are no FP32 numbers; the norm is right all the same."""
    tensor = torch.full((100, 100), size)
    assert np.sqrt(backend([tensor]).sum_squares[0]) == pytest.approx(100 * float(tensor[0, 0]), rel=1e-9)


@BOTH
def test_norms_where_rounding_errors_add_up(backend):
    """Equal elements round the same way at each addition; a large one beside tiny ones must not hide them."""
    generator = np.random.default_rng(0)
    for value in generator.uniform(1, 2, 20).astype(np.float32):
        found = backend([torch.full((70_000,), float(value))]).sum_squares[0]
        assert np.sqrt(found) == pytest.approx(float(value) * np.sqrt(70_000), rel=5e-7)
    mixed = torch.full((4096,), 2.0**-39)
    mixed[5] = 2.0**-38
    assert backend([mixed]).sum_squares[0] == pytest.approx(4099 * 2.0**-78, rel=1e-6)


@BOTH
def test_more_than_two_to_the_31_elements(backend):
    """An expanded tensor of 2^33 elements is counted once and multiplied."""
    stats = backend([torch.tensor([[1.5], [0.0]]).expand(2, 2**32), torch.full((1, 3), 0.25).expand(2**32, 3)])
    assert stats.zeros.tolist() == [2**32, 0]
    assert stats.exponents[:, [125, 127]].tolist() == [[0, 2**32], [3 * 2**32, 0]]
    assert stats.exact[1, 125] == 3 * 2**32
    assert stats.zero_rows.tolist() == [1, 0]
    assert stats.sum_squares.tolist() == [2.25 * 2**32, 3 * 2**32 / 16]


@pytest.mark.parametrize(
    ("size", "height", "width"),
    [(2**32 + 5, 0, 0), (2**32 + 12, 2, 2**31 + 6), (3 * 2**31, 2**31, 3), (70_000 * 3, 3, 70_000)],
)
def test_chunks_reach_beyond_two_to_the_31(size, height, width, monkeypatch):
    """The table of chunks covers each tensor exactly once, in int64; a matrix in whole rows or in pieces of one."""
    jobs = pytest.importorskip("ampscope.probe.stats.jobs")
    chunks = jobs.table(np.array([3, 0, size]), np.array([[0, 0], [0, 0], [height, width]]))
    assert chunks.dtype == np.int64
    assert chunks[0].tolist() == [0, 0, 3]
    mine = chunks[1:]
    assert (mine[:, 0] == 2).all()
    assert mine[0, 1] == 0
    assert (mine[1:, 1] == (mine[:, 1] + mine[:, 2])[:-1]).all()
    assert mine[-1, 1] + mine[-1, 2] == size
    assert mine[:, 2].max() <= jobs.CHUNK
    if height:
        whole = mine[:, 2] % width == 0
        assert whole.all() or (mine[:, 1] // width == (mine[:, 1] + mine[:, 2] - 1) // width).all()


def test_the_kernel_reads_the_right_address_beyond_two_to_the_31(tmp_path):
    """One chunk at element 2^31 + 65536 of a file that is almost all hole."""
    jobs = pytest.importorskip("ampscope.probe.stats.jobs")
    begin, n = 2**31 + jobs.CHUNK, 5000
    array = np.memmap(tmp_path / "sparse", np.float32, "w+", shape=(begin + n,))
    array[begin:] = -3.0
    chunks, where = np.array([[0, begin, n]]), np.array([array.ctypes.data])
    job = jobs.make_job(1, chunks, where, np.zeros((1, 2), np.int64), np.array([False]), np.zeros(2, np.int64))
    jobs.member(job.header.ctypes.data)
    assert job.out[0, 0, rows.HISTOGRAM + 128] == n
    assert job.out[0, 0, rows.ZEROS] == 0
    assert job.sums[0] == 9 * n


class Ops(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note it and do it."""
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_kernel_dispatches_nothing():
    """FP32 gradients are read in place: a dispatch mode of the user's sees no operation."""
    pytest.importorskip("numba")
    BACKENDS.warm(wait=True)
    tensors = [CASES[n] for n in ("random", "zeros", "no dimension", "channels last", "empty", "zero rows and columns")]
    with Ops() as ops:
        measure(tensors).resolve()
    assert ops.seen == []


@BOTH
def test_no_operation_waits_for_a_device(backend):
    """Nothing that would synchronise on a device is called, whatever the gradient (but for `coalesce`)."""
    with Ops() as ops:
        backend([t for t in CASES.values() if not t.is_sparse])
    assert not [
        o
        for o in ops.seen
        if any(word in o for word in ("item", "local_scalar", "nonzero", "is_nonzero", "equal.default"))
    ]


def test_gradients_are_not_touched():
    """Neither values nor versions nor layout change."""
    before = {n: (t._version, t.stride() if not t.is_sparse else None) for n, t in CASES.items()}
    copies = {n: t.to_dense().clone() if t.is_sparse else t.clone() for n, t in CASES.items()}
    measure(list(CASES.values())).resolve()
    for name, t in CASES.items():
        assert (t._version, t.stride() if not t.is_sparse else None) == before[name], name
        same = t.to_dense() if t.is_sparse else t
        if same.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            assert torch.equal(torch.nan_to_num(same, 7.0), torch.nan_to_num(copies[name], 7.0)), name


@BOTH
def test_a_gradient_of_a_graph(backend):
    """`backward(create_graph=True)` leaves gradients that require gradients themselves; no graph is built on them."""
    for name in ("random", "FP16", "complex"):
        tensor = CASES[name].clone().requires_grad_() * 1
        stats_cases.assert_equal(backend([tensor]), 0, EXPECTED[name], name)


def test_a_sharded_gradient_counts_its_local_part():
    """A DTensor: what this rank holds."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import DTensor, Shard
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import DTensor, Shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = DTensor.from_local(CASES["relu"], init_device_mesh("cpu", (1,)), [Shard(0)])
        stats = measure([sharded]).resolve()
    finally:
        torch.distributed.destroy_process_group()
    stats_cases.assert_equal(stats, 0, EXPECTED["relu"], "relu")


def test_torch_operations_serve_without_numba(monkeypatch):
    """The extra `cpu` is not installed."""
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    found = backends.Backends()
    found.warm(wait=True)
    (part,) = found.measure(torch.device("cpu"), [0], [CASES["relu"]])
    assert part.ready()
    stats_cases.assert_equal(rows.to_stats(*rows.gather(1, [part.get()])), 0, EXPECTED["relu"], "relu")


def test_triton_that_does_not_work_is_given_up_once():
    """No compiler, an old GPU: one warning, then torch operations for good."""
    pytest.importorskip("triton")

    class Broken:
        def measure(self, index, plains):
            raise RuntimeError("Failed to find C compiler")

    found = backends.Backends()
    found._triton = Broken()
    with pytest.warns(RuntimeWarning, match="Triton does not work here .Failed to find C compiler"):
        assert found._by_triton([0], [rows.plain(CASES["relu"])]) == []
    assert found._triton is None


def test_flushed_denormals_change_nothing():
    """`torch.set_flush_denormal` makes the processor read subnormals as zero; counts and maximum look at the bits."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        stats = by_numba([CASES["FP32 subnormal"]])
    finally:
        torch.set_flush_denormal(False)
    expected = EXPECTED["FP32 subnormal"]
    assert stats.max_abs[0] == expected["max_abs"]
    assert stats.zeros[0] == expected["zeros"]
    np.testing.assert_array_equal(stats.exponents[0], expected["exponents"])


def test_threads_measure_at_once():
    """Two watched scalers in two threads share the kernel."""
    BACKENDS.warm(wait=True)
    g = torch.Generator().manual_seed(2)
    tensors = [torch.randn(600, 600, generator=g) for _ in range(2)]
    alone = [measure([t]).resolve() for t in tensors]
    wrong = []

    def check(i):
        for _ in range(10):
            stats = measure([tensors[i]]).resolve()
            if (stats.exponents != alone[i].exponents).any() or stats.sum_squares[0] != alone[i].sum_squares[0]:
                wrong.append(i)

    threads = [threading.Thread(target=check, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_measures():
    """A child has neither the second thread nor a lock somebody else holds."""
    BACKENDS.warm(wait=True)
    tensor = torch.ones(700, 700)
    measure([tensor]).resolve()
    child = os.fork()
    if child == 0:
        ok = measure([tensor]).resolve().exponents[0, 127] == 490_000
        os._exit(0 if ok else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_numba_is_imported_leaves_a_usable_child():
    """A DataLoader's worker, forked right after `watch`, imports numba itself: no lock is left held."""
    pytest.importorskip("numba")
    code = """
import os, sys
from ampscope.probe.stats import BACKENDS
BACKENDS.warm()
child = os.fork()
if child == 0:
    import numba
    from ampscope.probe.stats import measure
    import torch
    os._exit(0 if measure([torch.ones(3)]).resolve().exponents[0, 127] == 3 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_short_script_ends_cleanly_while_the_kernel_is_compiled(tmp_path):
    """The interpreter ends in the middle of compiling, with an empty cache: no crash, no message."""
    code = """
import torch
from ampscope.probe.stats import BACKENDS, measure
BACKENDS.warm()
print(measure([torch.ones(3)]).resolve().exponents[0, 127])
"""
    env = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")


def test_remembered_tensors_are_planned_anew_when_they_look_different():
    """Same bytes: the plan of the step before. Other sizes, dtypes, strides, layouts, devices: asked again, and right."""
    pytest.importorskip("numba")
    BACKENDS.warm(wait=True)
    last = remember()
    make = torch.Generator().manual_seed(0)
    steps = [
        [torch.randn(4, 6, generator=make), torch.randn(5, generator=make)],
        [torch.randn(4, 6, generator=make), torch.zeros(5)],
        [torch.randn(6, 6, generator=make), torch.randn(5, generator=make)],
        [torch.randn(6, 6, generator=make).double(), torch.randn(5, generator=make)],
        [torch.randn(6, 6, generator=make).t(), torch.randn(5, generator=make)],
        [torch.randn(6, 6, generator=make).to_sparse(), torch.randn(5, generator=make)],
        [torch.randn(6, 6, generator=make).half(), torch.tensor([float("inf")] * 4 + [float("-inf")])],
        [torch.randn(6, 6, generator=make), torch._neg_view(torch.tensor([float("inf")] * 4 + [1.0]))],
        [torch.randn(6, 6, generator=make)],
        [torch.randn(6, 6, generator=make), torch.randn(0), torch.tensor(3.0)],
    ]
    for tensors in steps:
        for _ in range(2):
            found, fresh = measure(tensors, last).resolve(), measure([t.clone() for t in tensors]).resolve()
            for name in LayerStats.__dataclass_fields__:
                np.testing.assert_array_equal(getattr(found, name), getattr(fresh, name), err_msg=name)
    assert measure(steps[7]).resolve().neg_inf.tolist() == [0, 4]


def test_results_are_not_changed_by_later_measurements():
    """The kernel works in the same memory each time; what it gave away is not in there, and it leaves nothing behind."""
    pytest.importorskip("numba")
    BACKENDS.warm(wait=True)
    tensors = [torch.full((3, 5), 2.0**-k) for k in range(20)]
    kept = [measure([t]).resolve() for t in tensors]
    views = [k.exponents for k in kept]
    want = [int(127 - k) for k in range(20)]
    assert [int(v.argmax()) for v in views] == want
    del kept
    for _ in range(50):
        measure([torch.full((3, 5), 64.0)]).resolve()
    assert [int(v.argmax()) for v in views] == want


def test_a_tensor_without_memory_is_refused_not_read():
    """A sharded parameter's storage is resized to nothing between uses: an error, not a crash."""
    pytest.importorskip("numba")
    BACKENDS.warm(wait=True)
    gone = torch.ones(8)
    gone.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        measure([torch.ones(3), gone])


def test_narrow_histograms_are_the_wide_ones():
    """The bins in use, from the lowest to the highest of any tensor; widened when asked for. Both threads' rows are cleared."""
    numba_cpu = pytest.importorskip("ampscope.probe.stats.numba_cpu")
    make = np.random.default_rng(0)
    kernel = numba_cpu.CpuKernel(2)
    for exponents in ([0], [-149, 127], [-20, 5, 3], [40], [-126, -127]):
        tensors = [
            torch.from_numpy(np.ldexp(make.choice([1.0, 1.5], 300_000), e).astype(np.float32)) for e in exponents
        ]
        tensors.append(torch.tensor([0.0, float("nan"), float("inf")]))
        wide, narrow = rows.to_stats(*kernel.measure(tensors)), kernel.measure_ordinary(tensors, None)
        for name in LayerStats.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name), err_msg=name)
        for some, other in zip(narrow.bins(), wide.bins(), strict=True):
            np.testing.assert_array_equal(some, other)
        assert narrow.exponents.shape == (len(tensors), BINS)
    none = kernel.measure_ordinary([torch.zeros(3)], None)
    assert [b.tolist() for b in none.bins()] == [[0], [0], [], []]


def test_ctrl_c_waits_for_the_thread_that_still_works_in_our_memory():
    """The interrupt reaches the user after the other thread is done; the next job is not disturbed by it."""
    pytest.importorskip("numba")
    from ampscope.probe.stats.team import Thread

    team = Thread()
    waits = []

    class Done:
        def acquire(self):
            waits.append(1)
            if len(waits) <= 2:
                raise KeyboardInterrupt

    team._done = Done()
    with pytest.raises(KeyboardInterrupt):
        team._wait()
    assert len(waits) == 3
