"""Ops that make tensors, and ops that read or write by index."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.testing.prove import Fixed, Sample
from tests.ir.samples.source import Source, call, sample


@sample("zeros", "ones", "rand", "randn")
def _constant(source: Source, name: str) -> Sample:
    return call(name, source.shape(), dtype=torch.float64)


@sample("full")
def _full(source: Source) -> Sample:
    return call("full", source.shape(), 2.0, dtype=torch.float64)


@sample("new_zeros", "new_ones")
def _new(source: Source, name: str) -> Sample:
    return call(name, source.floats(*source.shape()), source.shape())


@sample("arange")
def _arange(source: Source) -> Sample:
    return call("arange", source.size())


@sample("index.Tensor")
def _index(source: Source) -> Sample:
    shape = source.shape(2, 4)
    at = source.shape(1, 2)
    given: list[Tensor | None] = [
        source.integers(size, *source.broadcastable(at)) if source.flag() else None
        for size in shape
    ]
    if all(index is None for index in given):
        given[0] = source.integers(shape[0], *at)
    while given[-1] is None:
        given.pop()
    return call("index.Tensor", source.floats(*shape), given)


@sample("index_select")
def _index_select(source: Source) -> Sample:
    shape = source.shape(1, 3)
    index = source.integers(shape[-1], source.size())
    return call("index_select", source.floats(*shape), -1, index)


@sample("gather")
def _gather(source: Source) -> Sample:
    shape = source.shape(1, 3)
    index = [*shape[:-1], source.size()]
    if source.flag():
        index[0] = min(index[0], shape[0], 1)
    return call("gather", source.floats(*shape), -1, source.integers(shape[-1], *index))


@sample("scatter.src", "scatter_add", "scatter.value", "scatter_reduce.two", "scatter.reduce")
def _scatter(source: Source, name: str) -> Sample:
    """Each entry is written once where the last writer would win."""
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    written = list(shape)
    written[dim] = source.size() if "add" in name or "reduce" in name else shape[dim]
    if source.flag() and len(shape) > 1:
        other = (dim + 1) % len(shape)
        written[other] = min(written[other], 2)
    order = torch.argsort(source.floats(*written), dim)
    index = order if written[dim] == shape[dim] else source.integers(shape[dim], *written)
    x, values = source.floats(*shape), source.floats(*written)
    if name == "scatter.value":
        return call(name, x, dim, index, float(source.number(0, 1)))
    if name == "scatter_reduce.two":
        reduction = ("sum", "amax", "mean")[source.number(0, 2)]
        return call(name, x, dim, index, values, reduction, include_self=bool(source.flag()))
    if name == "scatter.reduce":
        return call(name, Fixed(x), dim, index, Fixed(values), reduce="add")
    return call(name, x, dim, index, values)


@sample("index_add", "index_copy", "index_fill.int_Scalar")
def _index_add(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    length = source.size() if name == "index_add" else source.number(1, shape[dim])
    index = source.integers(shape[dim], length)
    if name != "index_add":
        index = torch.argsort(source.floats(shape[dim]))[:length]
    x = source.floats(*shape)
    if name.startswith("index_fill"):
        return call(name, x, dim, index, source.number(0, 1))
    written = [*shape[:dim], length, *shape[dim + 1 :]]
    kwargs = {"alpha": 2.0} if name == "index_add" else {}
    return call(name, x, dim, index, source.floats(*written), **kwargs)


@sample("index_put", "index_put mask")
def _index_put(source: Source, name: str) -> Sample:
    shape = source.shape(2, 3)
    x = source.floats(*shape)
    if name.endswith("mask"):
        mask = source.booleans(*shape[: source.number(1, len(shape))])
        return call(name, x, [mask], source.floats(), False)
    at = source.shape(1, 2)
    adds = bool(source.flag())
    if adds:
        given: list[Tensor | None] = [source.integers(shape[0], *at)]
    else:  # every entry once
        length = source.number(1, shape[0])
        at = [length]
        given = [torch.argsort(source.floats(shape[0]))[:length]]
    values = source.floats(*source.broadcastable([*at, *shape[1:]]))
    return call(name, x, given, values, adds)


@sample("slice_scatter", "select_scatter")
def _write_slice(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    start = source.number(0, shape[dim] - 1)
    x = source.floats(*shape)
    if name == "select_scatter":
        return call(name, x, source.floats(*shape[:dim], *shape[dim + 1 :]), dim, start)
    written = [*shape[:dim], shape[dim] - start, *shape[dim + 1 :]]
    return call(name, x, source.floats(*written), dim, start, shape[dim])


@sample("histc")
def _histc(source: Source) -> Sample:
    return call("histc", source.floats(*source.shape(1, 2)).detach().round(), 5, -2, 2)


@sample("bincount")
def _bincount(source: Source) -> Sample:
    return call("bincount", source.integers(4, source.size()), None, 4)


@sample("one_hot")
def _one_hot(source: Source) -> Sample:
    return call("one_hot", source.integers(5, *source.shape(1, 3)), 5)


@sample("linspace", "eye", "scalar_tensor")
def _counted(source: Source, name: str) -> Sample:
    args = [0.0, 1.0, source.size()] if name == "linspace" else [source.size()]
    return call(name, *args, dtype=torch.float64)
