"""Pointwise ops."""

from __future__ import annotations

import torch

from autopar.testing.prove import Sample
from tests.ir.samples.source import Source, call, sample


@sample(
    "abs", "clamp", "cos", "erf", "exp", "gelu", "neg", "relu", "sigmoid", "silu", "sin", "tanh",
    "clone", "contiguous", "alias", "softplus", "sign", "zeros_like", "ones_like", "detach",
    "logical_not", "isnan", "_to_copy", "leaky_relu", "square",
)  # fmt: skip
def _unary(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape())
    return call(name, x, -0.5, 0.5) if name == "clamp" else call(name, x)


@sample("log", "reciprocal", "rsqrt", "sqrt")
def _unary_positive(source: Source, name: str) -> Sample:
    return call(name, source.positive(*source.shape()))


@sample(
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "eq.Tensor",
    "lt.Tensor", "rsub.Tensor", "logaddexp", "atan2", "remainder.Tensor",
)  # fmt: skip
def _binary(source: Source, name: str) -> Sample:
    shape = source.shape()
    left, right = source.floats(*shape), source.positive(*source.broadcastable(shape))
    if source.flag() and not name.startswith(("div", "remainder")):
        left, right = right, left
    return call(name, left, right)


@sample("add.Scalar", "mul.Scalar", "div.Scalar", "sub.Scalar", "pow.Tensor_Scalar", "ne.Scalar")
def _with_scalar(source: Source, name: str) -> Sample:
    return call(name, source.positive(*source.shape()), source.number(0, 3) or 2.5)


@sample("add.Tensor number", "mul.Tensor number", "div.Tensor number")
def _with_number(source: Source, name: str) -> Sample:
    return call(name, source.floats(*source.shape()), 2.5)


@sample("add.Tensor alpha", "sub.Tensor alpha")
def _with_alpha(source: Source, name: str) -> Sample:
    shape = source.shape()
    return call(name, source.floats(*shape), source.floats(*shape), alpha=-0.5)


@sample("div.Tensor_mode")
def _divide_rounding(source: Source) -> Sample:
    shape = source.shape()
    args = (source.floats(*shape), source.positive(*shape))
    return call("div.Tensor_mode", *args, rounding_mode="floor")


@sample("pow.Tensor_Tensor")
def _power(source: Source) -> Sample:
    shape = source.shape()
    return call("pow.Tensor_Tensor", source.positive(*shape), source.floats(*shape))


@sample("__and__.Tensor", "logical_or")
def _logical(source: Source, name: str) -> Sample:
    shape = source.shape()
    return call(name, source.booleans(*shape), source.booleans(*source.broadcastable(shape)))


@sample("lerp.Scalar")
def _lerp(source: Source) -> Sample:
    shape = source.shape()
    return call("lerp.Scalar", source.floats(*shape), source.floats(*shape), 0.25)


@sample("addcmul", "addcdiv")
def _add_product(source: Source, name: str) -> Sample:
    shape = source.shape()
    tensors = [source.positive(*source.broadcastable(shape)) for _ in range(2)]
    return call(name, source.floats(*shape), *tensors, value=-2)


@sample("where.self")
def _where(source: Source) -> Sample:
    shape = source.shape()
    condition = source.booleans(*source.broadcastable(shape))
    return call("where.self", condition, source.floats(*shape), source.floats(*shape))


@sample("where.ScalarOther")
def _where_scalar(source: Source) -> Sample:
    shape = source.shape()
    value = source.number(0, 1)
    return call("where.ScalarOther", source.booleans(*shape), source.floats(*shape), value)


@sample("masked_fill.Scalar")
def _masked_fill(source: Source) -> Sample:
    shape = source.shape()
    mask = source.booleans(*source.broadcastable(shape))
    return call("masked_fill.Scalar", source.floats(*shape), mask, source.number(0, 1))


@sample("masked_fill.Tensor")
def _masked_fill_tensor(source: Source) -> Sample:
    shape = source.shape()
    mask = source.booleans(*source.broadcastable(shape))
    return call("masked_fill.Tensor", source.floats(*shape), mask, source.floats())


