"""Reductions, and ops along rows."""

from __future__ import annotations

from autopar.testing.prove import Sample
from tests.ir.samples.source import Source, call, sample


@sample("sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp", "sum.dim_IntList all")
def _reduction(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    dims = [source.number(-len(shape), len(shape) - 1)]
    if name.endswith("all"):
        dims = list(range(len(shape)))
    return call(name, source.floats(*shape), dims, source.flag())


@sample("sum", "mean", "max", "min", "prod", "argmax", "std", "var")
def _full_reduction(source: Source, name: str) -> Sample:
    return call(name, source.floats(*source.shape(1, 3), 2))


@sample("var.correction")
def _variance(source: Source) -> Sample:
    x = source.floats(*source.shape(0, 2), 3)
    return call("var.correction", x, [-1], correction=0, keepdim=source.flag())


@sample("var_mean.correction")
def _variance_mean(source: Source) -> Sample:
    return call("var_mean.correction", source.floats(*source.shape(0, 2), 3), [-1], correction=1)


@sample("linalg_vector_norm")
def _vector_norm(source: Source) -> Sample:
    return call("linalg_vector_norm", source.floats(*source.shape(1, 3)), 2, [-1], source.flag())


@sample("max.dim", "argmax dim")
def _max_dim(source: Source, name: str) -> Sample:
    return call(name.replace(" dim", ""), source.floats(*source.shape(1, 3)), 0, source.flag())


@sample("any.dim", "all.dim")
def _any(source: Source, name: str) -> Sample:
    return call(name, source.booleans(*source.shape(1, 3)), -1)


@sample("softmax.int", "log_softmax.int", "cumsum", "cumprod", "logcumsumexp", "sort")
def _row(source: Source, name: str) -> Sample:
    shape = source.shape(1, 3)
    return call(name, source.floats(*shape), source.number(-len(shape), len(shape) - 1))


@sample("_softmax", "_log_softmax")
def _raw_softmax(source: Source, name: str) -> Sample:
    return call(name, source.floats(*source.shape(1, 3)), 0, False)


@sample("diff")
def _diff(source: Source) -> Sample:
    return call("diff", source.floats(*source.shape(0, 2), 3), 1, -1)


@sample("topk")
def _topk(source: Source) -> Sample:
    return call("topk", source.floats(*source.shape(0, 2), 4), 2, -1)


@sample("nansum", "linalg_norm", "norm.ScalarOpt_dim", "std.correction")
def _more_reductions(source: Source, name: str) -> Sample:
    x = source.floats(*source.shape(1, 2), 3)
    if name == "std.correction":
        return call(name, x, [-1], correction=1)
    args = [[-1]] if name == "nansum" else [2, [-1]]
    return call(name, x, *args, bool(source.flag()))


@sample("cosine_similarity")
def _cosine(source: Source) -> Sample:
    shape = source.shape(1, 3)
    other = [1 if source.number(0, 3) == 0 else size for size in shape[:-1]]
    return call("cosine_similarity", source.floats(*shape), source.floats(*other, shape[-1]), -1)


@sample("renorm")
def _renorm(source: Source) -> Sample:
    return call("renorm", source.floats(source.size(), source.size()), 2, 0, 0.5)
