"""How much is measured: shapes, sizes and repeats, by device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.calibration.parameters import ParameterSizes
from autopar.calibration.small_model import ModelSize

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What is measured.

    Attributes:
        samples: Repeats of each measurement in a sweep.
        target_s: Seconds of a repeat.
        products: Batch, rows, columns and depth of products: aligned and not.
        other_products: The same, in the dtypes that the hardware does not train in.
        attentions: Sequences, heads, length and head dim of causal attention.
        elements: Sizes of elementwise ops.
        chain: Tiny kernels in a row.
        tiny_model: One that takes the host longer than the device.
        models: Ones whose memory-bound kernels count; none where single kernels say enough.
        parameters: Ones that the runtime updates, the first of them small, whose gradients it
            takes; none where the host runs ahead.
        copied_bytes: Size of what is copied between device and host.
        message_bytes: Sizes of collectives and messages.
        beside_bytes: Size of the collective that runs beside compute.
        sweeps: Over all measurements.
    """

    samples: int
    target_s: float
    products: tuple[Shape, ...]
    other_products: tuple[Shape, ...]
    attentions: tuple[Shape, ...]
    elements: tuple[int, ...]
    chain: int
    tiny_model: ModelSize
    models: tuple[ModelSize, ...]
    parameters: tuple[ParameterSizes, ...]
    copied_bytes: int
    message_bytes: tuple[int, ...]
    beside_bytes: int
    sweeps: int = 1


_CPU_PRODUCTS = (
    (1, 1024, 128, 128),
    (1, 128, 352, 1024),
    (1, 256, 256, 256),
    (1, 512, 512, 512),
    (1, 1024, 64, 128),
    (1, 128, 128, 256),
    (1, 64, 64, 64),
    (1, 100, 100, 100),
    (1, 300, 200, 130),
    (8, 64, 64, 64),
)
_GPU_PRODUCTS = (
    (1, 8192, 8192, 8192),
    (1, 4096, 4096, 4096),
    (1, 2048, 4096, 4096),
    (1, 2048, 11008, 4096),
    (1, 4096, 1024, 8192),
    (1, 2048, 2048, 1024),
    (1, 1024, 1024, 1024),
    (1, 2047, 4095, 4095),
    (1, 2000, 1000, 3000),
    (64, 512, 512, 128),
    (1, 512, 512, 512),
)


_TINY = ModelSize(sequences=1, length=8, hidden=64, inner=64, heads=2, layers=2, vocabulary=64)
_SMALL = ModelSize(sequences=4, length=64, hidden=128, inner=384, heads=4, layers=2, vocabulary=512)
_MODELS = (
    _SMALL,
    replace(_SMALL, sequences=16),
    replace(_SMALL, layers=4),
    replace(_SMALL, layers=4, sequences=8),
    replace(_SMALL, layers=3, hidden=192),
)
_PARAMETERS = (
    ParameterSizes(num=40, rows=16),
    ParameterSizes(num=4, rows=512),
    ParameterSizes(num=40, rows=160),
)


def effort_for(device: str, *, quick: bool) -> Effort:
    """What is measured on a type of device: under 90 s on 2 cores, ``quick`` under 20 s."""
    if device == "cpu":
        return Effort(
            samples=3,
            target_s=0.004 if quick else 0.02,
            products=_CPU_PRODUCTS[::3] if quick else _CPU_PRODUCTS,
            other_products=((1, 256, 256, 256),),
            attentions=((4, 8, 64, 16), (2, 4, 128, 64))
            if quick
            else ((4, 8, 64, 16), (2, 4, 128, 64), (1, 8, 256, 64), (4, 4, 64, 32)),
            elements=(1 << 16, 1 << 18) if quick else (1 << 14, 1 << 16, 1 << 17, 1 << 18, 1 << 20),
            chain=50,
            tiny_model=_TINY,
            models=(_SMALL,) if quick else _MODELS,
            parameters=_PARAMETERS[:2] if quick else _PARAMETERS,
            copied_bytes=1 << 22 if quick else 1 << 24,
            message_bytes=(1 << 10, 1 << 18)
            if quick
            else (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23),
            beside_bytes=1 << 19 if quick else 1 << 21,
            sweeps=1 if quick else 3,
        )
    return Effort(
        samples=3 if quick else 9,
        target_s=0.01 if quick else 0.05,
        products=_GPU_PRODUCTS[::2] if quick else _GPU_PRODUCTS,
        other_products=((1, 2048, 2048, 2048),),
        attentions=((1, 32, 2048, 128),) if quick else ((1, 32, 2048, 128), (1, 16, 8192, 64)),
        elements=(1 << 26,) if quick else (1 << 24, 1 << 26, 1 << 28),
        chain=200,
        tiny_model=_TINY,
        models=(),
        parameters=(),
        copied_bytes=1 << 26,
        message_bytes=(1 << 12, 1 << 24, 1 << 27)
        if quick
        else tuple(1 << power for power in range(10, 30, 2)),
        beside_bytes=1 << 27,
    )
