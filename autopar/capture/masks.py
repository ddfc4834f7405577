"""Attention masks that follow from the attention itself: a causal one becomes ``is_causal``, an
empty one none.

A mask for 8192 tokens has 67 million entries for each sequence, so it is evaluated a band of rows
at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.constants import BATCHES, constant_nodes, evaluate, merge_equal
from autopar.capture.elementwise import ELEMENTWISE, equal, without_repeats
from autopar.capture.flat import FlatGraph, argument, remove_dead_code
from autopar.capture.mask_rows import KeyRuns, key_runs
from autopar.ir.graph import info

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_BAND_ENTRIES = 2**20


def simplify_masks(flat: FlatGraph) -> None:
    """Drop masks of ``scaled_dot_product_attention`` that are exactly lower-triangular or let
    everything pass.
    """
    constant = constant_nodes(flat)
    merge_equal(flat, constant)  # each layer makes its own
    verdicts: dict[fx.Node, str] = {}
    for node in flat.calls():
        mask = argument(node, 3, "attn_mask", None) if node.target is _ATTENTION else None
        if not isinstance(mask, fx.Node) or mask not in constant:
            continue
        if mask not in verdicts:
            verdicts[mask] = _verdict(flat, mask)
        if verdicts[mask] == "other":
            continue
        query, key, value = node.args[:3]
        dropout = argument(node, 4, "dropout_p", 0.0)
        named = ("attn_mask", "dropout_p", "is_causal")
        kwargs = {name: value for name, value in node.kwargs.items() if name not in named}
        node.args = (query, key, value, None, dropout, verdicts[mask] == "causal")
        node.kwargs = kwargs
    remove_dead_code(flat)


def _verdict(flat: FlatGraph, mask: fx.Node) -> str:
    """``causal``, ``empty`` or ``other``."""
    shape = info(mask).tensor.shape
    if len(shape) < 2 or not isinstance(shape[-1], int) or not isinstance(shape[-2], int):
        return "other"
    queries, keys = shape[-2], shape[-1]
    possible = {"causal", "empty"}
    for batch in BATCHES:
        runs = key_runs(flat, mask, batch)
        if runs is not None:
            possible &= _sees(runs, queries, keys)
            if not possible:
                return "other"
            continue
        bands = _Bands(flat, batch)
        step = max(1, _BAND_ENTRIES // keys)
        for start in range(0, queries, step):
            stop = min(queries, start + step)
            band = bands.rows(mask, start, stop)
            allowed = {
                "causal": torch.ones(stop - start, keys, dtype=torch.bool).tril(start),
                "empty": torch.ones(1, 1, dtype=torch.bool),
            }
            possible = {name for name in possible if _admits(band, allowed[name])}
            if not possible:
                return "other"
    return "causal" if "causal" in possible else "empty"


def _sees(runs: KeyRuns, queries: int, keys: int) -> set[str]:
    """Which of ``causal`` and ``empty`` the runs are; none where a query sees nothing."""
    last = torch.arange(1, queries + 1)
    found = {"causal": last.clamp(max=keys), "empty": torch.full_like(last, keys)}
    starts = not bool(runs.first.any())
    return {name for name, end in found.items() if starts and bool((runs.end == end).all())}


def _admits(mask: Tensor, allowed: Tensor) -> bool:
    """True if ``mask`` lets exactly ``allowed`` through."""
    if mask.dtype is torch.bool:
        return equal(mask, allowed)
    return equal(mask == 0, allowed) and equal(mask > torch.finfo(mask.dtype).min, allowed)


class _Bands:
    """Evaluates constant nodes at one batch size for a band of rows (of dim -2).

    Leading dims along which a value repeats (all sequences have one mask) are left at 1, or out.
    """

    def __init__(self, flat: FlatGraph, batch: int) -> None:
        self._flat = flat
        self._batch = batch
        self._whole: dict[fx.Node, Any] = {}

    def rows(self, node: fx.Node, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of ``node``; all of a value whose dim -2 has size 1 or is
        missing.
        """
        shape = info(node).tensor.shape_at(self._batch)

        def band(source: fx.Node) -> Tensor:
            return self.rows(source, start, stop)

        if node.target in ELEMENTWISE:
            assert callable(node.target)
            result: Tensor = node.target(
                *fx.map_arg(node.args, band), **fx.map_arg(node.kwargs, band)
            )
            return result
        if self._indexes_by_tensors(node):
            table, indices = node.args[:2]
            assert isinstance(table, fx.Node)
            picked: Tensor = _aten.index.Tensor(self._value(table), fx.map_arg(indices, band))
            return without_repeats(picked)
        if node.target is _aten.expand.default and len(shape) >= 2:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            height = stop - start if shape[-2] > 1 else 1
            value = band(source)
            return value.expand(*value.shape[:-2], height, shape[-1])
        value = self._value(node)
        if len(shape) >= 2 and shape[-2] > 1:
            value = value.narrow(-2, start, stop - start)
        return without_repeats(value)

    def _indexes_by_tensors(self, node: fx.Node) -> bool:
        if node.target is not _aten.index.Tensor:
            return False
        table, indices = node.args[:2]
        assert isinstance(table, fx.Node)
        assert isinstance(indices, list | tuple)
        whole = len(indices) == len(info(table).tensor.shape)
        return whole and all(isinstance(index, fx.Node) for index in indices)

    def _value(self, node: fx.Node) -> Any:
        if node not in self._whole:
            self._whole.update(evaluate(self._flat, [node], self._batch))
        return self._whole[node]
