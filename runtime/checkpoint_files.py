"""Files of a checkpoint: tensors under names, in the format of torch.distributed.checkpoint."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.ir.errors import InputError

StoredTensors = Mapping[str, TensorStorageMetadata]


def write_together(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write the tensors of all processes, each of which passes its own."""
    with _quietly(), _written(path):
        dcp.save(dict(tensors), checkpoint_id=path)


def write_alone(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write all tensors from this process."""
    with _quietly(), _written(path):
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)


def stored_tensors(path: Path) -> StoredTensors:
    """What a checkpoint holds.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError, UnpicklingError, CheckpointException) as error:
        raise InputError(f"cannot read a checkpoint: {error}", where=str(path)) from None
    return {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }


def read_tensor(path: Path, key: str, stored: StoredTensors) -> Tensor:
    """One tensor, on the CPU.

    Raises:
        InputError: a file is missing or damaged.
    """
    tensor = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
    try:
        with _quietly():
            dcp.load({key: tensor}, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise InputError(f"cannot read {key}: {_cause(error)}", where=str(path)) from None
    return tensor


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        raise InputError(f"cannot write a checkpoint: {_cause(error)}", where=str(path)) from None


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed."""
    for failed, _ in error.failures.values():
        return f"{type(failed).__name__}: {failed}"
    return str(error)


_filters = threading.Lock()  # warning filters belong to the process, and ranks may be threads


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings that one process reads or writes alone, and that an older checkpoint is
    overwritten: that is what is meant.
    """
    with _filters, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
