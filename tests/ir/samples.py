"""Random calls of every op that has a rule, for the prover."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir import functional
from tests.ir.prove import Sample

_aten = torch.ops.aten


class Source:
    """Draws sizes and makes tensors. Sizes are often multiples of the axis that is tried."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int], axis_size: int) -> None:
        self._draw = draw
        self._axis_size = axis_size
        self._generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def size(self, largest: int = 2) -> int:
        """A multiple of the axis size, or any small size."""
        multiple = self._axis_size * self.number(1, largest)
        return multiple if self.flag() or self.flag() else self.number(1, 3)

    def multiple(self) -> int:
        """The axis size, or twice that."""
        return self._axis_size * self.number(1, 2)

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def flag(self) -> bool:
        return bool(self._draw(st.integers(0, 1)))

    def shape(self, low: int = 0, high: int = 3) -> list[int]:
        return [self.size() for _ in range(self.number(low, high))]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return self.floats(*shape).abs() + 0.5

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def booleans(self, *shape: int) -> Tensor:
        return self.integers(2, *shape).bool()

    def broadcastable(self, shape: Iterable[int]) -> list[int]:
        """A shape that is broadcast to ``shape``."""
        sizes = [1 if self.number(0, 3) == 0 else size for size in shape]
        return sizes[self.number(0, len(sizes)) :]


SampleMaker = Callable[[Source], Sample]

SAMPLES: dict[str, SampleMaker] = {}
"""Maker of samples by a name that starts with the op's name."""


def sample(*names: str) -> Callable[[Any], Any]:
    """Register a maker ``(source) -> Sample``, or ``(source, name)`` for several names."""

    def decorate(make: Any) -> Any:
        for name in names:
            SAMPLES[name] = make if len(names) == 1 else _bound(make, name)
        return make

    return decorate


def _bound(make: Any, name: str) -> SampleMaker:
    return lambda source: make(source, name)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload.partition(" ")[0] or "default")


def _call(name: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target=_overload(name), args=args, kwargs=kwargs)


# --- pointwise -----------------------------------------------------------------------------------


@sample(
    "abs", "clamp", "cos", "erf", "exp", "gelu", "neg", "relu", "sigmoid", "silu", "sin", "tanh",
    "clone", "contiguous", "alias", "softplus", "sign", "zeros_like", "ones_like", "detach",
    "logical_not", "isnan", "_to_copy", "leaky_relu", "square",
)  # fmt: skip
def _unary(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape())
    return _call(name, x, -0.5, 0.5) if name == "clamp" else _call(name, x)


@sample("log", "reciprocal", "rsqrt", "sqrt")
def _unary_positive(source: Source, name: str) -> Sample:
    return _call(name, source.positive(*source.shape()))


@sample(
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "eq.Tensor",
    "lt.Tensor", "rsub.Tensor", "logaddexp", "atan2", "remainder.Tensor",
)  # fmt: skip
def _binary(source: Source, name: str) -> Sample:
    shape = source.shape()
    left, right = source.floats(*shape), source.positive(*source.broadcastable(shape))
    if source.flag() and not name.startswith(("div", "remainder")):
        left, right = right, left
    return _call(name, left, right)


@sample("add.Scalar", "mul.Scalar", "div.Scalar", "sub.Scalar", "pow.Tensor_Scalar", "ne.Scalar")
def _with_scalar(source: Source, name: str) -> Sample:
    return _call(name, source.positive(*source.shape()), source.number(0, 3) or 2.5)


@sample("add.Tensor number", "mul.Tensor number", "div.Tensor number")
def _with_number(source: Source, name: str) -> Sample:
    return _call(name, source.floats(*source.shape()), 2.5)


@sample("add.Tensor alpha", "sub.Tensor alpha")
def _with_alpha(source: Source, name: str) -> Sample:
    shape = source.shape()
    return _call(name, source.floats(*shape), source.floats(*shape), alpha=-0.5)


@sample("div.Tensor_mode")
def _divide_rounding(source: Source) -> Sample:
    shape = source.shape()
    args = (source.floats(*shape), source.positive(*shape))
    return _call("div.Tensor_mode", *args, rounding_mode="floor")


