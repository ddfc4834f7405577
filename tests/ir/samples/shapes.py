"""Ops that move entries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autopar.testing.prove import Sample
from tests.ir.samples.source import Source, call, sample


@sample("reshape", "view", "_unsafe_view")
def _reshape(source: Source, name: str) -> Sample:
    shape = source.shape(0, 4)
    tensor = source.floats(*shape)
    factors = [factor for size in shape for factor in _split(source, size)]
    merged: list[int] = []
    for factor in factors:
        if merged and source.flag():
            merged[-1] *= factor
        else:
            merged.append(factor)
    return call(name, tensor, merged)


def _split(source: Source, size: int) -> list[int]:
    divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
    first = divisors[source.number(0, len(divisors) - 1)]
    return [first, size // first]


@sample("unsqueeze")
def _unsqueeze(source: Source) -> Sample:
    shape = source.shape()
    return call("unsqueeze", source.floats(*shape), source.number(-1, len(shape)))


@sample("squeeze", "squeeze.dim")
def _squeeze(source: Source, name: str) -> Sample:
    shape = [*source.shape(), 1, source.size()]
    args = [len(shape) - source.number(1, 2)] if name == "squeeze.dim" else []
    return call(name, source.floats(*shape), *args)


@sample("flatten.using_ints")
def _flatten(source: Source) -> Sample:
    return call("flatten.using_ints", source.floats(*source.shape(2, 4)), source.number(0, 1), -1)


@sample("unflatten.int")
def _unflatten(source: Source) -> Sample:
    inner = source.number(1, 3)
    x = source.floats(source.size(), source.size() * inner)
    return call("unflatten.int", x, 1, [-1, inner])


@sample("transpose.int", "swapaxes", "movedim.int")
def _transpose(source: Source, name: str) -> Sample:
    shape = source.shape(2, 4)
    dims = [source.number(-len(shape), len(shape) - 1) for _ in range(2)]
    return call(name, source.floats(*shape), *dims)


@sample("permute")
def _permute(source: Source) -> Sample:
    shape = source.shape(2, 4)
    order = list(range(len(shape)))
    shift = source.number(0, len(shape))
    return call("permute", source.floats(*shape), order[shift:] + order[:shift])


@sample("t", "mT")
def _matrix_transpose(source: Source, name: str) -> Sample:
    return call(name, source.floats(source.size(), source.size()))


@sample("expand", "repeat")
def _expand(source: Source, name: str) -> Sample:
    shape = source.shape()
    tensor = source.floats(*source.broadcastable(shape))
    if name == "expand":
        return call(name, tensor, shape)
    repeats = [source.multiple() if source.flag() else source.number(1, 2) for _ in shape]
    return call(name, tensor, repeats)


@sample("repeat_interleave.self_int")
def _repeat_interleave(source: Source) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    return call("repeat_interleave.self_int", source.floats(*shape), source.number(1, 3), dim)


@sample("slice.Tensor")
def _slice(source: Source) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    start = source.number(0, shape[dim] - 1)
    end = 2**63 - 1 if source.flag() else source.number(start + 1, shape[dim])
    return call("slice.Tensor", source.floats(*shape), dim, start, end)


@sample("narrow")
def _narrow(source: Source) -> Sample:
    shape = source.shape(1, 3)
    start = source.number(0, shape[-1] - 1)
    length = source.number(1, shape[-1] - start)
    return call("narrow", source.floats(*shape), -1, start, length)


@sample("select.int", "unbind.int")
def _select(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    args = [source.number(0, shape[dim] - 1)] if name == "select.int" else []
    return call(name, source.floats(*shape), dim, *args)


@sample("constant_pad_nd", "pad")
def _pad(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape(1, 3))
    value = source.number(0, 1)
    padding = [source.number(0, 1), source.number(0, 1)]
    args = ["constant", float(value)] if name == "pad" else [value]
    return call(name, x, padding, *args)


@sample("split_with_sizes", "split.Tensor", "chunk")
def _split_dim(source: Source, name: str) -> Sample:
    unit = source.size()
    parts = [source.number(1, 3) for _ in range(source.number(1, 3))]
    if name != "split_with_sizes":
        parts = [1] * len(parts)
    x = source.floats(*source.shape(0, 1), unit * sum(parts))
    size: Any = [unit * part for part in parts]
    if name != "split_with_sizes":
        size = unit if name == "split.Tensor" else len(parts)
    return call(name, x, size, -1)


@sample("cat", "stack")
def _cat(source: Source, name: str) -> Sample:
    shape = source.shape(1, 2)
    dim = source.number(0, len(shape) - 1)
    unit = shape[dim]
    tensors: list[Tensor] = []
    for _ in range(source.number(1, 3)):
        if name == "cat":
            shape[dim] = unit * source.number(1, 2)
        tensors.append(source.floats(*shape))
    return call(name, tensors, dim)


@sample("flip")
def _flip(source: Source) -> Sample:
    return call("flip", source.floats(*source.shape(1, 3)), [0])


@sample("roll")
def _roll(source: Source) -> Sample:
    return call("roll", source.floats(*source.shape(1, 3)), [1], [-1])


@sample("tile")
def _tile(source: Source) -> Sample:
    shape = source.shape(1, 3)
    repeats = [source.number(1, 2) for _ in range(source.number(1, len(shape) + 1))]
    return call("tile", source.floats(*shape), repeats)


@sample("movedim.intlist", "moveaxis.int", "swapdims", "adjoint", "diagonal")
def _moved(source: Source, name: str) -> Sample:
    shape = source.shape(3, 4)
    x = source.floats(*shape)
    if name == "adjoint":
        return call(name, x)
    if name == "movedim.intlist":
        return call(name, x, [0, -1], [1, 0])
    return call(name, x, *([0, -1, 0] if name == "diagonal" else [0, -1]))


@sample("tensor_split.sections", "tensor_split.indices")
def _tensor_split(source: Source, name: str) -> Sample:
    unit = source.size()
    x = source.floats(unit * 3, source.size())
    return call(name, x, 3 if name.endswith("sections") else [unit, 2 * unit], 0)
