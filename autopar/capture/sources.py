"""Where a model comes from: a Hugging Face config, a function, or a module in memory."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.capture.host import HOST
from autopar.capture.initialize import InitialWeights, NotSeparableError
from autopar.capture.meta import meta_parameters
from autopar.capture.tasks import Task, find_task, vocabulary_of
from autopar.ir.errors import InputError

_log = logging.getLogger(__name__)

LossFn = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""``loss_fn(output, batch)``: the model's output and all inputs by name give a scalar."""

Inputs = Mapping[str, Tensor] | tuple[Tensor, ...]
"""Example inputs by name, or in the order of ``forward``'s parameters; dim 0 is the batch."""


class ModelSource(Protocol):
    """A model that can be built. ``spec`` is the text to open it again from, None for a module in
    memory.
    """

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> str | None: ...

    @property
    def loss_fn(self) -> LossFn | None:
        """None when the loss is inside the model."""

    def build(self, *, device: str = "meta", seed: int = 0) -> nn.Module:
        """The model. On ``meta`` no weight is allocated (buffers are real); elsewhere it is
        initialized from ``seed``.
        """
        ...

    def weights(self, seed: int = 0) -> Mapping[str, Tensor]:
        """Initial values of all parameters: those of ``build`` off the meta device. Where they can
        be had one by one, each is made when asked for, and not kept.

        Raises:
            InputError: A parameter has no value, and nothing says how it starts.
        """
        ...

    def example_inputs(self, seq_len: int | None = None) -> dict[str, Tensor]:
        """Two sequences of ``seq_len`` (or the model's own) on the meta device, by input name.

        Raises:
            InputError: The sequence length is unknown or cannot be chosen.
        """
        ...

    def integer_bound(self, name: str) -> int | None:
        """What the integers of input ``name`` are below; None when nothing says so."""
        ...


def open_model(
    model: str | Path | nn.Module,
    *,
    example_inputs: Inputs | None = None,
    loss_fn: LossFn | None = None,
) -> ModelSource:
    """Where ``model`` comes from.

    Args:
        model: A Hugging Face config directory or its ``config.json``;
            ``"package.module:function"``, which returns ``(model, example_inputs)`` or ``(model,
            example_inputs, loss_fn)`` and may take ``seq_len``; or a module.
        example_inputs: For a module that is not from Hugging Face.
        loss_fn: For a module whose output is no loss.

    Raises:
        InputError: There is no such model.
    """
    if isinstance(model, nn.Module):
        return ModuleSource(module=model, inputs=example_inputs, loss_fn=loss_fn)
    text = str(model)
    if ":" in text and not Path(text).exists():
        return FunctionSource(spec=text)
    config, task = _config_of(*_read_settings(Path(text)))
    return ConfigSource(spec=text, config=config, task=task)


