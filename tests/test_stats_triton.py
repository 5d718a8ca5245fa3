"""The CUDA kernel on CPU, in Triton's interpreter (a process of its own: Triton decides at import), and compiled for GPUs."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from ampscope.record.step import LayerStats
from tests import stats_cases

pytest.importorskip("triton")

INTERPRET = """
import sys
import numpy as np
import torch
from ampscope.probe.stats import rows, triton_cuda
from tests import stats_cases

torch.set_num_threads(1)
cases = list(stats_cases.few_tasks().values())
plains = [rows.plain(t) for t in cases]
plains = [p if p.tensor.dtype in triton_cuda.KINDS else p._replace(tensor=p.tensor.float()) for p in plains]
kernel, launches = triton_cuda.TritonKernel(), 0
parts = []
for kind, members in triton_cuda.by_kind(plains).items():
    mine = [plains[i] for i in members]
    made, results = kernel.launch(kind, mine)
    launches += 1
    parts.append(triton_cuda.TritonCopy(members, mine, made, results).get())
ints, reals = rows.gather(len(cases), parts)
far = 2**31 + 20000
array = np.memmap(sys.argv[1] + ".sparse", np.float32, "w+", shape=(far + 3000,))
array[far:] = -3.0
beyond = torch.zeros(rows.WIDTH, dtype=torch.int64)
sums = torch.zeros(1, dtype=torch.float64)
triton_cuda.kernels.measure[(1,)](
    torch.tensor([[array.ctypes.data, far + 3000, 0]]), torch.tensor([[0, 0, far, far + 3000]]), beyond, sums,
    KIND=0, WIDTH=rows.WIDTH, BLOCK=triton_cuda.kernels.BLOCK, LINES=1, ACROSS=1,
)
np.savez(sys.argv[1], ints=ints, reals=reals, launches=launches, beyond=beyond.numpy(), sums=sums.numpy())
"""

CASES = stats_cases.few_tasks()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Return the arrays the interpreter's process saved."""
    import triton

    if triton.__version__.startswith("3.0."):
        pytest.skip("Triton 3.0's interpreter passes no constexpr from one kernel to another; its compiler does")
    path = tmp_path_factory.mktemp("triton") / "found.npz"
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    subprocess.run([sys.executable, "-c", INTERPRET, str(path)], check=True, env=env, timeout=300)
    return np.load(path)


@pytest.fixture(scope="module")
def stats(interpreted) -> LayerStats:
    """Return the statistics of all cases."""
    from ampscope.probe.stats import rows

    return rows.to_stats(interpreted["ints"], interpreted["reals"])


@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_the_reference(stats, name):
    """Each kind of gradient, all in one launch a dtype."""
    stats_cases.assert_equal(stats, list(CASES).index(name), stats_cases.reference(CASES[name]), name)


def test_one_launch_a_dtype(interpreted):
    """FP32 (FP8 is converted to it), FP16, BF16 and FP64."""
    assert interpreted["launches"] == 4


def test_addresses_beyond_two_to_the_31(interpreted):
    """A task at element 2^31 + 20000 reads what is there."""
    assert interpreted["beyond"][8 + 2 * 128] == 3000
    assert interpreted["sums"][0] == 9 * 3000


def test_tasks_reach_beyond_two_to_the_31():
    """The plan of a tensor of 2^33 + 1 elements is in int64 and covers it."""
    from ampscope.probe.stats import triton_cuda
    from ampscope.probe.stats import triton_kernels as kernels

    tasks = triton_cuda.plan([5, 2**33 + 2], [0, 2])
    assert tasks.dtype == np.int64
    assert len(tasks) < 2**18
    for kind, end in ((kernels.COUNT, 2**33 + 2), (kernels.ROWS, 2), (kernels.COLS, 2**32 + 1)):
        mine = tasks[(tasks[:, 0] == kind) & (tasks[:, 1] == 1)]
        assert mine[0, 2] == 0
        assert mine[-1, 3] == end
        assert (mine[1:, 2] == mine[:-1, 3]).all()
    assert tasks[tasks[:, 1] == 0].tolist() == [[kernels.COUNT, 0, 0, 5]]


@pytest.mark.parametrize("capability", [75, 90])
@pytest.mark.parametrize("kind", range(4))
def test_the_kernel_compiles_for_gpus(kind, capability, tmp_path, monkeypatch):
    """Triton compiles it without a GPU present, to machine code; the interpreter is laxer than the compiler."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError:
        pytest.skip("this Triton compiles in another way")
    from ampscope.probe.stats import rows
    from ampscope.probe.stats import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = kernels.measure.arg_names
    kinds = {"tensors": "*i64", "tasks": "*i64", "out": "*i64", "sums": "*fp64"}
    fixed = {
        "KIND": kind,
        "WIDTH": rows.WIDTH,
        "BLOCK": kernels.BLOCK,
        "LINES": kernels.LINES,
        "ACROSS": kernels.ACROSS,
    }
    if triton.__version__.startswith("3.0."):  # torch 2.4
        source = ASTSource(fn=kernels.measure, signature=kinds, constants=fixed)
    else:
        signature = {n: kinds.get(n, "constexpr") for n in names}
        try:
            source = ASTSource(
                fn=kernels.measure, signature=signature, constexprs={(names.index(n),): v for n, v in fixed.items()}
            )
        except TypeError:
            pytest.skip("this Triton compiles in another way")
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels.WARPS})
    assert compiled.asm["cubin"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_cuda_device_without_a_synchronisation():
    """The whole way on a GPU: every case, the sync debug mode on, results through the event."""
    from ampscope.probe.stats import measure

    tensors = [t.to("cuda") for t in CASES.values()]
    measure([t for t in tensors if not t.is_sparse]).resolve()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = measure([t.coalesce() if t.is_sparse else t for t in tensors if not t.is_sparse])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [n for n in CASES if not CASES[n].is_sparse]
    found = pending.resolve()
    assert pending.ready()
    for i, name in enumerate(names):
        stats_cases.assert_equal(found, i, stats_cases.reference(CASES[name]), name)
    found = measure([t for t in tensors if t.is_sparse]).resolve()
    for i, name in enumerate(n for n in CASES if CASES[n].is_sparse):
        stats_cases.assert_equal(found, i, stats_cases.reference(CASES[name]), name)
