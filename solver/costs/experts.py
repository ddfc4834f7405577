"""Work and memory of routed experts, from the shapes on a rank.

Which experts get how many tokens is known at run time only: they are counted as evenly loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from autopar.ir.graph import Size, info
from autopar.ir.layout import operands_of
from autopar.ir.rules.call import Call

Shape = Sequence[Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Sizes of routed experts on a rank.

    Attributes:
        num_experts: Experts of the rank.
        rows_per_expert: Pairs of a token and an expert that each of them computes; a fraction
            where tokens are few.
        tokens: Tokens of the rank.
        chosen: Experts of a token.
        hidden: Features of a token.
        inner: Columns of the first product.
        features: Depth of the second one.
        itemsize: Bytes of an element.
    """

    num_experts: Size
    rows_per_expert: Size
    tokens: Size
    chosen: Size
    hidden: Size
    inner: Size
    features: Size
    itemsize: int

    @classmethod
    def of(cls, node: fx.Node, operands: Sequence[Shape], dispatch: int = 1) -> ExpertSizes:
        """Sizes of a node whose operands have these shapes.

        Args:
            dispatch: Ranks that send each other their tokens (the helper ``expert_dispatch``).
        """
        call = Call(node)
        at = {name: call.indices(name)[0] for name in ("hidden", "expert_ids", "up", "down")}
        *lead, hidden = operands[at["hidden"]]
        chosen = operands[at["expert_ids"]][-1]
        up, down = operands[at["up"]], operands[at["down"]]
        turned = call.argument_or("transposed", False)
        tokens: Size = 1
        for size in lead:
            tokens = tokens * size
        total = call.shape("up")[0]
        rows = sympy.sympify(tokens) * chosen * dispatch / total
        return cls(
            num_experts=up[0],
            rows_per_expert=int(rows) if rows.is_Integer else rows,
            tokens=tokens,
            chosen=chosen,
            hidden=hidden,
            inner=up[2] if turned else up[1],
            features=down[1] if turned else down[2],
            itemsize=info(operands_of(node)[0]).tensor.dtype.itemsize,
        )

    @property
    def rows(self) -> Size:
        """Pairs of a token and an expert on the rank."""
        return self.num_experts * self.rows_per_expert

    @property
    def moved_bytes(self) -> Size:
        """What gathering rows, activations and the weighted sum read and write, beside products."""
        per_row = 4 * self.hidden + self.inner + 3 * self.features
        per_token = (self.chosen + 1) * self.hidden
        return self.itemsize * (self.rows * per_row + self.tokens * per_token)

    @property
    def waiting_bytes(self) -> Size:
        """What the gradients of weights are made of: rows before and gradients behind each of both
        products.
        """
        return self.itemsize * self.rows * (2 * self.hidden + self.features + self.inner)

    @property
    def kept_bytes(self) -> Size:
        """What backward needs: rows, both sides of the activation, and results for the weights."""
        return self.itemsize * self.rows * (2 * self.hidden + self.inner + 2 * self.features)
