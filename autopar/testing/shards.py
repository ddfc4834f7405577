"""What ranks hold of a tensor, and the tensor from what they hold; one axis after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from autopar.ir.moves import assemble, take_shard
from autopar.ir.placement import Placement, StateKind

_EXACT = 1e-9
_TOLERANCES = {
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}


def distribute(
    tensor: Tensor, placement: Placement, sizes: Sequence[int], generator: torch.Generator
) -> list[Tensor]:
    """What each rank (the last axis fastest) holds of ``tensor``; ``P`` as random terms."""
    tensor = tensor.detach()
    if not placement:
        return [tensor]
    state, size = placement[0], sizes[0]
    rest = (placement[1:], sizes[1:], generator)
    if state.is_whole:
        return distribute(tensor, *rest) * size
    if state.is_sharded:
        shards = [take_shard(tensor, state, rank, size) for rank in range(size)]
    else:
        shards = list(_terms(tensor, size, generator))
    return [part for shard in shards for part in distribute(shard, *rest)]


def _terms(tensor: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Random tensors whose sum is ``tensor``."""
    rest = tensor
    for _ in range(count - 1):
        term = random_like(tensor, generator)
        yield term
        rest = rest if tensor.dtype == torch.bool else rest - term
    yield rest


def random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random entries; whole numbers, which are exact, where the dtype is narrow. No true ones."""
    if tensor.dtype == torch.bool:
        return torch.zeros_like(tensor)
    if tensor.dtype in (torch.float64, torch.complex128):
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return torch.randint(-3, 3, tensor.shape, generator=generator).to(tensor.dtype)


def tolerance_of(tensors: Iterable[Tensor]) -> float:
    """How far results may differ that are computed from ``tensors``: as the narrowest dtype has
    it.
    """
    return max((_TOLERANCES.get(tensor.dtype, _EXACT) for tensor in tensors), default=_EXACT)


def collect(
    parts: Sequence[Tensor],
    placement: Placement,
    sizes: Sequence[int],
    tolerance: float = _EXACT,
) -> Tensor:
    """The whole tensor from what each rank holds; ``AssertionError`` where replicas differ."""
    if not placement:
        (part,) = parts
        return part
    state, size = placement[0], sizes[0]
    share = len(parts) // size
    inner = [
        collect(parts[start : start + share], placement[1:], sizes[1:], tolerance)
        for start in range(0, len(parts), share)
    ]
    if state.is_whole:
        for other in inner[1:]:
            compare(other, inner[0], f"what ranks hold in state {state}", tolerance)
        return inner[0]
    if state.is_sharded:
        return assemble(inner, state)
    assert state.kind is StateKind.PARTIAL
    return torch.stack(inner).sum(0).to(inner[0].dtype)


def compare(found: Tensor, expected: Tensor, what: str, tolerance: float = _EXACT) -> None:
    """``AssertionError`` unless both are the same up to rounding."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape, (
        f"{what} has the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    )
    if expected.is_floating_point() or expected.is_complex():
        right = torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        difference = (found - expected).abs().nan_to_num(torch.inf).max() if not right else 0.0
        assert right, f"{what} is wrong by up to {float(difference):.2g}"
    else:
        assert torch.equal(found, expected), f"{what} is wrong"