@sample("pow.Tensor_Tensor")
def _power(source: Source) -> Sample:
    shape = source.shape()
    return _call("pow.Tensor_Tensor", source.positive(*shape), source.floats(*shape))


@sample("__and__.Tensor", "logical_or")
def _logical(source: Source, name: str) -> Sample:
    shape = source.shape()
    return _call(name, source.booleans(*shape), source.booleans(*source.broadcastable(shape)))


@sample("lerp.Scalar")
def _lerp(source: Source) -> Sample:
    shape = source.shape()
    return _call("lerp.Scalar", source.floats(*shape), source.floats(*shape), 0.25)


@sample("addcmul", "addcdiv")
def _add_product(source: Source, name: str) -> Sample:
    shape = source.shape()
    tensors = [source.positive(*source.broadcastable(shape)) for _ in range(2)]
    return _call(name, source.floats(*shape), *tensors, value=-2)


@sample("where.self")
def _where(source: Source) -> Sample:
    shape = source.shape()
    condition = source.booleans(*source.broadcastable(shape))
    return _call("where.self", condition, source.floats(*shape), source.floats(*shape))


@sample("where.ScalarOther")
def _where_scalar(source: Source) -> Sample:
    shape = source.shape()
    value = source.number(0, 1)
    return _call("where.ScalarOther", source.booleans(*shape), source.floats(*shape), value)


@sample("masked_fill.Scalar")
def _masked_fill(source: Source) -> Sample:
    shape = source.shape()
    mask = source.booleans(*source.broadcastable(shape))
    return _call("masked_fill.Scalar", source.floats(*shape), mask, source.number(0, 1))


@sample("masked_fill.Tensor")
def _masked_fill_tensor(source: Source) -> Sample:
    shape = source.shape()
    mask = source.booleans(*source.broadcastable(shape))
    return _call("masked_fill.Tensor", source.floats(*shape), mask, source.floats())


@sample("tril", "triu")
def _triangle(source: Source, name: str) -> Sample:
    return _call(name, source.floats(*source.shape(2, 4)))


@sample("to.dtype")
def _cast(source: Source) -> Sample:
    shape = source.shape()
    tensor = source.floats(*shape) if source.flag() else source.integers(5, *shape)
    dtype = torch.float64 if tensor.dtype == torch.int64 else torch.int64
    return _call("to.dtype", tensor, dtype)


@sample("type_as")
def _type_as(source: Source) -> Sample:
    return _call("type_as", source.integers(9, *source.shape()), source.floats(*source.shape()))


@sample("dropout")
def _dropout(source: Source) -> Sample:
    return _call("dropout", source.floats(*source.shape(1, 3)), 0.4, source.flag())


