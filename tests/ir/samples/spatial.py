"""Convolutions, pooling, windows and grids."""

from __future__ import annotations

from typing import Any

from autopar.testing.prove import Sample
from tests.ir.samples.source import Source, call, sample


@sample("conv1d", "conv2d", "conv2d.padding", "convolution")
def _conv(source: Source, name: str) -> Sample:
    """Patches side by side, overlapping ones, groups; with and without batch and bias."""
    num_spatial = 1 if name == "conv1d" else 2
    groups = source.multiple() if source.number(0, 2) == 0 else 1
    given, made = groups * source.number(1, 3), groups * source.number(1, 3)
    if groups == 1:
        given, made = source.size(), source.size()
    kernel = [source.number(1, 3) for _ in range(num_spatial)]
    side_by_side = source.flag()
    stride = list(kernel) if side_by_side else [source.number(1, 2)] * num_spatial
    rest = 0 if side_by_side else source.number(0, 2)
    sizes = [k * source.size() + rest for k in kernel]
    batch = [] if name != "convolution" and source.number(0, 3) == 0 else [source.size()]
    x = source.floats(*batch, given, *sizes)
    weight = source.floats(made, given // groups, *kernel)
    bias = source.floats(made) if source.flag() else None
    padding: Any = [0 if side_by_side else source.number(0, 1)] * num_spatial
    if name == "conv2d.padding":
        padding = "valid"
    args: list[Any] = [x, weight, bias, stride, padding, [1] * num_spatial]
    if name == "convolution":
        args += [False, [0] * num_spatial]
    return call(name, *args, groups)


@sample("conv_transpose1d", "conv_transpose2d.input", "convolution turned")
def _conv_transpose(source: Source, name: str) -> Sample:
    num_spatial = 1 if name == "conv_transpose1d" else 2
    groups = source.multiple() if source.flag() else 1
    given, per_group = groups * source.size(), source.size()
    x = source.floats(source.size(), given, *[source.number(1, 3) for _ in range(num_spatial)])
    weight = source.floats(given, per_group, *[2] * num_spatial)
    bias = source.floats(groups * per_group) if source.flag() else None
    if name.startswith("convolution"):
        ones, zeros = [1] * num_spatial, [0] * num_spatial
        return call(name, x, weight, bias, ones, zeros, ones, True, zeros, groups)
    return call(name, x, weight, bias, *([n] * num_spatial for n in (2, 0, 0)), groups)


@sample(
    "avg_pool1d",
    "avg_pool2d",
    "max_pool2d",
    "max_pool2d_with_indices",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
)
def _pool(source: Source, name: str) -> Sample:
    spatial = [4] if name.endswith("1d") else [4, 6]
    return call(name, source.floats(source.size(), source.size(), *spatial), [2] * len(spatial))


@sample("upsample_bilinear2d.vec", "upsample_bicubic2d.vec", "upsample_nearest2d.vec")
def _upsample(source: Source, name: str) -> Sample:
    x = source.floats(source.size(), source.size(), 3, 2)
    corners = [] if "nearest" in name else [bool(source.flag())]
    return call(name, x, [4, 5], *corners, None)


@sample("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(source: Source, name: str) -> Sample:
    channels = source.size()
    if name == "pixel_shuffle":
        return call(name, source.floats(source.size(), channels * 4, 3, 2), 2)
    return call(name, source.floats(source.size(), channels, 4, 6), 2)


@sample("im2col")
def _im2col(source: Source) -> Sample:
    x = source.floats(source.size(), source.size(), 4, 6)
    return call("im2col", x, [2, 3], [1, 1], [0, source.number(0, 1)], [2, 1])


@sample("col2im")
def _col2im(source: Source) -> Sample:
    columns = source.floats(source.size(), source.size() * 4, 6)
    return call("col2im", columns, [4, 6], [2, 2], [1, 1], [0, 0], [2, 2])


@sample("unfold")
def _unfold(source: Source) -> Sample:
    shape = [*source.shape(0, 2), 6]
    return call("unfold", source.floats(*shape), -1, source.number(1, 3), source.number(1, 3))


@sample("reflection_pad1d", "replication_pad2d", "_pad_circular")
def _border(source: Source, name: str) -> Sample:
    spatial = [3] if name.endswith("1d") else [3, 4]
    pads = [source.number(0, 2) for _ in range(2 * len(spatial))]
    return call(name, source.floats(source.size(), source.size(), *spatial), pads)


@sample("meshgrid", "meshgrid.indexing")
def _meshgrid(source: Source, name: str) -> Sample:
    tensors = [source.floats(source.size()) for _ in range(source.number(1, 3))]
    kwargs = {"indexing": "xy" if source.flag() else "ij"} if name.endswith("indexing") else {}
    return call(name, tensors, **kwargs)
