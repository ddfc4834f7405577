"""Products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.testing.prove import Sample
from tests.ir.samples.source import Source, call, sample


@sample("linear")
def _linear(source: Source) -> Sample:
    inner, outer = source.size(), source.size()
    x = source.floats(*source.shape(0, 2), inner)
    weight = source.floats(outer, inner)
    return call("linear", x, weight, *([source.floats(outer)] if source.flag() else []))


@sample("matmul")
def _matmul(source: Source) -> Sample:
    inner, batch = source.size(), source.shape(0, 2)
    left = [*source.broadcastable(batch), source.size(), inner]
    right = [*batch, inner, source.size()]
    if source.number(0, 4) == 0:
        right = [inner]
    elif source.number(0, 4) == 0:
        left = [inner]
    return call("matmul", source.floats(*left), source.floats(*right))


@sample("mm", "bmm")
def _mm(source: Source, name: str) -> Sample:
    inner, batch = source.size(), [source.size()] if name == "bmm" else []
    left = source.floats(*batch, source.size(), inner)
    return call(name, left, source.floats(*batch, inner, source.size()))


@sample("addmm", "baddbmm")
def _addmm(source: Source, name: str) -> Sample:
    rows, inner, columns = source.size(), source.size(), source.size()
    batch = [source.size()] if name == "baddbmm" else []
    bias = source.floats(*source.broadcastable([*batch, rows, columns]))
    left, right = source.floats(*batch, rows, inner), source.floats(*batch, inner, columns)
    return call(name, bias, left, right, beta=2, alpha=0.5)


@sample("mv")
def _mv(source: Source) -> Sample:
    inner = source.size()
    return call("mv", source.floats(source.size(), inner), source.floats(inner))


@sample("addmv")
def _addmv(source: Source) -> Sample:
    rows, inner = source.size(), source.size()
    return call("addmv", source.floats(rows), source.floats(rows, inner), source.floats(inner))


@sample("dot")
def _dot(source: Source) -> Sample:
    size = source.size()
    return call("dot", source.floats(size), source.floats(size))


@sample("outer")
def _outer(source: Source) -> Sample:
    return call("outer", source.floats(source.size()), source.floats(source.size()))


@sample("einsum")
def _einsum(source: Source) -> Sample:
    b, h, q, k, d = (source.size() for _ in range(5))
    if source.flag():
        tensors = [source.floats(b, h, q, d), source.floats(b, h, k, d)]
        return call("einsum", "bhqd,bhkd->bhqk", tensors)
    return call("einsum", "bh,k->bk", [source.floats(b, h), source.floats(k)])


@sample("einsum dots", "einsum implicit", "einsum three")
def _einsum_more(source: Source, name: str) -> Sample:
    b, h, q, k, d = (source.size() for _ in range(5))
    if name.endswith("dots"):
        rest = source.shape(0, 2)
        left = source.floats(*source.broadcastable(rest), q, d)
        equation = ("...qd,...kd->...qk", "...qd,kd->...qk", "...qd,kd")[source.number(0, 2)]
        right = source.floats(*(rest if equation.count("...") > 2 else []), k, d)
        return call("einsum", equation, [left, right])
    if name.endswith("implicit"):
        return call("einsum", "qd , kd", [source.floats(q, d), source.floats(k, d)])
    tensors = [source.floats(b, h, d), source.floats(d, k), source.floats(h)]
    return call("einsum", "bhd,dk,h->bhk", tensors)


@sample("tensordot")
def _tensordot(source: Source) -> Sample:
    m, k, n, j = (source.size() for _ in range(4))
    return call("tensordot", source.floats(m, k, j), source.floats(j, n, k), [1, -1], [2, 0])


@sample("_grouped_mm")
def _grouped_mm(source: Source) -> Sample:
    """In bfloat16, the only dtype of its kernel: small integers are exact, and so are sums."""
    groups, k, n = source.number(1, 3), 8 * source.multiple(), 8 * source.multiple()
    counts = [source.number(1, 3) for _ in range(groups)]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)

    def small(*shape: int) -> Tensor:
        return (source.integers(3, *shape) - 1).to(torch.bfloat16)

    if source.flag():
        return call("_grouped_mm", small(groups, 2, k), small(groups, k, n))
    return call("_grouped_mm", small(sum(counts), k), small(groups, k, n), ends)


@sample("cdist")
def _cdist(source: Source) -> Sample:
    batch = source.shape(0, 1)
    left = source.floats(*batch, source.size(), 3)
    return call("cdist", left, source.floats(*batch, source.size(), 3))