@sample("alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _other_dropout(source: Source, name: str) -> Sample:
    return _call(name, source.floats(*source.shape(2, 4)), 0.4, source.flag())


@sample("bernoulli", "bernoulli.p", "rand_like", "randn_like", "uniform", "exponential")
def _sampled(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape(1, 3)).sigmoid()
    return _call(name, x, *((0.3,) if name == "bernoulli.p" else ()))


@sample("randint_like", "randint_like.low_dtype", "normal_functional")
def _sampled_between(source: Source, name: str) -> Sample:
    low = (2,) if name != "randint_like" else ()
    return _call(name, source.floats(*source.shape(1, 3)), *low, 9)


@sample("rrelu")
def _rrelu(source: Source) -> Sample:
    return _call("rrelu", source.floats(*source.shape(1, 3)), 0.1, 0.4, source.flag())


# --- products ------------------------------------------------------------------------------------


@sample("linear")
def _linear(source: Source) -> Sample:
    inner, outer = source.size(), source.size()
    x = source.floats(*source.shape(0, 2), inner)
    weight = source.floats(outer, inner)
    return _call("linear", x, weight, *([source.floats(outer)] if source.flag() else []))


@sample("matmul")
def _matmul(source: Source) -> Sample:
    inner, batch = source.size(), source.shape(0, 2)
    left = [*source.broadcastable(batch), source.size(), inner]
    right = [*batch, inner, source.size()]
    if source.number(0, 4) == 0:
        right = [inner]
    elif source.number(0, 4) == 0:
        left = [inner]
    return _call("matmul", source.floats(*left), source.floats(*right))


@sample("mm", "bmm")
def _mm(source: Source, name: str) -> Sample:
    inner, batch = source.size(), [source.size()] if name == "bmm" else []
    left = source.floats(*batch, source.size(), inner)
    return _call(name, left, source.floats(*batch, inner, source.size()))


@sample("addmm", "baddbmm")
def _addmm(source: Source, name: str) -> Sample:
    rows, inner, columns = source.size(), source.size(), source.size()
    batch = [source.size()] if name == "baddbmm" else []
    bias = source.floats(*source.broadcastable([*batch, rows, columns]))
    left, right = source.floats(*batch, rows, inner), source.floats(*batch, inner, columns)
    return _call(name, bias, left, right, beta=2, alpha=0.5)


@sample("mv")
def _mv(source: Source) -> Sample:
    inner = source.size()
    return _call("mv", source.floats(source.size(), inner), source.floats(inner))


@sample("addmv")
def _addmv(source: Source) -> Sample:
    rows, inner = source.size(), source.size()
    return _call("addmv", source.floats(rows), source.floats(rows, inner), source.floats(inner))


@sample("dot")
def _dot(source: Source) -> Sample:
    size = source.size()
    return _call("dot", source.floats(size), source.floats(size))


@sample("outer")
def _outer(source: Source) -> Sample:
    return _call("outer", source.floats(source.size()), source.floats(source.size()))


@sample("einsum")
def _einsum(source: Source) -> Sample:
    b, h, q, k, d = (source.size() for _ in range(5))
    if source.flag():
        tensors = [source.floats(b, h, q, d), source.floats(b, h, k, d)]
        return _call("einsum", "bhqd,bhkd->bhqk", tensors)
    return _call("einsum", "bh,k->bk", [source.floats(b, h), source.floats(k)])


# --- shapes --------------------------------------------------------------------------------------


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
    return _call(name, tensor, merged)


def _split(source: Source, size: int) -> list[int]:
    divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
    first = divisors[source.number(0, len(divisors) - 1)]
    return [first, size // first]


@sample("unsqueeze")
def _unsqueeze(source: Source) -> Sample:
    shape = source.shape()
    return _call("unsqueeze", source.floats(*shape), source.number(-1, len(shape)))


@sample("squeeze", "squeeze.dim")
def _squeeze(source: Source, name: str) -> Sample:
    shape = [*source.shape(), 1, source.size()]
    args = [len(shape) - source.number(1, 2)] if name == "squeeze.dim" else []
    return _call(name, source.floats(*shape), *args)


@sample("flatten.using_ints")
def _flatten(source: Source) -> Sample:
    return _call("flatten.using_ints", source.floats(*source.shape(2, 4)), source.number(0, 1), -1)


@sample("unflatten.int")
def _unflatten(source: Source) -> Sample:
    inner = source.number(1, 3)
    x = source.floats(source.size(), source.size() * inner)
    return _call("unflatten.int", x, 1, [-1, inner])


@sample("transpose.int", "swapaxes", "movedim.int")
def _transpose(source: Source, name: str) -> Sample:
    shape = source.shape(2, 4)
    dims = [source.number(-len(shape), len(shape) - 1) for _ in range(2)]
    return _call(name, source.floats(*shape), *dims)


@sample("permute")
def _permute(source: Source) -> Sample:
    shape = source.shape(2, 4)
    order = list(range(len(shape)))
    shift = source.number(0, len(shape))
    return _call("permute", source.floats(*shape), order[shift:] + order[:shift])


@sample("t", "mT")
def _matrix_transpose(source: Source, name: str) -> Sample:
    return _call(name, source.floats(source.size(), source.size()))


@sample("expand", "repeat")
def _expand(source: Source, name: str) -> Sample:
    shape = source.shape()
    tensor = source.floats(*source.broadcastable(shape))
    if name == "expand":
        return _call(name, tensor, shape)
    repeats = [source.multiple() if source.flag() else source.number(1, 2) for _ in shape]
    return _call(name, tensor, repeats)


@sample("repeat_interleave.self_int")
def _repeat_interleave(source: Source) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    return _call("repeat_interleave.self_int", source.floats(*shape), source.number(1, 3), dim)


@sample("slice.Tensor")
def _slice(source: Source) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    start = source.number(0, shape[dim] - 1)
    end = 2**63 - 1 if source.flag() else source.number(start + 1, shape[dim])
    return _call("slice.Tensor", source.floats(*shape), dim, start, end)


@sample("narrow")
def _narrow(source: Source) -> Sample:
    shape = source.shape(1, 3)
    start = source.number(0, shape[-1] - 1)
    length = source.number(1, shape[-1] - start)
    return _call("narrow", source.floats(*shape), -1, start, length)


@sample("select.int", "unbind.int")
def _select(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    dim = source.number(0, len(shape) - 1)
    args = [source.number(0, shape[dim] - 1)] if name == "select.int" else []
    return _call(name, source.floats(*shape), dim, *args)


@sample("constant_pad_nd", "pad")
def _pad(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape(1, 3))
    value = source.number(0, 1)
    padding = [source.number(0, 1), source.number(0, 1)]
    args = ["constant", float(value)] if name == "pad" else [value]
    return _call(name, x, padding, *args)


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
    return _call(name, x, size, -1)


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
    return _call(name, tensors, dim)


@sample("flip")
def _flip(source: Source) -> Sample:
    return _call("flip", source.floats(*source.shape(1, 3)), [0])


@sample("roll")
def _roll(source: Source) -> Sample:
    return _call("roll", source.floats(*source.shape(1, 3)), [1], [-1])


# --- reductions and rows -------------------------------------------------------------------------


@sample("sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp", "sum.dim_IntList all")
def _reduction(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    dims = [source.number(-len(shape), len(shape) - 1)]
    if name.endswith("all"):
        dims = list(range(len(shape)))
    return _call(name, source.floats(*shape), dims, source.flag())


@sample("sum", "mean", "max", "min", "prod", "argmax", "std", "var")
def _full_reduction(source: Source, name: str) -> Sample:
    return _call(name, source.floats(*source.shape(1, 3), 2))


@sample("var.correction")
def _variance(source: Source) -> Sample:
    x = source.floats(*source.shape(0, 2), 3)
    return _call("var.correction", x, [-1], correction=0, keepdim=source.flag())


@sample("var_mean.correction")
def _variance_mean(source: Source) -> Sample:
    return _call("var_mean.correction", source.floats(*source.shape(0, 2), 3), [-1], correction=1)


@sample("linalg_vector_norm")
def _vector_norm(source: Source) -> Sample:
    return _call("linalg_vector_norm", source.floats(*source.shape(1, 3)), 2, [-1], source.flag())


@sample("max.dim", "argmax dim")
def _max_dim(source: Source, name: str) -> Sample:
    return _call(name.replace(" dim", ""), source.floats(*source.shape(1, 3)), 0, source.flag())


@sample("any.dim", "all.dim")
def _any(source: Source, name: str) -> Sample:
    return _call(name, source.booleans(*source.shape(1, 3)), -1)


@sample("softmax.int", "log_softmax.int", "cumsum", "cumprod", "logcumsumexp", "sort")
def _row(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    return _call(name, source.floats(*shape), source.number(-len(shape), len(shape) - 1))


@sample("_softmax", "_log_softmax")
def _raw_softmax(source: Source, name: str) -> Sample:
    return _call(name, source.floats(*source.shape(1, 3)), 0, False)


@sample("diff")
def _diff(source: Source) -> Sample:
    return _call("diff", source.floats(*source.shape(0, 2), 3), 1, -1)


@sample("topk")
def _topk(source: Source) -> Sample:
    return _call("topk", source.floats(*source.shape(0, 2), 4), 2, -1)


# --- norms, attention, embeddings, losses --------------------------------------------------------


@sample("layer_norm", "native_layer_norm")
def _layer_norm(source: Source, name: str) -> Sample:
    features = source.shape(1, 2)
    x = source.floats(*source.shape(1, 2), *features)
    weight = source.floats(*features) if source.flag() else None
    bias = source.floats(*features) if weight is not None and source.flag() else None
    return _call(name, x, features, weight, bias, 1e-5)


@sample("rms_norm")
def _rms_norm(source: Source) -> Sample:
    features = source.shape(1, 2)
    x = source.floats(*source.shape(1, 2), *features)
    return _call("rms_norm", x, features, source.floats(*features), 1e-5)


@sample("group_norm")
def _group_norm(source: Source) -> Sample:
    x = source.floats(source.size(), 4, source.size())
    return _call("group_norm", x, 2, source.floats(4), source.floats(4), 1e-5)


@sample("scaled_dot_product_attention", "scaled_dot_product_attention dropout")
def _attention(source: Source, name: str) -> Sample:
    batch, heads, features = source.size(), source.size(), source.number(1, 3)
    queries, causal = source.size(), source.flag()
    keys = queries if causal and source.flag() else source.size()
    groups = source.multiple() if source.flag() else 1
    query = source.floats(batch, heads * groups, queries, features)
    key, value = source.floats(batch, heads, keys, features), source.floats(batch, heads, keys, 2)
    mask = None
    if not causal and source.flag():
        mask = source.floats(*source.broadcastable([batch, heads * groups, queries]), keys)
    dropout = 0.3 if name.endswith("dropout") else 0.0
    return _call(name.split()[0], query, key, value, mask, dropout, causal, enable_gqa=groups > 1)


@sample("embedding")
def _embedding(source: Source) -> Sample:
    rows = source.size()
    ids = source.integers(rows, *source.shape())
    padding = source.number(-1, rows - 1)
    return _call("embedding", source.floats(rows, source.size()), ids, padding)


@sample("embedding scaled")
def _embedding_scaled(source: Source) -> Sample:
    ids = source.integers(4, *source.shape())
    return _call("embedding", source.floats(4, source.size()), ids, -1, True)


@sample("token_loss")
def _token_loss(source: Source) -> Sample:
    shape, vocabulary = source.shape(1, 2), source.size()
    targets = source.integers(vocabulary, *shape)
    targets = targets.masked_fill(source.integers(4, *shape) == 0, -100)
    return Sample(target=functional.token_loss, args=(source.floats(*shape, vocabulary), targets))


@sample("routed_experts")
def _routed_experts(source: Source) -> Sample:
    """Ids of no expert, experts without tokens, capacities that drop and that do not."""
    num_experts, hidden, features = source.size(), source.number(1, 4), source.size()
    gated, transposed = source.flag(), source.flag()
    tokens = source.shape(1, 3)
    ids = source.integers(num_experts + 1, *tokens, source.number(1, 3))
    up = [num_experts, features * (1 + gated), hidden]
    down = [num_experts, hidden, features]
    matrices = [[shape[0], *(shape[:0:-1] if transposed else shape[1:])] for shape in (up, down)]
    biases = [source.floats(*up[:2]), source.floats(*down[:2])] if source.flag() else []
    return Sample(
        target=torch.ops.autopar.routed_experts.default,
        args=(
            source.floats(*tokens, hidden),
            ids if source.flag() else ids.clamp_max(0),
            source.floats(*ids.shape),
            *(source.floats(*shape) for shape in matrices),
            *biases,
        ),
        kwargs={
            "activation": ("silu", "gelu_tanh", "relu_squared")[source.number(0, 2)],
            "gated": bool(gated),
            "transposed": bool(transposed),
            "capacity_factor": [None, 0.5, 1.0][source.number(0, 2)],
        },
    )


# --- creation and indexing -----------------------------------------------------------------------


@sample("zeros", "ones")
def _constant(source: Source, name: str) -> Sample:
    return _call(name, source.shape(), dtype=torch.float64)


@sample("full")
def _full(source: Source) -> Sample:
    return _call("full", source.shape(), 2.0, dtype=torch.float64)


@sample("new_zeros", "new_ones")
def _new(source: Source, name: str) -> Sample:
    return _call(name, source.floats(*source.shape()), source.shape())


@sample("arange")
def _arange(source: Source) -> Sample:
    return _call("arange", source.size())


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
    return _call("index.Tensor", source.floats(*shape), given)


@sample("index_select")
def _index_select(source: Source) -> Sample:
    shape = source.shape(1, 3)
    index = source.integers(shape[-1], source.size())
    return _call("index_select", source.floats(*shape), -1, index)


@sample("gather")
def _gather(source: Source) -> Sample:
    shape = source.shape(1, 3)
    index = [*shape[:-1], source.size()]
    if source.flag():
        index[0] = min(index[0], shape[0], 1)
    return _call("gather", source.floats(*shape), -1, source.integers(shape[-1], *index))
