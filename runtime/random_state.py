"""Random numbers of a step: alike on all tensor ranks, unlike on data ranks and stages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autopar.runtime.launch import has_index


@contextmanager
def step_random_state(seed: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and ``device`` with ``seed``; put them back as they were
    afterwards.

    Args:
        seed: Numbers that name the stream: the plan's seed, the step, the data coordinate, the
            stage.
    """
    devices = [device.index] if has_index(device) else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else None):
        digest = hashlib.sha256(repr(seed).encode()).digest()
        torch.random.manual_seed(int.from_bytes(digest[:7], "big"))
        yield
