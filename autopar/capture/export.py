"""The exported graph: ``torch.export`` of forward and loss on the meta device, as a
``FlatGraph``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.capture.failures import data_dependent, explained, quiet
from autopar.capture.flat import FlatGraph, refuse, source_of
from autopar.capture.forbidden import (
    GRADIENT_HOOKS,
    Changes,
    hooked,
    own_backward,
    refuse_gradient_hooks,
    watched,
)
from autopar.capture.host import HOST
from autopar.capture.inline import inline
from autopar.capture.meta import MetaClone, clone_to_meta
from autopar.capture.moe import experts_as_ops
from autopar.capture.once import NotClosedError, Once
from autopar.capture.pure import make_pure
from autopar.capture.sources import LossFn
from autopar.ir.errors import AutoparError, CaptureError, InputError
from autopar.ir.graph import (
    BATCH,
    NodeInfo,
    Parameter,
    Role,
    Size,
    TensorInfo,
    ValueId,
    info,
    set_info,
)

_log = logging.getLogger(__name__)

_ROOT = "model"
_MAX_BATCH = 2**20


def export_graph(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    loss_fn: LossFn | None,
    compute_dtype: torch.dtype,
    *,
    training: bool = True,
) -> FlatGraph:
    """Trace ``model`` with its loss for any batch size; ``inputs`` are meta tensors with a batch
    of 2.

    Raises:
        CaptureError: The model has data-dependent control flow, depends on the batch size, changes
            gradients or itself behind the graph's back, or is beyond export.
    """
    refuse_gradient_hooks(model)
    for trace_once in (True, False):
        clone = clone_to_meta(model, compute_dtype, training=training)
        wrapped = _WithLoss(clone.module, loss_fn, tuple(inputs), compute_dtype)
        once = Once(wrapped) if trace_once else None
        with experts_as_ops(clone.module):
            program = _export(wrapped, once, inputs)
        inexact = wrapped.changes.functions.first_inexact()
        if inexact is not None:
            raise own_backward(*inexact)
        if wrapped.changes.found:
            _refuse_changing(model, inputs, loss_fn, compute_dtype, training=training)
        try:
            return _flatten(program, clone, once, tuple(inputs))
        except NotClosedError:
            _log.info("%s: a repeated module is not closed; tracing in full", type(model).__name__)
    raise AssertionError("a model traced in full has no marks")


def _refuse_changing(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    loss_fn: LossFn | None,
    compute_dtype: torch.dtype,
    *,
    training: bool,
) -> None:
    """Raise if forward changes its attributes at its second call too: what is kept is harmless,
    what is counted is not.
    """
    clone = clone_to_meta(model, compute_dtype, training=training)
    wrapped = _WithLoss(clone.module, loss_fn, tuple(inputs), compute_dtype)
    try:
        with experts_as_ops(wrapped.model), torch.no_grad():
            wrapped(dict(inputs))
            wrapped.changes.found.clear()
            wrapped(dict(inputs))
    except Exception as error:  # some models can be exported, but do not run on the meta device
        _log.info("%s: cannot tell whether it changes: %s", type(model).__name__, error)
        return
    for path, where in wrapped.changes.found.items():
        raise CaptureError(
            f"forward changes attribute {path} at every call",
            where=where,
            hint="pass what changes as an input, one value for each sequence",
        )


def _flatten(
    program: ExportedProgram, clone: MetaClone, once: Once | None, inputs: tuple[str, ...]
) -> FlatGraph:
    graph = program.graph
    parameters = _logical_parameters(clone.module)
    flat = FlatGraph(graph=graph, bindings={}, parameters=parameters, inputs={})
    _attach_infos(node for node in graph.nodes if node.op == "placeholder")
    placeholders = _bind_placeholders(flat, program, clone, inputs)
    if once is not None:
        once.expand(graph, placeholders)
    inline(graph, program.graph_module)
    make_pure(graph, flat.bindings)
    _attach_infos(node for node in graph.nodes if node.op != "placeholder")
    return flat


class _WithLoss(nn.Module):
    """The model followed by its loss, with all inputs in one dict."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        names: tuple[str, ...],
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.model = model
        self.loss_fn = loss_fn
        self.changes = Changes()
        accepted = inspect.signature(model.forward).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self.passed = tuple(
            name for name in names if name in accepted or (anything and loss_fn is None)
        )
        if loss_fn is None and len(self.passed) < len(names):
            unknown = sorted(set(names) - set(self.passed))
            raise InputError(
                f"{type(model).__name__}.forward takes no input named {', '.join(unknown)}",
                hint="name inputs as forward's parameters, or give a loss_fn that reads the others",
            )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        try:
            with watched(self.model, self.changes), _computing_in(self.compute_dtype):
                output = self.model(**{name: batch[name] for name in self.passed})
                loss = _find_loss(output) if self.loss_fn is None else self.loss_fn(output, batch)
        except AutoparError:
            raise
        except Exception as error:  # before torch prints the graph so far
            raise explained(error, type(self.model).__qualname__) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            by = "loss_fn" if self.loss_fn else f"{type(self.model).__name__}.forward"
            raise CaptureError(
                f"{by} gives no scalar loss",
                hint="return a scalar, an output with a loss, or pass loss_fn(output, batch)",
            )
        return loss.reshape(())


