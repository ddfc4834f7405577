"""Global tensors in and out of the ranks: initial values, whole parameters and gradients,
checkpoints.

A checkpoint holds global tensors (``parameters/<name>``, ``optimizer/<key>/<name>``,
``num_steps`` and other numbers), so that it does not depend on the plan that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.mesh import PIPELINE_AXIS
from autopar.runtime.checkpoint_files import StoredTensors, read_tensor, stored_tensors
from autopar.runtime.communicator import Communicator
from autopar.runtime.parameter_layout import ParameterLayout
from autopar.runtime.parameter_store import ParameterStore

Optimizer = torch.optim.Optimizer

NUM_STEPS = "num_steps"
"""Name of the one number that every checkpoint has; others are of the runtime's own."""

_KEY_BYTES = 1024


def load_parameters(
    store: ParameterStore, communicator: Communicator, parameters: Mapping[str, Tensor]
) -> None:
    """Copy this rank's part of global tensors, given by any of the parameters' names."""
    for layout in store.layouts.values():
        whole = next((parameters[name] for name in layout.names if name in parameters), None)
        if whole is None:
            raise InputError(f"parameter {layout.name} is missing")
        _fill(store.parameters[layout.name], whole, layout, communicator)
    store.renew()


def full_parameters(
    store: ParameterStore, communicator: Communicator, model: ModelGraph
) -> dict[str, Tensor]:
    """Every parameter that the program uses, global, on every rank."""
    return _all_whole(store, communicator, model, store.parameters.get)


def full_gradients(
    store: ParameterStore, communicator: Communicator, model: ModelGraph
) -> dict[str, Tensor]:
    """The kept gradients, global, on every rank."""
    trained = store.trained
    return _all_whole(store, communicator, model, store.kept_gradients.get, only=trained)


def full_tensors(
    store: ParameterStore,
    communicator: Communicator,
    model: ModelGraph,
    optimizer: Optimizer | None,
) -> dict[str, Tensor]:
    """All that a checkpoint holds of parameters, on every rank, on the CPU."""
    found = {
        f"parameters/{name}": tensor.cpu()
        for name, tensor in full_parameters(store, communicator, model).items()
    }
    trained = store.trained
    for key in _agreed_keys(store, communicator, optimizer):
        sharded = key.endswith("]")
        plain = key.removesuffix("[]")

        def part(name: str, plain: str = plain) -> Tensor | None:
            return _optimizer_state(store, optimizer, name).get(plain)

        whole = _all_whole(store, communicator, model, part, only=trained, is_sharded=sharded)
        found |= {f"optimizer/{plain}/{name}": tensor.cpu() for name, tensor in whole.items()}
    return found


def save(
    path: Path,
    store: ParameterStore,
    communicator: Communicator,
    model: ModelGraph,
    optimizer: Optimizer | None,
    numbers: Mapping[str, Tensor],
) -> None:
    """Write a checkpoint; the ranks of a stage write its tensors in turn, each whole.

    ``numbers`` are scalars that all ranks agree on, ``NUM_STEPS`` among them.
    """
    mesh = communicator.mesh
    at = mesh.coordinates(communicator.rank)
    position, num_writers = mesh.place_on_stage(communicator.rank), mesh.num_ranks // mesh.pp
    own: dict[str, Tensor] = {}
    for index, (name, layout) in enumerate(sorted(store.layouts.items())):
        is_writer = index % num_writers == position
        is_writer = is_writer and layout.stages[0] == at[PIPELINE_AXIS]
        parts = {f"parameters/{name}": store.parameters[name].detach()}
        for key, value in _optimizer_state(store, optimizer, name).items():
            parts[f"optimizer/{key}/{name}"] = value
        for full_name, part in parts.items():
            is_sharded = part.shape == store.parameters[name].shape
            whole = _whole(part, layout, communicator) if is_sharded else part
            if is_writer:
                own[full_name] = whole.cpu().clone()
    if communicator.rank == 0:
        own |= numbers
    communicator.write_checkpoint(own, path)


def load(
    path: Path,
    store: ParameterStore,
    communicator: Communicator,
    optimizer: Optimizer | None,
) -> dict[str, float]:
    """Read this rank's part of a checkpoint; returns its numbers. Parameters are read one at a
    time.
    """
    stored = stored_tensors(path)
    _check_names(store, stored, path)
    for name, layout in store.layouts.items():
        parameter = store.parameters[name]
        keys = [f"parameters/{name}"]
        if optimizer is not None and parameter.requires_grad:
            keys += [k for k in stored if k.startswith("optimizer/") and _owner(k) == name]
        for key in keys:
            whole = read_tensor(path, key, stored)
            if key.startswith("parameters/"):
                _fill(parameter, whole, layout, communicator)
                continue
            assert optimizer is not None
            state = optimizer.state[parameter]
            if tuple(whole.shape) == layout.shape and whole.dim():
                value = torch.empty_like(parameter, dtype=whole.dtype, requires_grad=False)
                _fill(value, whole, layout, communicator)
                state[_state_key(key)] = value
            else:
                state[_state_key(key)] = whole
    store.renew()
    numbers = (key for key in stored if "/" not in key)
    return {key: float(read_tensor(path, key, stored)) for key in numbers}


