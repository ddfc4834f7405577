"""What can be pinned, and whether the pins of a request can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from autopar.ir.errors import InputError
from autopar.ir.kernels import parse_kernels
from autopar.ir.mesh import MESH_AXES
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.ir.schedules import DEEPENED
from autopar.ir.zero_stages import parse_zero_stages, with_exceptions
from autopar.solver.candidates import Divisible
from autopar.solver.hardware import Cluster

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
INTEGER_PINS = (
    *DEGREES,
    "micro_batch_size",
    "zero_stage",
    "virtual_stages",
    "extra_in_flight",
    "sequence_parallel",
    "loss_parallel",
    "loss_chunks",
    "offload_optimizer",
    "offload_activations",
    "gather_again",
)
CHOICE_PINS: Mapping[str, tuple[str, ...]] = {
    "recompute": get_args(RecomputeName),
    "schedule": get_args(ScheduleName),
    "cuts": ("balanced", "even"),
    "shares": ("balanced", "equal"),
}
KERNEL_PIN = "kernel"
AXES_PIN = "axis_order"
GROUP_PIN = "group_order"
ZERO_PIN = "zero_stages"
TEXT_PINS = (KERNEL_PIN, GROUP_PIN, ZERO_PIN, AXES_PIN)
ZERO_CHOICES = ("open", "equal")
"""Values of ``ZERO_PIN`` that name no blocks: each block has its own stage up to that of all, or
all have one.
"""
OFFLOAD_PINS = ("offload_optimizer", "offload_activations")
"""Off unless they are pinned, or nothing fits otherwise; ``OPEN`` lets the search decide."""
OPEN = "open"
_RANGES: Mapping[str, tuple[int, int | None]] = {
    "zero_stage": (0, 3),
    "sequence_parallel": (0, 1),
    "loss_parallel": (0, 1),
    "offload_optimizer": (0, 1),
    "offload_activations": (0, None),
    "gather_again": (0, 1),
    "extra_in_flight": (0, None),
}
Pins = Mapping[str, int | str]

_FIXING = ("pp", "dp_replicate", "dp_shard", "tp")
"""Degrees that say how many GPUs are used once all are pinned; ``cp`` and ``ep`` are 1 then, unless
they are pinned, too.
"""


def check_pins(pin: Pins, cluster: Cluster, global_batch_size: int) -> None:
    """Raise ``InputError`` for a pin that cannot hold, naming it."""
    for name, value in pin.items():
        if name in CHOICE_PINS:
            if value not in CHOICE_PINS[name]:
                options = " or ".join(CHOICE_PINS[name])
                raise InputError(f"{name}={value!r} is pinned; it can be {options}")
        elif name == KERNEL_PIN:
            parse_kernels(str(value))
        elif name == GROUP_PIN:
            pinned_order(pin, cluster)
        elif name == AXES_PIN:
            pinned_axes(pin)
        elif name == ZERO_PIN:
            if value not in ZERO_CHOICES:
                parse_zero_stages(str(value))
        elif name not in INTEGER_PINS:
            known = ", ".join((*INTEGER_PINS, *CHOICE_PINS, *TEXT_PINS))
            raise InputError(f"nothing is called {name!r}, so that it cannot be pinned", hint=known)
        elif name not in OFFLOAD_PINS or value != OPEN:
            _check_integer(name, value)
    gpus, degrees = cluster.num_gpus, pinned_degrees(pin)
    product = 1
    for name, degree in degrees.items():
        product *= degree
        if gpus % degree and not fixes_gpus(degrees):
            raise InputError(
                f"{name}={degree} is pinned, but it does not divide the {gpus} GPUs of the cluster"
            )
    pinned = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
    if product > gpus:
        raise InputError(f"{pinned} needs {product} GPUs, but the cluster has {gpus}")
    if gpus % product and not fixes_gpus(degrees):
        raise InputError(f"{pinned} is pinned: {product} ranks do not divide the {gpus} GPUs")
    if cluster.is_mixed:
        _check_groups(pin, cluster)
    elif "shares" in pin:
        raise InputError(
            f"shares={pin['shares']!r} is pinned, but all nodes are of one kind: shares are equal"
        )
    _check_batch(pin, global_batch_size)
    _check_zero(pin)
    _check_virtual(pin)
    if pin.get("gather_again") and pin.get("offload_activations"):
        raise InputError(
            f"gather_again=1 and offload_activations={pin['offload_activations']} are pinned, but "
            "what is offloaded is not gathered again",
            hint="leave one of them open",
        )
    _check_offload(pin)


def _check_groups(pin: Pins, cluster: Cluster) -> None:
    """Raise ``InputError`` for what is not known of stages on nodes of several kinds."""
    fits = {
        "schedule": pin.get("schedule") != "interleaved",
        "virtual_stages": pin.get("virtual_stages", 1) == 1,
    }
    for name in fits:
        if not fits[name]:
            raise InputError(
                f"{name}={pin[name]!r} is pinned, but stages on several groups of nodes have no "
                "virtual stages",
                hint=f"leave {name} open",
            )
    if pinned_axes(pin) not in (None, MESH_AXES):
        raise InputError(
            f"axis_order={pin[AXES_PIN]!r} is pinned, but stages on several groups of nodes have "
            "their ranks one after the other",
            hint=f"axis_order={','.join(MESH_AXES)}",
        )
    tp = int(pin.get("tp", 1))
    for group in cluster.groups:
        if group.num_gpus % tp:
            raise InputError(
                f"tp={tp} is pinned, but it does not divide the {group.num_gpus} GPUs of "
                f"{group.name}: the ranks of a tensor axis are in one group of nodes"
            )


def _check_integer(name: str, value: object) -> None:
    lowest, highest = _RANGES.get(name, (1, None))
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InputError(f"{name}={value!r} is pinned; it must be a whole number ≥ {lowest}")
    if highest is not None and value > highest:
        options = [str(option) for option in range(lowest, highest + 1)]
        known = f"{', '.join(options[:-1])} or {options[-1]}"
        raise InputError(f"{name}={value} is pinned; it can be {known}")


def check_model(pin: Pins, model: Divisible) -> None:
    """Raise ``InputError`` for a degree that the model cannot have."""
    degrees = pinned_degrees(pin)
    blocks, virtual = model.num_blocks, int(pin.get("virtual_stages", 1))
    if degrees.get("pp", 1) > blocks:
        raise InputError(f"pp={degrees['pp']} is pinned, but the model has {blocks} blocks")
    if virtual > 1 and degrees.get("pp", 2) * virtual > blocks:
        pinned = f"pp={degrees['pp']} × " if "pp" in degrees else ""
        raise InputError(
            f"{pinned}virtual_stages={virtual} is pinned, but the model has {blocks} blocks"
        )
    if pin.get(ZERO_PIN, "open") not in ZERO_CHOICES:
        with_exceptions(1, parse_zero_stages(str(pin[ZERO_PIN])), model.block_kinds)
    _check_context(degrees.get("cp", 1), model)
    _check_experts(degrees.get("ep", 1), model)


def _check_context(cp: int, model: Divisible) -> None:
    if cp > 1 and (model.seq_len is None or model.seq_len % cp):
        length = "an unknown number of" if model.seq_len is None else model.seq_len
        raise InputError(f"cp={cp} is pinned, but it does not divide {length} positions")


def _check_experts(ep: int, model: Divisible) -> None:
    if ep > 1 and not model.num_experts:
        raise InputError(
            f"ep={ep} is pinned, but the model has no routed experts",
            hint="autopar.functional.routed_experts, or a Hugging Face mixture of experts",
        )
    if ep > 1 and model.num_experts % ep:
        raise InputError(f"ep={ep} is pinned, but it does not divide {model.num_experts} experts")


def pinned_degrees(pin: Pins) -> dict[str, int]:
    return {name: int(pin[name]) for name in DEGREES if name in pin}


def pinned_order(pin: Pins, cluster: Cluster) -> tuple[int, ...] | None:
    """The order of a cluster's groups of nodes that is pinned by their names: their positions in
    the file. None where it is not pinned.

    Raises:
        InputError: They are not those of the cluster.
    """
    if GROUP_PIN not in pin:
        return None
    names = [group.name for group in cluster.groups]
    wanted = [name.strip() for name in str(pin[GROUP_PIN]).split(",")]
    if sorted(wanted) != sorted(names) or not cluster.is_mixed:
        known = (
            f"all of {', '.join(names)}" if cluster.is_mixed else "nothing: nodes are of one kind"
        )
        raise InputError(f"group_order={pin[GROUP_PIN]!r} is pinned; it can be {known}")
    return tuple(map(names.index, wanted))


def pinned_axes(pin: Pins) -> tuple[str, ...] | None:
    """The order of the axes of the mesh that is pinned, outermost first; None where it is not.

    Raises:
        InputError: They are not the axes of a mesh.
    """
    if AXES_PIN not in pin:
        return None
    names = tuple(name.strip() for name in str(pin[AXES_PIN]).split(","))
    if sorted(names) != sorted(MESH_AXES):
        raise InputError(
            f"axis_order={pin[AXES_PIN]!r} is pinned; it can be any order of {', '.join(MESH_AXES)}"
        )
    return names


def fixes_gpus(degrees: Mapping[str, int]) -> bool:
    return all(name in degrees for name in _FIXING)


def _check_batch(pin: Pins, global_batch_size: int) -> None:
    product, names = 1, []
    for name in ("dp_replicate", "dp_shard", "ep"):
        if name in pin:
            product *= int(pin[name])
            names.append(f"{name}={pin[name]}")
    if global_batch_size % product:
        raise InputError(
            f"{' × '.join(names)} is pinned, but {product} does not divide the global batch of "
            f"{global_batch_size} sequences"
        )
    largest = global_batch_size // product
    if int(pin.get("micro_batch_size", 1)) > largest:
        raise InputError(
            f"micro_batch_size={pin['micro_batch_size']} is pinned, but a data rank has at most "
            f"{largest} of the {global_batch_size} sequences"
        )


def _check_zero(pin: Pins) -> None:
    zero, shard = pin.get("zero_stage"), pin.get("dp_shard")
    if zero == 0 and pin.get(ZERO_PIN, "equal") != "equal":
        raise InputError(
            f"zero_stage=0 and zero_stages={pin[ZERO_PIN]!r} are pinned, but blocks without shards "
            "have no others beside them",
            hint="zero_stage=1, 2 or 3",
        )
    if zero is None or shard is None:
        return
    if zero == 0 and shard != 1:
        raise InputError(
            f"zero_stage=0 and dp_shard={shard} are pinned, but ZeRO 0 shards nothing: dp_shard=1"
        )
    if zero != 0 and shard == 1 and pin.get("cp", 1) == pin.get("ep", 1) == 1:
        raise InputError(
            f"zero_stage={zero} and dp_shard=1 are pinned, but then there are no ranks to shard "
            "over"
        )


def _check_virtual(pin: Pins) -> None:
    virtual, pp = pin.get("virtual_stages"), pin.get("pp")
    if virtual not in (None, 1) and pp == 1:
        raise InputError(
            f"virtual_stages={virtual} and pp=1 are pinned, but one stage has nothing to interleave"
        )
    if pin.get("schedule") == "interleaved" and (virtual == 1 or pp == 1):
        alone = "virtual_stages=1" if virtual == 1 else "pp=1"
        raise InputError(
            f"schedule='interleaved' and {alone} are pinned, but it needs several virtual stages "
            "on each of several stages"
        )
    if pin.get("schedule") == "zero_bubble" and pp == 1:
        raise InputError(
            "schedule='zero_bubble' and pp=1 are pinned, but one stage waits for no others"
        )
    extra = pin.get("extra_in_flight")
    if extra and virtual not in (None, 1) and "schedule" not in pin:
        raise InputError(
            f"extra_in_flight={extra} and virtual_stages={virtual} are pinned, but interleaved "
            "1F1B has no more micro-batches in flight",
            hint="pin schedule=zero_bubble, or leave one of them open",
        )
    if extra and pp == 1:
        raise InputError(
            f"extra_in_flight={extra} and pp=1 are pinned, but one stage waits for no others"
        )
    if extra and pin.get("schedule", "1f1b") not in DEEPENED:
        raise InputError(
            f"extra_in_flight={pin['extra_in_flight']} and schedule={pin['schedule']!r} are "
            f"pinned; only {' and '.join(DEEPENED)} can have more micro-batches in flight"
        )


def _check_offload(pin: Pins) -> None:
    num = pin.get("offload_activations")
    if not num or num == OPEN:
        return
    pinned = f"offload_activations={num}"
    if pin.get("recompute", "blocks") not in ("none", "blocks"):
        raise InputError(
            f"{pinned} and recompute={pin['recompute']!r} are pinned, but that says of every block "
            "what is kept of it",
            hint="recompute=blocks or none, or leave it open",
        )
    if pin.get(ZERO_PIN) == "open":
        raise InputError(
            f"{pinned} and {ZERO_PIN}='open' are pinned, but ZeRO stages of blocks are not chosen "
            "beside offloaded activations",
            hint="pin zero_stage",
        )
    if pin.get("schedule") == "layered" and pin.get("pp", 1) != 1:
        raise InputError(
            f"{pinned}, schedule='layered' and pp={pin['pp']} are pinned, but then blocks of a "
            "stage are one segment, and offloaded ones are segments by themselves",
            hint="another schedule, or pp=1",
        )
