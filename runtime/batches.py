"""Which part of a batch a rank computes.

Data rank d (of the ``dp`` × ``ep`` that divide the batch) takes the d-th of as many runs of rows of
the global batch, and its micro-batch m is the m-th run of ``micro_batch_size`` rows of these
(``micro_batches``). ``local=True`` batches hold these rows only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.ir.errors import InputError
from autopar.ir.graph import BATCH, ModelGraph, Role, ValueId
from autopar.ir.mesh import BATCH_AXES, LAYOUT_AXES, Mesh
from autopar.ir.moves import take_shard
from autopar.ir.placement import Placement, sharded
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.micro_batches import own_rows, run_of


class BatchSlicer:
    """Cuts batches for one rank."""

    def __init__(
        self, program: Program, model: ModelGraph, plan: Plan, rank: int, device: torch.device
    ) -> None:
        self._program, self._model, self._batch = program, model, plan.batch
        self._mesh: Mesh = plan.device_mesh()
        self._at = self._mesh.coordinates(rank)
        self._part_of_batch = self._mesh.batch_coordinate(rank)
        self._run = run_of(plan.batch, self._mesh, self._part_of_batch)
        self._device = device

    def input(
        self, name: str, micro_batch: int, batch: Mapping[str, Tensor], *, local: bool
    ) -> Tensor:
        """This rank's part of an input for a micro-batch, on its device, in the captured type."""
        part = self._part(name, micro_batch, batch[name], local=local)
        return part.to(self._model.inputs[name].dtype)

    def _part(self, name: str, micro_batch: int, tensor: Tensor, *, local: bool) -> Tensor:
        placement = self._program.values[ValueId(Role.INPUT, name)].placement
        info = self._model.inputs[name]
        if not (info.shape and info.shape[0] == BATCH):
            return self._shards(tensor, placement)
        rows = own_rows(self._batch, self._mesh, self._part_of_batch, micro_batch)
        if self._is_divided(placement):
            own = tensor if local else tensor[self._run]
            return self._shards(own[rows], placement, but=BATCH_AXES)
        parts = self._mesh.batch_ranks
        return self._shards(tensor.unflatten(0, (parts, -1))[:, rows].flatten(0, 1), placement)

    def _is_divided(self, placement: Placement) -> bool:
        """Whether each part of the batch goes to its own ranks."""
        return all(
            state == sharded(0) or self._mesh.size(axis) == 1
            for axis, state in zip(LAYOUT_AXES, placement, strict=True)
            if axis in BATCH_AXES
        )

    def constant(self, name: str) -> Tensor:
        """This rank's part of a constant, on its device."""
        placement = self._program.values[ValueId(Role.CONSTANT, name)].placement
        return self._shards(self._model.constants[name], placement)

    def check(self, batch: Mapping[str, Tensor], *, local: bool) -> None:
        """Check names, types and shapes.

        Raises:
            InputError: an input is missing, is no tensor, or does not fit the plan.
        """
        if not isinstance(batch, Mapping):
            raise InputError(
                f"the batch is a {type(batch).__name__}, not a dict of tensors by name"
            )
        own = self._run.stop - self._run.start
        expected = own if local else self._batch.global_batch_size
        for name, info in self._model.inputs.items():
            if name not in batch:
                raise InputError(f"input {name} is missing in the batch")
            tensor: object = batch[name]
            if not isinstance(tensor, Tensor):
                raise InputError(
                    f"input {name} is a {type(tensor).__name__}", hint="give tensors, batch first"
                )
            if _kind(tensor.dtype) != _kind(info.dtype):
                raise InputError(
                    f"input {name} is {tensor.dtype}, but was captured as {info.dtype}"
                )
            if tensor.dim() != len(info.shape):
                raise InputError(
                    f"input {name} has shape {tuple(tensor.shape)}, but was captured with "
                    f"{len(info.shape)} dims"
                )
            if info.shape and info.shape[0] == BATCH and tensor.shape[0] != expected:
                raise InputError(
                    f"input {name} has {tensor.shape[0]} sequences, the plan {expected}",
                    hint="local=True takes each data rank's own share" if not local else None,
                )
            placement = self._program.values[ValueId(Role.INPUT, name)].placement
            if local and not self._is_divided(placement):
                raise InputError(
                    f"input {name} is not divided among data ranks", hint="pass the global batch"
                )
            wanted = [size for size in info.shape[1:] if isinstance(size, int)]
            if len(wanted) == len(info.shape) - 1 and list(tensor.shape[1:]) != wanted:
                raise InputError(
                    f"input {name} has shape {tuple(tensor.shape)}, but was captured with {wanted} "
                    "per sequence"
                )

    def _shards(self, tensor: Tensor, placement: Placement, but: tuple[str, ...] = ()) -> Tensor:
        for axis, state in zip(LAYOUT_AXES, placement, strict=True):
            if state.is_sharded and axis not in but:
                tensor = take_shard(tensor, state, self._at[axis], self._mesh.size(axis))
        return tensor.to(self._device).contiguous()


_SAMPLED = 1024
"""Elements of an input that a checksum looks at."""


def checksum(batch: Mapping[str, Tensor]) -> int:
    """A number below 2^20 of names, shapes and a sample of the values: equal for equal batches, and
    different for most that differ in more than a few elements.
    """
    found = 0
    for name, tensor in sorted(batch.items()):
        if tensor.is_meta:
            return 0
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].double().cpu()
        found = zlib.crc32(f"{name}{tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(sample.numpy().tobytes(), found)
    return found % 2**20


def _kind(dtype: torch.dtype) -> str:
    """What a type may be cast to: floats to floats, integers to integers."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"
