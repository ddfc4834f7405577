"""Precisions by the names that plans have for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.plan import PrecisionName

DTYPES: Mapping[PrecisionName, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "float64": torch.float64,
}