def open_settings(settings: Mapping[str, Any], *, name: str) -> ModelSource:
    """The Hugging Face model whose ``config.json`` would say ``settings``.

    Args:
        settings: With ``model_type``.
        name: What the model is called. There is no file to open it again from.

    Raises:
        InputError: There is no such model.
    """
    _require_transformers(name)
    config, task = _config_of(dict(settings), name)
    return ConfigSource(spec=None, config=config, task=task, title=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """A Hugging Face model, from its config. See ``tasks`` for its class and its inputs."""

    spec: str | None
    config: Any
    task: Task
    loss_fn: None = None
    title: str = ""

    @property
    def name(self) -> str:
        if self.spec is None:
            return self.title
        path = Path(self.spec)
        return path.parent.name if path.name == "config.json" else path.stem

    def build(self, *, device: str = "meta", seed: int = 0) -> nn.Module:
        if device != "meta":
            weights = self._separate_weights(seed)
            if weights is not None:
                return weights.fill(device)
        return self._construct(device, seed)

    def weights(self, seed: int = 0) -> Mapping[str, Tensor]:
        return self._separate_weights(seed) or parameters_of(self._construct(HOST, seed))

    def _separate_weights(self, seed: int) -> InitialWeights | None:
        """None where the model can only be initialized as a whole."""
        try:
            return InitialWeights(self._construct("meta", seed), seed)
        except NotSeparableError as error:
            _log.info("%s is initialized as a whole: %s", self.name, error)
            return None

    def _construct(self, device: str, seed: int) -> nn.Module:
        attention = getattr(self.config, "_attn_implementation", None) or self.task.attention
        with _building(device, seed):
            try:
                # The weights are fp32 whatever the config says: they are the master weights.
                model = self.task.model_class._from_config(
                    self.config, dtype=torch.float32, attn_implementation=attention
                )
            except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
                first = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"transformers cannot build the model of this config: {first}",
                    where=self.spec or self.title,
                ) from error
        if model.loss_type is None:  # so for GPT-2; it would warn, and then guess
            model.loss_type = self.task.loss_type
        assert isinstance(model, nn.Module)
        return model

    def example_inputs(self, seq_len: int | None = None) -> dict[str, Tensor]:
        return self.task.inputs(self.config, seq_len, self.spec or self.title)

    def integer_bound(self, name: str) -> int | None:
        is_label = name == "labels"
        return self.task.label_bound(self.config) if is_label else vocabulary_of(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """A function that returns a model with its example inputs and, maybe, its loss function."""

    spec: str

    @property
    def name(self) -> str:
        return self.spec

    @property
    def loss_fn(self) -> LossFn | None:
        return self._call("meta", 0, None)[2]

    def build(self, *, device: str = "meta", seed: int = 0) -> nn.Module:
        return self._call(device, seed, None)[0]

    def weights(self, seed: int = 0) -> Mapping[str, Tensor]:
        return parameters_of(self.build(device=HOST, seed=seed))

    def example_inputs(self, seq_len: int | None = None) -> dict[str, Tensor]:
        model, inputs, _ = self._call("meta", 0, seq_len)
        found = meta_inputs(named_inputs(model, inputs))
        if seq_len is not None and all(
            tensor.shape[1:2] != (seq_len,) for tensor in found.values()
        ):
            raise InputError(
                f"{self.spec} does not let the sequence length be chosen",
                hint="give the function a parameter seq_len, or leave --seq-len out",
            )
        return found

    def integer_bound(self, name: str) -> int | None:
        return None

    def _call(
        self, device: str, seed: int, seq_len: int | None
    ) -> tuple[nn.Module, Inputs, LossFn | None]:
        function = _find_function(self.spec)
        arguments = {"seq_len": seq_len} if seq_len and _takes(function, "seq_len") else {}
        with _building(device, seed):
            try:
                returned = function(**arguments)
            except Exception as error:
                raise InputError(
                    f"{self.spec} failed: {type(error).__name__}: {error}", where=_last_line(error)
                ) from error
        parts: tuple[Any, ...] = returned if isinstance(returned, tuple) else ()
        if len(parts) in (2, 3) and isinstance(parts[0], nn.Module):
            model, inputs = parts[:2]
            loss_fn: LossFn | None = parts[2] if len(parts) == 3 else None
            if isinstance(inputs, dict | tuple) and (loss_fn is None or callable(loss_fn)):
                return model, inputs, loss_fn
        raise InputError(
            f"{self.spec} returned {_describe(returned)}",
            hint="return (model, example_inputs) or (model, example_inputs, loss_fn)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """A module in memory. It cannot be built again: ``build`` returns it as it is."""

    module: nn.Module
    inputs: Inputs | None = None
    loss_fn: LossFn | None = None
    spec: None = None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def build(self, *, device: str = "meta", seed: int = 0) -> nn.Module:
        return self.module

    def weights(self, seed: int = 0) -> Mapping[str, Tensor]:
        return InitialWeights(self.module, seed)

    def example_inputs(self, seq_len: int | None = None) -> dict[str, Tensor]:
        if self.inputs is not None:
            return meta_inputs(named_inputs(self.module, self.inputs))
        config = getattr(self.module, "config", None)
        hugging_face = type(self.module).__module__.startswith("transformers.")
        task = find_task(config, [self.name]) if config is not None and hugging_face else None
        if task is None:
            raise InputError(
                f"example inputs are needed to capture a {self.name}",
                hint="pass a batch as forward takes it: a dict or tuple of tensors, batch first",
            )
        return task.inputs(config, seq_len, self.name)

    def integer_bound(self, name: str) -> int | None:
        return None


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The values of all parameters, by all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in parameters}


def named_inputs(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """``inputs`` by name; those of a tuple are named as the parameters of ``model.forward``."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    names = list(inspect.signature(model.forward).parameters)
    names += [f"input_{index}" for index in range(len(names), len(inputs))]
    return dict(zip(names, inputs, strict=False))


def meta_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of ``inputs`` without values, with a batch of 2.

    Raises:
        InputError: An input is no tensor or has no batch dim, or the batches differ.
    """
    if not inputs:
        raise InputError("the example inputs are empty")
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise InputError(
                f"example input {name!r} is {_describe(value)}",
                hint="inputs are tensors whose dim 0 is the batch; fix other arguments in forward",
            )
    batches = {name: value.shape[0] for name, value in inputs.items()}
    if len(set(batches.values())) != 1:
        raise InputError(f"example inputs have different batch sizes: {batches}")
    return {
        name: torch.empty((2, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in inputs.items()
    }


@contextlib.contextmanager
def _building(device: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with meta_parameters() if device == "meta" else torch.device(device):
            yield


def _require_transformers(where: str) -> None:
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            "reading a Hugging Face config needs the package transformers",
            where=where,
            hint="pip install 'autopar[hf]'",
        ) from error


def _read_settings(path: Path) -> tuple[Any, str]:
    """What a ``config.json`` says, and where it is."""
    _require_transformers(str(path))
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"there is no model at {path}",
            hint="give a config.json, its directory, or package.module:function",
        )
    try:
        return json.loads(file.read_text()), str(file)
    except (ValueError, OSError) as error:
        raise InputError(f"{file} is no JSON: {error}", where=str(file)) from error


def _config_of(settings: Any, where: str) -> tuple[Any, Task]:
    from transformers import CONFIG_MAPPING

    model_type = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InputError(
            f"{where} is no transformer config: its model_type is {model_type!r}",
            where=where,
            hint="a config.json of Hugging Face names its model_type, for example 'llama'",
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(settings)
    except Exception as error:
        raise InputError(f"transformers refuses the config: {error}", where=where) from error
    task = find_task(config)
    if task is None:
        raise InputError(
            f"transformers has no model of model_type {model_type!r} that gives a known loss",
            where=where,
            hint="give the model as package.module:function instead",
        )
    return config, task


def _find_function(spec: str) -> Callable[..., object]:
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"module {module_name!r} cannot be imported: {error}",
            where=spec,
            hint="run from the directory that holds it, or set PYTHONPATH",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"module {module_name!r} has no function {function_name!r}", where=spec)
    return function


def _takes(function: Callable[..., object], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # a function of C that does not say
        return False


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + ", ".join(type(item).__name__ for item in value)
    return f"a {type(value).__name__}" + (" without dims" if isinstance(value, Tensor) else "")


def _last_line(error: BaseException) -> str | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else None
