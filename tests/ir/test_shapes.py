"""Shape arguments are rewritten so that an op yields the shape asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ir.shapes import with_shape, with_sizes, writes_shape

aten = torch.ops.aten
X = torch.arange(24)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "shape"),
    [
        (aten.reshape.default, (X, [-1, 2]), {}, (2, 3, 4)),
        (aten.expand.default, (X[:1], [-1]), {}, (5, 7)),
        (aten.zeros.default, ([-1],), {"dtype": torch.int64}, (3, 2)),
        (aten.full.default, ([-1], 2.5), {}, (4,)),
        (aten.new_ones.default, (X, [-1]), {"dtype": torch.bool}, (2, 2)),
        (aten.new_zeros.default, (X,), {"size": [-1]}, (2, 2)),
        (aten.arange.default, (-1,), {}, (6,)),
        (aten.arange.start, (3, 99), {}, (6,)),
        (aten.arange.start_step, (1, 99, 3), {}, (6,)),
    ],
)
def test_the_result_has_the_shape(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> None:
    assert writes_shape(target)
    new_args, new_kwargs = with_shape(target, args, kwargs, shape)
    assert tuple(target(*new_args, **new_kwargs).shape) == shape
    assert with_shape(target, new_args, new_kwargs, shape) == (new_args, new_kwargs)


def test_other_ops_keep_their_arguments() -> None:
    assert not writes_shape(aten.add.Tensor)
    assert with_shape(aten.add.Tensor, (X, 1), {"alpha": 2}, (3,)) == ((X, 1), {"alpha": 2})


def test_split_sizes_follow_the_shapes() -> None:
    x = torch.zeros(2, 8)
    args, _ = with_sizes(
        aten.split_with_sizes.default, (x, [16, 8, 8], 1), {}, [(2, 4), (2, 2), (2, 2)]
    )
    assert args[1:] == ([4, 2, 2], 1)