@sample("tril", "triu")
def _triangle(source: Source, name: str) -> Sample:
    return call(name, source.floats(*source.shape(2, 4)))


@sample("to.dtype")
def _cast(source: Source) -> Sample:
    shape = source.shape()
    tensor = source.floats(*shape) if source.flag() else source.integers(5, *shape)
    dtype = torch.float64 if tensor.dtype == torch.int64 else torch.int64
    return call("to.dtype", tensor, dtype)


@sample("type_as")
def _type_as(source: Source) -> Sample:
    return call("type_as", source.integers(9, *source.shape()), source.floats(*source.shape()))


@sample("dropout")
def _dropout(source: Source) -> Sample:
    return call("dropout", source.floats(*source.shape(1, 3)), 0.4, source.flag())


@sample("alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _other_dropout(source: Source, name: str) -> Sample:
    return call(name, source.floats(*source.shape(2, 4)), 0.4, source.flag())


@sample("bernoulli", "bernoulli.p", "rand_like", "randn_like", "uniform", "exponential")
def _sampled(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape(1, 3)).sigmoid()
    return call(name, x, *((0.3,) if name == "bernoulli.p" else ()))


@sample("randint_like", "randint_like.low_dtype", "normal_functional")
def _sampled_between(source: Source, name: str) -> Sample:
    low = (2,) if name != "randint_like" else ()
    return call(name, source.floats(*source.shape(1, 3)), *low, 9)


@sample("rrelu")
def _rrelu(source: Source) -> Sample:
    return call("rrelu", source.floats(*source.shape(1, 3)), 0.1, 0.4, source.flag())


@sample("hypot", "nan_to_num", "xlogy.Tensor", "copysign.Tensor", "sinc", "deg2rad")
def _tagged(source: Source, name: str) -> Sample:
    shape = source.shape()
    if name in ("nan_to_num", "sinc", "deg2rad"):
        return call(name, source.floats(*shape))
    return call(name, source.floats(*shape), source.positive(*shape))


@sample("fill.Scalar", "fill.Tensor")
def _fill(source: Source, name: str) -> Sample:
    value = source.floats() if name == "fill.Tensor" else float(source.number(0, 1))
    return call(name, source.floats(*source.shape()), value)


@sample("prelu")
def _prelu(source: Source) -> Sample:
    shape = source.shape(2, 3)
    return call("prelu", source.floats(*shape), source.floats(shape[1] if source.flag() else 1))


@sample("glu")
def _glu(source: Source) -> Sample:
    shape = source.shape(0, 2)
    return call("glu", source.floats(*shape, 2 * source.size()), -1)


@sample("bucketize.Tensor", "searchsorted.Tensor")
def _searched(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    values = source.floats(*shape).detach()
    if name == "bucketize.Tensor":
        return call(name, values, torch.arange(-2.0, 2.0, dtype=torch.float64))
    rows = shape[:-1] if source.flag() else []
    return call(name, source.floats(*rows, 4).detach().sort(-1).values, values)


@sample("add.Tensor mixed", "mul.Tensor mixed", "div.Tensor mixed", "where.self mixed")
def _mixed(source: Source, name: str) -> Sample:
    """Operands of two dtypes: the result has the wider one."""
    shape = source.shape()
    wide = source.positive(*shape)
    narrow = source.integers(5, *shape) + 1 if source.flag() else source.positive(*shape).float()
    if name.startswith("where"):
        return call(name, source.booleans(*shape), narrow, wide)
    pair = (narrow, wide) if source.flag() else (wide, narrow)
    return call(name, *pair)


@sample("complex", "view_as_complex", "view_as_real", "polar", "real")
def _complex(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    if name == "view_as_complex":
        return call(name, source.floats(*shape, 2))
    if name in ("view_as_real", "real"):
        return call(name, torch.complex(source.floats(*shape), source.floats(*shape)))
    return call(name, source.positive(*shape), source.floats(*shape))


@sample("broadcast_tensors")
def _broadcast(source: Source) -> Sample:
    shape = source.shape()
    tensors = [source.floats(*source.broadcastable(shape)) for _ in range(source.number(1, 3))]
    return call("broadcast_tensors", tensors)