def _check_names(store: ParameterStore, stored: StoredTensors, path: Path) -> None:
    """The checkpoint has exactly the parameters of all stages."""
    prefix = "parameters/"
    found = {key.removeprefix(prefix) for key in stored if key.startswith(prefix)}
    missing, unknown = store.stages.keys() - found, found - store.stages.keys()
    if missing or unknown or NUM_STEPS not in stored:
        what = [f"has no parameter {name}" for name in sorted(missing)[:1]]
        what += [f"has parameter {name}, the model has not" for name in sorted(unknown)[:1]]
        raise InputError(
            "the checkpoint " + (" and ".join(what) or "has no number of steps"),
            where=str(path),
            hint="it belongs to another model",
        )


def _fill(
    target: Tensor, whole: Tensor, layout: ParameterLayout, communicator: Communicator
) -> None:
    if tuple(whole.shape) != layout.shape:
        raise InputError(
            f"parameter {layout.name} has shape {tuple(whole.shape)}, the model's {layout.shape}"
        )
    part = layout.take(whole.detach(), communicator.group)
    with torch.no_grad():
        target.copy_(part)


def _whole(part: Tensor, layout: ParameterLayout, communicator: Communicator) -> Tensor:
    """Of a part that may be on the host."""
    return layout.assemble(part.detach().to(communicator.device), communicator.group)


def _all_whole(
    store: ParameterStore,
    communicator: Communicator,
    model: ModelGraph,
    part_of: Callable[[str], Tensor | None],
    *,
    only: set[str] | None = None,
    is_sharded: bool = True,
) -> dict[str, Tensor]:
    """Whole tensors by parameter, on every rank: assembled on the first stage that has them, then
    sent to all.
    """
    stage = communicator.mesh.coordinates(communicator.rank)[PIPELINE_AXIS]
    found: dict[str, Tensor] = {}
    for name in sorted(store.stages if only is None else only):
        part = part_of(name)
        whole: Tensor | None = None
        if part is not None:
            whole = part.to(communicator.device)
            if is_sharded:
                whole = _whole(part, store.layouts[name], communicator)
        if stage != store.stages[name][0] or whole is None:
            shape = model.parameters[name].shape if is_sharded else ()
            dtype = store.dtypes[name] if is_sharded else torch.float32
            whole = torch.zeros(shape, dtype=dtype, device=communicator.device)
        pipeline = communicator.group(PIPELINE_AXIS)
        found[name] = pipeline.all_reduce(whole) if pipeline.size > 1 else whole.clone()
    return found


def _optimizer_state(
    store: ParameterStore, optimizer: Optimizer | None, name: str
) -> dict[str, Tensor]:
    """Tensors of the optimizer's state of a parameter; plain numbers become tensors."""
    if optimizer is None or name not in store.parameters:
        return {}
    state: Mapping[str, object] = optimizer.state.get(store.parameters[name], {})
    return {
        key: value if isinstance(value, Tensor) else torch.tensor(value)
        for key, value in state.items()
        if value is not None
    }


def _agreed_keys(
    store: ParameterStore, communicator: Communicator, optimizer: Optimizer | None
) -> tuple[str, ...]:
    """Keys of the optimizer's state, also on a stage that trains nothing; sharded ones end in
    ``[]``.
    """
    keys: set[str] = set()
    for name, parameter in store.parameters.items():
        for key, value in _optimizer_state(store, optimizer, name).items():
            keys.add(f"{key}[]" if value.shape == parameter.shape else key)
    text = "\n".join(sorted(keys)).encode().ljust(_KEY_BYTES, b"\0")
    assert len(text) == _KEY_BYTES, "too many keys in the optimizer's state"
    numbers = torch.tensor(list(text), dtype=torch.int32, device=communicator.device)
    agreed = communicator.group(PIPELINE_AXIS).all_reduce(numbers, "max")
    return tuple(bytes(agreed.tolist()).rstrip(b"\0").decode().split())


def _state_key(key: str) -> str:
    return key.split("/", 2)[1]


def _owner(key: str) -> str:
    return key.split("/", 2)[2]
