"""Masks as runs of keys are the masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, masks
from autopar.capture.constants import evaluate
from autopar.capture.flat import FlatGraph
from autopar.capture.mask_rows import key_runs
from autopar.ir.graph import ModelGraph
from tests.zoo import ZOO


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "bert"])
def test_runs_are_what_masks_let_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal masks, windows, and masks that let all pass."""
    seen: list[bool] = []
    verdict = masks._verdict  # pyright: ignore[reportPrivateUsage]

    def compare(flat: FlatGraph, mask: torch.fx.Node) -> str:
        for batch in (1, 3):
            runs = key_runs(flat, mask, batch)
            assert runs is not None
            whole: Tensor = evaluate(flat, [mask], batch)[mask]
            keys = torch.arange(whole.shape[-1])
            found = (keys >= runs.first[..., None]) & (keys < runs.end[..., None])
            seen.append(bool((found == whole).all()))
        return verdict(flat, mask)

    monkeypatch.setattr(masks, "_verdict", compare)
    model = ZOO[name]
    capture(model.build(), model.inputs(), loss_fn=model.loss_fn)
    assert seen
    assert all(seen)


class _Masked(nn.Module):
    """Attention whose mask is made of positions."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[1], device=x.device)[:, None]
        keys = torch.arange(x.shape[1], device=x.device)[None, :]
        mask = {
            "causal": keys <= rows,
            "turned": rows >= keys,
            "strict": keys < rows + 1,
            "later": keys >= rows,
            "window": (keys <= rows) & (keys > rows - 3),
            "falling": -keys >= -rows,
        }[self.rule]
        query = self.project(x)[:, None]
        out = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        return out.square().mean()


@pytest.mark.parametrize(
    ("rule", "is_causal"),
    [
        ("causal", True),
        ("turned", True),
        ("strict", True),
        ("later", False),
        ("window", False),
        ("falling", True),
    ],
)
def test_only_causal_masks_become_causal_attention(rule: str, is_causal: bool) -> None:
    graph: ModelGraph = capture(_Masked(rule), {"x": torch.randn(2, 6, 8)})
    (attention,) = (
        node
        for kind in graph.kinds.values()
        for node in kind.graph.nodes
        if "scaled_dot_product" in str(node.target)
    )
    assert (attention.args[3] is None) == is_causal
    assert (len(attention.args) > 5 and attention.args[5] is True) == is_causal
