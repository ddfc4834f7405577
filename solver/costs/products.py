"""Products of matrices: how many FLOPs of which shape an op is, from the shapes on a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from autopar.ir.graph import Size, info
from autopar.ir.layout import operands_of
from autopar.ir.recompute import op_name
from autopar.ir.rules.call import Call
from autopar.ir.rules.text import whole_size

Shape = Sequence[Size]

BIASED = frozenset({"addmm", "addmv", "baddbmm"})
"""Products whose first operand is what is added to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``batch`` products [rows, depth] · [depth, columns]; operands of ``itemsize`` bytes."""

    batch: Size
    rows: Size
    columns: Size
    depth: Size
    itemsize: int

    @property
    def flops(self) -> Size:
        return whole_size(2 * self.batch * self.rows * self.columns * self.depth)

    @property
    def left_gradient(self) -> Product:
        """The product that gives the gradient of the left operand."""
        return replace(self, columns=self.depth, depth=self.columns)

    @property
    def right_gradient(self) -> Product:
        """The product that gives the gradient of the right operand, transposed."""
        return replace(self, rows=self.columns, columns=self.depth, depth=self.rows)


def numel(shape: Shape) -> Size:
    """Elements of a tensor."""
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def product_of(node: fx.Node, operands: Sequence[Shape], results: Sequence[Shape]) -> Product:
    """The product that a node of the family ``PRODUCT`` is."""
    name = op_name(node)
    first = 1 if name in BIASED else 0
    left, right = operands[first], operands[first + 1]
    itemsize = info(operands_of(node)[0]).tensor.dtype.itemsize
    if name == "linear":
        columns = right[0] if len(right) > 1 else 1
        batch, rows, depth = 1, numel(left[:-1]), left[-1]
    elif name.startswith("conv"):
        batch, rows, columns, depth = _convolution(node, left, right, results[0])
    elif name in ("einsum", "tensordot"):
        batch, rows, columns, depth = _einsum(node, left, right)
    elif "grouped_mm" in name and len(operands) > 2:
        batch, rows, columns, depth = _grouped(node, left, right, results[0])
    else:
        batch, rows, columns, depth = _matmul(left, right, results[0])
    return Product(batch=batch, rows=rows, columns=columns, depth=depth, itemsize=itemsize)


_Sizes = tuple[Size, Size, Size, Size]


def _matmul(left: Shape, right: Shape, result: Shape) -> _Sizes:
    columns = right[-1] if len(right) > 1 else 1
    rows = left[-2] if len(left) > 1 else 1
    batch = numel(result[:-2]) if len(left) > 1 and len(right) > 1 else 1
    if len(right) == 2 and len(left) > 2:  # one matrix for all: a tall product
        rows, batch = numel(left[:-1]), 1
    return batch, rows, columns, left[-1]


def _convolution(node: fx.Node, image: Shape, weight: Shape, result: Shape) -> _Sizes:
    """Every group is a product of its patches and its kernels."""
    call = Call(node)
    turned = "transpose" in op_name(node) or bool(call.argument_or("transposed", False))
    whole, here = call.shape("weight")[0], weight[0]
    assert isinstance(whole, int)
    assert isinstance(here, int)
    groups = max(1, call.integer("groups") * here // whole)
    per_group = here // groups
    if turned:
        return groups, _ratio(numel(image), here), numel(weight[1:]), per_group
    return groups, _ratio(numel(result), here), per_group, numel(weight[1:])


def _einsum(node: fx.Node, left: Shape, right: Shape) -> _Sizes:
    """Batch, rows, columns and depth are the dims of both or one of them that the result has."""
    call = Call(node)
    if op_name(node) == "tensordot":
        depth = math.prod(left[dim] for dim in call.integers("dims_self"))
        return 1, _ratio(numel(left), depth), _ratio(numel(right), depth), depth
    equation = str(call.argument("equation")).replace(" ", "")
    sides, _, written = equation.partition("->")
    terms = sides.split(",")
    sizes: list[dict[str, Size]] = []
    for term, shape in zip(terms, (left, right), strict=True):
        before, dots, after = term.partition("...")
        rest = len(shape) - len(before) - len(after)
        names = [*before, *(f".{index}" for index in reversed(range(rest))), *after]
        assert dots or not rest, "the equation does not fit its operands"
        sizes.append(dict(zip(names, shape, strict=True)))
    kept = set(written)  # what both operands have and no result is written for is summed
    batch, rows, columns, depth = 1, 1, 1, 1
    for name in dict.fromkeys((*sizes[0], *sizes[1])):
        both = name in sizes[0] and name in sizes[1]
        size = max((s[name] for s in sizes if name in s), key=lambda size: size != 1)
        if not both:
            rows, columns = (rows * size, columns) if name in sizes[0] else (rows, columns * size)
        elif name in kept or name.startswith("."):
            batch = batch * size
        else:
            depth = depth * size
    return batch, rows, columns, depth


def _grouped(node: fx.Node, left: Shape, right: Shape, result: Shape) -> _Sizes:
    """Groups count as evenly filled. The dim that they divide is the rows, columns or depth."""
    if len(left) == 2 and len(right) == 3:
        return right[0], _ratio(left[0], right[0]), right[2], left[1]
    if len(left) == 3:
        return left[0], left[1], _ratio(right[1], left[0]), left[2]
    return result[0], left[0], right[1], _ratio(left[1], result[0])


def _ratio(size: Size, divisor: Size) -> Size:
    return whole_size(sympy.sympify(size) / divisor)
