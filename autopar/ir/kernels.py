"""Which kernels a step runs: how attention is computed, and which chains of small ops are fused.

As text: an attention kernel, then what is fused: ``flash_attention2 + fused norms``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from autopar.ir.errors import InputError

AttentionKernel = Literal[
    "eager", "fused_softmax", "fused_causal_softmax", "flash_attention1", "flash_attention2"
]
"""``eager`` writes all scores to memory at each of its ops, ``fused_softmax`` scales, masks and
normalizes them in one, ``fused_causal_softmax`` only those that a causal mask leaves (Megatron-LM),
the flash kernels never write them."""

Fusion = Literal["fused norms", "fused pointwise"]
"""``fused norms``: one kernel for a normalization that the model writes as several ops.
``fused pointwise``: one kernel for each chain of pointwise ops and normalizations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """The kernels of a step."""

    attention: AttentionKernel = "flash_attention2"
    fused: tuple[Fusion, ...] = ()

    @property
    def fuses_norms(self) -> bool:
        """Whether a normalization is one kernel."""
        return bool(self.fused)

    @property
    def fuses_pointwise(self) -> bool:
        """Whether each chain of pointwise ops is one kernel."""
        return "fused pointwise" in self.fused

    def __str__(self) -> str:
        return " + ".join((self.attention, *self.fused))


DEFAULT_KERNELS = str(KernelSet())
"""``scaled_dot_product_attention``, and every other op by itself."""


RUNNABLE: tuple[AttentionKernel, ...] = ("eager", "flash_attention2")
"""The kernels of attention that the runtime has. Others can be estimated only."""


def runnable_kernels(text: str) -> KernelSet:
    """The kernels that ``text`` names.

    Raises:
        InputError: No such kernel, or the runtime does not have it.
    """
    kernels = parse_kernels(text)
    if kernels.attention not in RUNNABLE:
        raise InputError(
            f"a plan with the kernels {str(kernels)!r} cannot be run: it is an estimate",
            hint=f"plan with attention by {' or '.join(RUNNABLE)} to run it",
        )
    return kernels


def parse_kernels(text: str) -> KernelSet:
    """The kernels that ``text`` names.

    Raises:
        InputError: No such kernel.
    """
    attention, *fused = (part.strip() for part in str(text).split("+"))
    known = get_args(AttentionKernel), get_args(Fusion)
    if attention not in known[0] or any(part not in known[1] for part in fused):
        raise InputError(
            f"no kernels are called {text!r}",
            hint=f"one of {', '.join(known[0])}; after it, if you like, "
            f"+ {' or + '.join(known[1])}",
        )
    chosen = tuple(part for part in known[1] if part in fused)
    return KernelSet(
        attention=cast("AttentionKernel", attention), fused=cast("tuple[Fusion, ...]", chosen)
    )
