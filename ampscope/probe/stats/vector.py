"""Vector instructions for the CPU kernels, as LLVM IR: numba's own loops do not vectorise these.

IR is the same for every processor; LLVM turns 16 elements into AVX-512, AVX2, SSE or NEON instructions as there are.
Functions take addresses as int64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types

from ampscope.probe.stats.jit import intrinsic


def _features() -> set[str]:
    """Return the names of the features numba compiles for."""
    if numba.config.CPU_FEATURES is not None:
        return {name.lstrip("+") for name in numba.config.CPU_FEATURES.split(",") if not name.startswith("-")}
    return {name for name, on in get_host_cpu_features().items() if on}


WIDTH = 16
"""Elements in a vector."""
GROUP = 64
"""Elements a loop turn; one word of the bit mask."""
LANES = 4
"""Bins `count` and `count_sliced` count at a time."""
ROUND = 8
"""Groups `count_sliced` takes at a time."""
ADDED = 16
"""Groups over which squares are added in FP32."""
MOST_GROUPS = 64
"""Groups of a block at most: words of a plane."""
SLICED = "avx512vpopcntdq" in _features()
"""Whether the processor counts bits in vectors, which `count_sliced` lives on. Without it `count` is faster."""
BITS = 5
"""Exponent bits in planes: blocks that span less than 2^BITS bins can be counted from them."""
KNOWN, MARKS, BIT = 0, 1, 2
"""Planes of a block, a bit an element: exponent not 0, mantissa 0 beside that, then each exponent bit."""
PLANES = BIT + BITS

_PLANE = 8 * MOST_GROUPS
_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_V32, _VF, _VD = (ir.VectorType(t, WIDTH) for t in (_I32, _F32, _F64))
_V8 = ir.VectorType(_I8, WIDTH)
_WORDS = ir.VectorType(_I64, ROUND)
_KEYS = ir.VectorType(_I8, GROUP)


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _splat(vector: Any, value: float) -> Any:
    return ir.Constant(vector, [value] * vector.count)


class _Builder:
    """An IR builder with the few habits used below."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, offset: Any, kind: Any) -> Any:
        """Return a pointer to `kind` at address + offset bytes."""
        return self.b.inttoptr(self.b.add(address, offset), kind.as_pointer())

    def variable(self, kind: Any, value: float) -> Any:
        """Return a pointer to a local of this kind, every lane `value`."""
        pointer = cgutils.alloca_once(self.b, kind)
        self.b.store(_splat(kind, value) if isinstance(kind, ir.VectorType) else ir.Constant(kind, value), pointer)
        return pointer

    def update(self, pointer: Any, operation: Callable[[Any, Any], Any], value: Any) -> None:
        """Do `local = operation(local, value)`."""
        self.b.store(operation(self.b.load(pointer), value), pointer)

    def largest(self, x: Any, y: Any) -> Any:
        """Unsigned maximum."""
        return self.b.select(self.b.icmp_unsigned(">", x, y), x, y)

    def least(self, x: Any, y: Any) -> Any:
        """Unsigned minimum."""
        return self.b.select(self.b.icmp_unsigned("<", x, y), x, y)

    def part(self, vector: Any, lanes: range) -> Any:
        """Return some lanes of a vector."""
        return self.b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))

    def join(self, x: Any, y: Any) -> Any:
        """Return a vector of the lanes of both."""
        n = 2 * x.type.count
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, n), list(range(n))))

    def fold(self, vector: Any, operation: Callable[[Any, Any], Any]) -> Any:
        """Reduce a vector to a scalar by halving."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            vector = operation(self.part(vector, range(half)), self.part(vector, range(half, 2 * half)))
        return self.b.extract_element(vector, ir.Constant(_I32, 0))


@intrinsic
def split(_typing: Any, address: Any, groups: Any, keys: Any, planes: Any, blanks: Any, result: Any) -> Any:
    """Read groups of 64 FP32 elements; return the sum of their squares, for magnitudes in FP32's range of squares.

    Squares are added up in FP32 over 16 groups, 16 to a lane, then in FP64. Writes the biased exponent of each element to
    `keys` (uint8), a bit for each finite or infinite non-zero element without mantissa to the plane MARKS of `planes`
    (uint64 [PLANES, MOST_GROUPS]; FP32 subnormals have none set), the other planes if SLICED, a bit for each zero to
    `blanks` (uint64), and six int64 to `result`: OR of the bit patterns, largest magnitude as a bit pattern, least non-zero
    exponent - 1 (255 if there is none), zeros, FP32 subnormals, marks.
    """

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, groups, keys, planes, blanks, result = args
        f, b = _Builder(builder), builder
        low, top = f.variable(_V32, 0), f.variable(_V32, 0)
        least = f.variable(_KEYS, 255)
        zeros, subnormal, marked = (f.variable(_I64, 0) for _ in range(3))
        sums, total = [f.variable(_VF, 0.0) for _ in range(GROUP // WIDTH)], f.variable(_VD, 0.0)
        add = partial(b.fadd, flags=("contract",))

        def group(number: Any) -> None:
            base = b.add(address, b.mul(number, _i64(4 * GROUP)))
            word, packed = _i64(0), []
            for s in range(GROUP // WIDTH):
                raw = b.load(f.at(base, _i64(4 * WIDTH * s), _V32), align=4)
                f.update(low, b.or_, raw)
                f.update(top, f.largest, b.and_(raw, _splat(_V32, 0x7FFFFFFF)))
                bare = b.icmp_unsigned("==", b.and_(raw, _splat(_V32, 0x7FFFFF)), _splat(_V32, 0))
                bits = b.zext(b.bitcast(bare, ir.IntType(WIDTH)), _I64)
                word = b.or_(word, b.shl(bits, _i64(WIDTH * s)))
                packed.append(b.trunc(b.lshr(raw, _splat(_V32, 23)), _V8))
                x = b.bitcast(raw, _VF)
                f.update(sums[s], add, b.fmul(x, x, flags=("contract",)))
            key = f.join(f.join(packed[0], packed[1]), f.join(packed[2], packed[3]))
            b.store(key, f.at(keys, b.mul(number, _i64(GROUP)), _KEYS), align=1)
            f.update(least, f.least, b.sub(key, _splat(_KEYS, 1)))
            lowest = b.bitcast(b.icmp_unsigned("==", key, _splat(_KEYS, 0)), _I64)
            blank = b.and_(word, lowest)
            b.store(blank, f.at(blanks, b.mul(number, _i64(8)), _I64))
            f.update(zeros, b.add, b.ctpop(blank))
            f.update(subnormal, b.add, b.ctpop(b.and_(b.not_(word), lowest)))
            word = b.and_(word, b.not_(lowest))
            f.update(marked, b.add, b.ctpop(word))
            bits = {MARKS: word}
            if SLICED:
                bits[KNOWN] = b.not_(lowest)
                for k in range(BITS):
                    one = b.icmp_unsigned("!=", b.and_(key, _splat(_KEYS, 1 << k)), _splat(_KEYS, 0))
                    bits[BIT + k] = b.bitcast(one, _I64)
            for plane, word in bits.items():
                b.store(word, f.at(planes, b.add(_i64(_PLANE * plane), b.mul(number, _i64(8))), _I64))

        rounds = b.sdiv(b.add(groups, _i64(ADDED - 1)), _i64(ADDED))
        with cgutils.for_range(builder, rounds) as outer:
            begin = b.mul(outer.index, _i64(ADDED))
            left = b.sub(groups, begin)
            some = b.select(b.icmp_signed("<", left, _i64(ADDED)), left, _i64(ADDED))
            with cgutils.for_range(builder, some) as inner:
                group(b.add(begin, inner.index))
            for pointer in sums:
                f.update(total, b.fadd, b.fpext(b.load(pointer), _VD))
                b.store(_splat(_VF, 0.0), pointer)
        found = [f.fold(b.load(low), b.or_), f.fold(b.load(top), f.largest), f.fold(b.load(least), f.least)]
        found = [b.zext(v, _I64) for v in found] + [b.load(p) for p in (zeros, subnormal, marked)]
        for k, value in enumerate(found):
            b.store(value, f.at(result, _i64(8 * k), _I64))
        return f.fold(b.load(total), b.fadd)

    return types.float64(*[types.int64] * 6), build


@intrinsic
def count(_typing: Any, keys: Any, groups: Any, first: Any, bins: Any) -> Any:
    """Add to the int64 `bins[first : first + LANES]` how many uint8 `keys` equal each index. At most 255 groups."""

    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        keys, groups, first, bins = args
        f, b = _Builder(builder), builder
        wanted = []
        for k in range(LANES):
            value = b.trunc(b.add(first, _i64(k)), _I8)
            one = b.insert_element(ir.Constant(_KEYS, ir.Undefined), value, ir.Constant(_I32, 0))
            wanted.append(b.shuffle_vector(one, one, _splat(ir.VectorType(_I32, GROUP), 0)))
        counts = [f.variable(_KEYS, 0) for _ in range(LANES)]
        with cgutils.for_range(builder, groups) as loop:
            key = b.load(f.at(keys, b.mul(loop.index, _i64(GROUP)), _KEYS), align=1)
            for k in range(LANES):
                f.update(counts[k], b.sub, b.sext(b.icmp_unsigned("==", key, wanted[k]), _KEYS))
        for k in range(LANES):
            wide = b.zext(b.load(counts[k]), ir.VectorType(_I16, GROUP))
            pointer = f.at(bins, b.mul(b.add(first, _i64(k)), _i64(8)), _I64)
            b.store(b.add(b.load(pointer), b.zext(f.fold(wide, b.add), _I64)), pointer)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


@intrinsic
def count_sliced(_typing: Any, planes: Any, rounds: Any, first: Any, bins: Any, exact: Any) -> Any:
    """Do what `count` does from the planes of 8 groups a round, and count the marked elements into `exact` too.

    `first` is a multiple of LANES. Exponents are told apart by their lowest BITS bits.
    """

    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        planes, rounds, first, bins, exact = args
        f, b = _Builder(builder), builder
        kind = ir.FunctionType(_WORDS, [_WORDS])
        population = cgutils.get_or_insert_function(b.module, kind, f"llvm.ctpop.v{ROUND}i64")
        flips = []  # all ones where the bit of `first` is clear
        for k in range(2, BITS):
            flip = b.sub(b.and_(b.lshr(first, _i64(k)), _i64(1)), _i64(1))
            one = b.insert_element(ir.Constant(_WORDS, ir.Undefined), flip, ir.Constant(_I32, 0))
            flips.append(b.shuffle_vector(one, one, _splat(ir.VectorType(_I32, ROUND), 0)))
        counts = [[f.variable(_WORDS, 0) for _ in range(LANES)] for _ in range(2)]
        with cgutils.for_range(builder, rounds) as loop:
            offset = b.mul(loop.index, _i64(8 * ROUND))
            words = [b.load(f.at(planes, b.add(_i64(_PLANE * k), offset), _WORDS), align=8) for k in range(PLANES)]
            shared = words[KNOWN]
            for k, flip in enumerate(flips):
                shared = b.and_(shared, b.xor(words[BIT + 2 + k], flip))
            ones, twos = words[BIT], words[BIT + 1]
            for lane in range(LANES):
                mine = b.and_(shared, ones if lane & 1 else b.not_(ones))
                mine = b.and_(mine, twos if lane & 2 else b.not_(twos))
                f.update(counts[0][lane], b.add, b.call(population, [mine]))
                f.update(counts[1][lane], b.add, b.call(population, [b.and_(mine, words[MARKS])]))
        for target, found in ((bins, counts[0]), (exact, counts[1])):
            for lane in range(LANES):
                place = f.at(target, b.mul(b.add(first, _i64(lane)), _i64(8)), _I64)
                b.store(b.add(b.load(place), f.fold(b.load(found[lane]), b.add)), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


@intrinsic
def keep_marked(_typing: Any, keys: Any, marks: Any, groups: Any, out: Any) -> Any:
    """Write to the uint8 `out` the keys whose bit in `marks` is set, 0 for the others."""

    def build(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        keys, marks, groups, out = args
        f, b = _Builder(builder), builder
        with cgutils.for_range(builder, groups) as loop:
            offset = b.mul(loop.index, _i64(GROUP))
            key = b.load(f.at(keys, offset, _KEYS), align=1)
            word = b.load(f.at(marks, b.mul(loop.index, _i64(8)), _I64))
            chosen = b.bitcast(word, ir.VectorType(_I1, GROUP))
            b.store(b.select(chosen, key, _splat(_KEYS, 0)), f.at(out, offset, _KEYS), align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


@intrinsic
def lowest_bit(_typing: Any, word: Any) -> Any:
    """Return the index of the lowest bit set in a non-zero uint64."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_I1, 1))

    return types.uint64(types.uint64), build


@intrinsic
def bits_set(_typing: Any, word: Any) -> Any:
    """Return how many bits of a uint64 are set."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), build


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """Return an address as a pointer, for `numba.carray`."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@intrinsic
def take(_typing: Any, address: Any) -> Any:
    """Atomically add one to the int64 at `address`; return what it was."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", at, _i64(1), "monotonic")

    return types.int64(types.int64), build