def _find_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple | list):
        scalars = [
            item
            for item in output
            if isinstance(item, Tensor) and item.dim() == 0 and item.is_floating_point()
        ]
        return scalars[0] if len(scalars) == 1 else None
    return getattr(output, "loss", None)


class _Calls(TorchFunctionMode):
    """Changes some calls while a model is traced, and refuses hooks on gradients.

    Literals are made on the CPU first, so that their values are known: those of ``torch.tensor``,
    ``as_tensor``, ``new_tensor`` and of lists that a tensor is indexed with. When computing in
    float64, casts to float32 inside the model become casts to float64. The losses of single
    tokens get a dim more: without it torch takes them for a scalar where the batch is a symbol.
    """

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self._widen = compute_dtype is torch.float64

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._widen:
            if func is Tensor.float:
                return args[0].to(torch.float64)
            args = tuple(_widened(value) for value in args)
            kwargs = {key: _widened(value) for key, value in kwargs.items()}
        if func in GRADIENT_HOOKS:
            raise hooked("a tensor", "forward")
        if func in _TOKEN_LOSSES and _reduction(args, kwargs) == "none" and args[0].dim() == 2:
            wide = (tensor.unsqueeze(-1) for tensor in args[:2])
            return func(*wide, *args[2:], **kwargs).squeeze(-1)
        if func in _LITERALS and torch.device(kwargs.get("device") or "meta").type == "meta":
            return func(*args, **{**kwargs, "device": HOST}).to("meta")
        if func is Tensor.new_tensor and args[0].is_meta and "device" not in kwargs:
            literal = {"dtype": args[0].dtype, "device": HOST, **kwargs}
            return torch.tensor(*args[1:], **literal).to("meta")
        if func in _INDEXING and args[0].is_meta:
            args = (args[0], _with_literals(args[1]), *args[2:])
        return func(*args, **kwargs)


_LITERALS = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_TOKEN_LOSSES = (functional.cross_entropy, functional.nll_loss)


def _with_literals(index: Any) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(map(_with_literals, index))
    if isinstance(index, list) and all(isinstance(item, int) for item in index):
        return torch.tensor(index, device=HOST).to("meta")
    return index


def _reduction(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    position = 6
    return args[position] if len(args) > position else kwargs.get("reduction", "mean")


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype is torch.float64 else default)
    try:
        with torch.device("meta"), _Calls(dtype):
            yield
    finally:
        torch.set_default_dtype(default)


def _export(
    module: _WithLoss,
    once: Once | None,
    inputs: Mapping[str, Tensor],
) -> ExportedProgram:
    batch = Dim("b", min=1, max=_MAX_BATCH)
    # One tensor each: torch.export merges inputs that are the same object.
    example = {name: torch.empty_like(value) for name, value in inputs.items()}
    try:
        with quiet(), once.tracing() if once else contextlib.nullcontext():
            return torch.export.export(
                module,
                (example,),
                dynamic_shapes=({name: {0: batch} for name in example},),
                strict=False,
            )
    except AutoparError:
        raise
    except Exception as error:
        raise explained(error, type(module.model).__qualname__) from error


def _attach_infos(nodes: Iterable[fx.Node]) -> None:
    """Give nodes with a tensor value their ``NodeInfo``; no gradients yet."""
    rename = _SizeReader()
    sources: dict[str | None, str] = {}
    for node in nodes:
        value = node.meta.get("val")
        is_tuple = isinstance(value, tuple | list)
        values: tuple[Any, ...] = tuple(value) if isinstance(value, tuple | list) else (value,)
        if not all(isinstance(item, Tensor) for item in values) or node.op == "output":
            continue
        trace = node.meta.get("stack_trace")
        if trace not in sources:
            sources[trace] = source_of(trace)
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        tensors = tuple(
            TensorInfo(shape=rename.shape(item, node), dtype=item.dtype, requires_grad=False)
            for item in values
        )
        path = path.removeprefix(_ROOT).removeprefix(".") if path.startswith(_ROOT) else ""
        set_info(
            node,
            NodeInfo(tensors=tensors, is_tuple=is_tuple, module=path, source=sources[trace]),
        )


