"""What a local graph needs of the ranks along one mesh axis; the runtime implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

Reduction = Literal["sum", "max"]


class AxisGroup(Protocol):
    """The ranks that differ from this rank only in one axis.

    Collectives return new tensors, ready for use.

    All collectives work along dim 0 on contiguous tensors, all but one with equal shares. Every
    rank of the group has to issue the same collectives in the same order.
    """

    @property
    def name(self) -> str:
        """Name of the mesh axis."""
        ...

    @property
    def rank(self) -> int:
        """This rank's coordinate on the axis."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        ...

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Sum (or maximum) over the ranks; same shape."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[n, …]`` on each rank to ``[size · n, …]``, in order of rank."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """``[size · n, …]`` to the sum of all ranks' own ``[n, …]`` slice."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """``[size · n, …]``: slice j goes to rank j, slice j of the result comes from rank j."""
        ...

    def all_to_all_uneven(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """``[sum(sent), …]`` to ``[sum(received), …]``: ``sent[j]`` rows in a row go to rank j,
        ``received[j]`` come from it.
        """
        ...
