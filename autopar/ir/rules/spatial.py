"""Ops on images and windows: sequences and channels are split, positions stay whole."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.rules.call import Call
from autopar.ir.rules.core import Dim, Rule
from autopar.ir.rules.reduction import plain_dims, wrapped
from autopar.ir.rules.registry import register

_aten = torch.ops.aten

_LINEAR = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
"""
_MAXIMA = """
    adaptive_max_pool1d adaptive_max_pool2d max_pool1d max_pool2d max_pool3d
    max_pool2d_with_indices max_pool3d_with_indices
"""


@register(*(getattr(_aten, name) for name in (_LINEAR + _MAXIMA).split()))
def _resampled(node: fx.Node) -> Rule:
    """Pooling and interpolation of the last dims; there are as many as the op's name says."""
    call = Call(node)
    name = str(node.target).split(".")[1]
    num_spatial = int(next(letter for letter in reversed(name) if letter.isdigit()))
    whole = "_ " * num_spatial
    (operand,) = call.tensor_names
    return call.text_rule(
        {operand: f"b.. {whole}"},
        [f"b.. {whole}"] * len(call.results),
        linear=[(operand,)] if name in _LINEAR.split() else [],
    )


@register(_aten.pixel_shuffle.default)
def _pixel_shuffle(node: fx.Node) -> Rule:
    call = Call(node)
    factor = call.integer("upscale_factor")
    return call.text_rule(
        {"self": "b.. (c !r !s) _ _"},
        ["b.. c _ _"],
        linear=[("self",)],
        sizes={"r": factor, "s": factor},
    )


@register(_aten.pixel_unshuffle.default)
def _pixel_unshuffle(node: fx.Node) -> Rule:
    call = Call(node)
    factor = call.integer("downscale_factor")
    return call.text_rule(
        {"self": "b.. c _ _"},
        ["b.. (c !r !s) _ _"],
        linear=[("self",)],
        sizes={"r": factor, "s": factor},
    )


@register(_aten.im2col.default, _aten.col2im.default)
def _windows(node: fx.Node) -> Rule:
    """``F.unfold`` and ``F.fold``: the columns of a channel lie side by side."""
    call = Call(node)
    height, width = (call.integers("kernel_size") * 2)[:2]
    sizes = {"k": height * width}
    image, columns = "b.. c _ _", "b.. (c !k) _"
    if len(call.operands[0].shape) == (3 if node.target is _aten.im2col.default else 2):
        image, columns = "c _ _", "(c !k) _"
    source, target = (image, columns) if node.target is _aten.im2col.default else (columns, image)
    return call.text_rule({"self": source}, [target], linear=[("self",)], sizes=sizes)


@register(_aten.unfold.default)
def _unfold(node: fx.Node) -> Rule:
    """Windows of one dim become a new last dim."""
    call = Call(node)
    (dim,) = wrapped([call.integer("dimension")], len(call.shape("self")))
    dims, sizes = plain_dims(call, [dim])
    return call.rule({"self": dims}, [(*dims, Dim())], sizes, linear=[("self",)])


@register(
    _aten.reflection_pad1d,
    _aten.reflection_pad2d,
    _aten.reflection_pad3d,
    _aten.replication_pad1d,
    _aten.replication_pad2d,
    _aten.replication_pad3d,
    _aten._pad_circular,
)
def _padded(node: fx.Node) -> Rule:
    call = Call(node)
    pads = call.integers("pad" if node.target is _aten._pad_circular.default else "padding")
    whole = "_ " * (len(pads) // 2)
    return call.text_rule({"self": f"b.. {whole}"}, [f"b.. {whole}"], linear=[("self",)])


@register(_aten.meshgrid.default, _aten.meshgrid.indexing)
def _meshgrid(node: fx.Node) -> Rule:
    """Every result has a dim of each operand; ``xy`` swaps the first two."""
    call = Call(node)
    lengths = [tensor.shape[0] if tensor.shape else 1 for tensor in call.operands]
    sizes = {f"d{index}": size for index, size in enumerate(lengths)}
    dims = [Dim((f"d{index}",)) if size != 1 else Dim() for index, size in enumerate(lengths)]
    order = list(range(len(dims)))
    if call.argument_or("indexing", "ij") == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    grid = tuple(dims[index] for index in order)
    operands = tuple(
        (dim,) if tensor.shape else () for dim, tensor in zip(dims, call.operands, strict=True)
    )
    return Rule(
        operands=operands,
        results=(grid,) * len(call.results),
        sizes=sizes,
        linear=(frozenset(range(len(operands))),),
    )