class _SizeReader:
    """Sizes of exported tensors as expressions of ``BATCH``."""

    def __init__(self) -> None:
        self._known: dict[sympy.Expr, Size] = {}

    def shape(self, tensor: Tensor, node: fx.Node) -> tuple[Size, ...]:
        return tuple(self._size(size, node) for size in tensor.shape)

    def _size(self, size: int | torch.SymInt, node: fx.Node) -> Size:
        if isinstance(size, int):
            return size
        if free_unbacked_symbols(size):
            raise data_dependent(refuse(node, "", "").where)
        expression = size.node.expr
        if expression not in self._known:
            renamed = expression.xreplace(dict.fromkeys(expression.free_symbols, BATCH))
            self._known[expression] = int(renamed) if renamed.is_Integer else renamed
        return self._known[expression]


def _logical_parameters(module: nn.Module) -> dict[str, Parameter]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return {
        group[0]: Parameter(
            name=group[0],
            names=tuple(group),
            shape=tuple(tensors[key].shape),
            dtype=tensors[key].dtype,
            requires_grad=tensors[key].requires_grad,
        )
        for key, group in names.items()
    }


def _bind_placeholders(
    flat: FlatGraph, program: ExportedProgram, clone: MetaClone, input_names: tuple[str, ...]
) -> dict[int, fx.Node]:
    """Bind placeholders to parameters (one for each group of tied ones), inputs and buffers.

    Returns:
        The placeholder of each parameter and buffer of the clone, by ``id``.
    """
    owner = {
        name: parameter.name for parameter in flat.parameters.values() for name in parameter.names
    }
    tensors = {
        **dict(clone.module.named_parameters(remove_duplicate=False)),
        **dict(clone.module.named_buffers(remove_duplicate=False)),
    }
    placeholder_of: dict[int, fx.Node] = {}
    first: dict[ValueId, fx.Node] = {}
    remaining = iter(input_names)
    inputs: dict[str, TensorInfo] = {}
    placeholders = [node for node in flat.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        match spec.kind:
            case InputKind.PARAMETER:
                assert spec.target is not None
                value = ValueId(Role.PARAMETER, owner[spec.target.removeprefix(_ROOT + ".")])
                _require_grad(node, flat.parameters[value.name].requires_grad)
            case InputKind.USER_INPUT:
                value = ValueId(Role.INPUT, next(remaining))
                inputs[value.name] = info(node).tensor
            case InputKind.BUFFER | InputKind.CONSTANT_TENSOR:
                assert spec.target is not None
                value = ValueId(Role.CONSTANT, spec.target.removeprefix(_ROOT + "."))
                flat.constants[value.name] = _constant_value(spec.target, program, clone, node)
            case _:
                raise refuse(node, f"the model uses a {spec.kind.name.lower()}", "use tensors only")
        held = tensors.get((spec.target or "").removeprefix(_ROOT + "."))
        if held is not None:
            shared = first.get(value)
            placeholder_of.setdefault(id(held), node if shared is None else shared)
        if value in first:
            node.replace_all_uses_with(first[value])
            flat.graph.erase_node(node)
            continue
        first[value] = node
        flat.bindings[node] = value
    flat.inputs = inputs
    return placeholder_of


def _require_grad(node: fx.Node, requires_grad: bool) -> None:
    tensor = info(node).tensor
    set_info(
        node,
        NodeInfo(
            tensors=(
                TensorInfo(shape=tensor.shape, dtype=tensor.dtype, requires_grad=requires_grad),
            )
        ),
    )


def _constant_value(
    target: str, program: ExportedProgram, clone: MetaClone, node: fx.Node
) -> Tensor:
    held = program.state_dict.get(target, program.constants.get(target))
    assert isinstance(held, Tensor), f"{target} is no tensor of the exported program"
    if not held.is_meta:
        return held.detach()
    value = clone.value_of(held)
    if value is None:
        raise CaptureError(
            f"buffer {target.removeprefix(_ROOT + '.')} is on the meta device and has no value",
            hint="build the model with open_model(…).build() or on the CPU",
        )
    return value
