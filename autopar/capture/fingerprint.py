"""The fingerprint of a captured model: the same for the same computation, whatever its modules are
called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.capture.fold import Folded
from autopar.ir.graph import LossKind, Role, TensorInfo, ValueId


def fingerprint(
    folded: Folded,
    inputs: Mapping[str, TensorInfo],
    constants: Mapping[str, Tensor],
    loss_kind: LossKind,
    compute_dtype: torch.dtype,
) -> str:
    """Hex digest of ops, arguments, shapes, dtypes, wiring, constants and loss.

    Float constants are hashed coarsely: another processor may round their last bits otherwise.
    """
    number = _Numbering(inputs)
    digests = {name: constant_digest(value) for name, value in constants.items()}
    kinds = {
        name: _with_digests(signature, digests) for name, signature in folded.signatures.items()
    }
    blocks = [
        (block.kind, tuple(number.of(value, digests) for value in block.bindings))
        for block in folded.blocks
    ]
    text = repr(
        (
            kinds,
            blocks,
            [number.of(value, digests) for value in folded.results],
            [(tuple(map(str, facts.shape)), str(facts.dtype)) for facts in inputs.values()],
            loss_kind.value,
            str(compute_dtype),
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()


class _Numbering:
    """Numbers parameters by first use and inputs by position."""

    def __init__(self, inputs: Mapping[str, TensorInfo]) -> None:
        self._inputs = {name: index for index, name in enumerate(inputs)}
        self._parameters: dict[str, int] = {}

    def of(self, value: ValueId, digests: Mapping[str, str]) -> tuple[str, int | str]:
        match value.role:
            case Role.PARAMETER:
                known = self._parameters
                return value.role.value, known.setdefault(value.name, len(known))
            case Role.INPUT:
                return value.role.value, self._inputs[value.name]
            case Role.CONSTANT:
                return value.role.value, digests[value.name]
            case Role.ACTIVATION:
                return value.role.value, value.name


def _with_digests(signature: tuple[Any, ...], digests: Mapping[str, str]) -> tuple[Any, ...]:
    operands, *rest = signature
    return (
        tuple((role, digests.get(name, ""), facts) for role, name, facts in operands),
        *rest,
    )


_PROJECTIONS = 4
_STEPS = 10_000


def constant_digest(value: Tensor) -> str:
    """A digest of shape, dtype and values: exact for integers, to about four digits for floats.

    Floats are projected on a few fixed waves; the projections, relative to the norm, are rounded.
    """
    head = (tuple(value.shape), str(value.dtype))
    flat = value.detach().reshape(-1)
    if not value.dtype.is_floating_point:
        data = flat.contiguous().view(torch.uint8).numpy()
        digest = hashlib.sha256(repr(head).encode())
        digest.update(data.data)
        return digest.hexdigest()
    numbers = flat.to(torch.float64)
    special = (numbers.isnan().sum().item(), numbers.isposinf().sum().item())
    numbers = numbers.nan_to_num(0.0, 1.0, -1.0)
    if not numbers.norm().isfinite():  # masks hold the smallest number of a dtype
        numbers = numbers / numbers.abs().max()
    norm = float(numbers.norm())
    positions = torch.arange(flat.numel(), dtype=torch.float64)
    waves = [
        round(float(numbers @ torch.cos(positions * (0.7 + wave))) / (norm or 1.0) * _STEPS)
        for wave in range(_PROJECTIONS)
    ]
    text = repr((head, special, f"{norm:.4e}", waves))
    return hashlib.sha256(text.encode()).hexdigest()
