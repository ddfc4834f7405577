"""Convolutions: sums over input channels; patches side by side are split by position, too."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.graph import Size
from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Rule
from autopar.ir.rules.registry import register

_aten = torch.ops.aten


@register(_aten.conv1d, _aten.conv2d, _aten.conv3d, _aten.convolution.default)
def _convolution(node: fx.Node) -> Rule:
    """``b c x, n c p, n -> b n y``."""
    call = Call(node)
    num_spatial = len(call.shape("weight")) - 2
    if call.argument_or("transposed", False):
        return _rule(call, num_spatial, turned=True, patches=[_WHOLE] * num_spatial)
    patches = [_patches(call, dim, num_spatial) for dim in range(num_spatial)]
    return _rule(call, num_spatial, turned=False, patches=patches)


@register(_aten.conv_transpose1d, _aten.conv_transpose2d, _aten.conv_transpose3d)
def _transposed_convolution(node: fx.Node) -> Rule:
    """``b c x, c n p, n -> b n y``."""
    call = Call(node)
    num_spatial = len(call.shape("weight")) - 2
    return _rule(call, num_spatial, turned=True, patches=[_WHOLE] * num_spatial)


_WHOLE = ("_", "_", "_")


def _rule(
    call: Call, num_spatial: int, *, turned: bool, patches: list[tuple[str, str, str]]
) -> Rule:
    """The rule from the texts of each spatial dim of input, weight and result.

    Groups split whole: a rank has fewer of them.
    """
    read, kernel, written = (" ".join(dim[side] for dim in patches) for side in range(3))
    batch = "b " if len(call.shape("input")) == num_spatial + 2 else ""
    groups = call.integer("groups")
    if groups == 1:
        given, made, channels = "c", "n", "c n" if turned else "n c"
    else:  # a weight has the groups in the dim that comes first
        given, made, channels = "(g !c)", "(g !n)", "(g !c) !n" if turned else "(g !n) !c"
    return call.text_rule(
        {"input": f"{batch}{given} {read}", "weight": f"{channels} {kernel}", "bias": made},
        [f"{batch}{made} {written}"],
        linear=[("input", "bias"), ("weight", "bias")],
        additive=["bias"] if groups == 1 else [],
        sizes={"g": groups} if groups > 1 else None,
    )


def _patches(call: Call, dim: int, num_spatial: int) -> tuple[str, str, str]:
    """Texts of one spatial dim of input, weight and result: whole, unless patches lie side by side
    without overlap, padding or rest.
    """
    size, kernel = call.shape("input")[dim - num_spatial], call.shape("weight")[2 + dim]
    side_by_side = (
        _at(call, "stride", dim) == kernel
        and _at(call, "dilation", dim) == 1
        and _at(call, "padding", dim) in (0, "valid")
        and _is_multiple(size, kernel)
    )
    return (f"(y{dim} !p{dim})", f"!p{dim}", f"y{dim}") if side_by_side else _WHOLE


def _at(call: Call, name: str, dim: int) -> int | str:
    """An argument that is one value for all spatial dims, or has one for each."""
    value = call.argument(name)
    if isinstance(value, list | tuple):
        return value[dim if len(value) > 1 else 0]
    return value


def _is_multiple(size: Size, kernel: Size) -> bool:
    return isinstance(size, int) and isinstance(kernel, int) and size % kernel == 0
