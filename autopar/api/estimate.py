"""``estimate``: what a given layout takes, with the costs, schedule and simulator of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from torch import nn

from autopar.api.arguments import EstimateArguments, OpenArguments, check_names, only
from autopar.api.planning import capture_request
from autopar.api.request import open_request
from autopar.ir.explain import memory_by_cause, time_by_cause
from autopar.ir.plan import ClusterRef
from autopar.ir.units import bytes_text, seconds_text
from autopar.solver import Cluster
from autopar.solver import estimate as solver_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(solver_estimate.Estimate):
    """What a step of a layout takes, whether or not it fits into memory. Prints itself.

    Attributes:
        model: What the model is called.
        cluster: The GPUs.
    """

    model: str
    cluster: ClusterRef

    @property
    def mfu(self) -> float:
        """FLOPs of the model over what the GPUs could do in the step."""
        return self.prediction.mfu

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.prediction.tokens_per_s

    @property
    def bytes_by_cause(self) -> Mapping[str, int]:
        """Bytes of the fullest rank."""
        return self.prediction.fullest.bytes_by_cause

    @property
    def seconds_by_cause(self) -> Mapping[str, float]:
        """Seconds of a step on the stage that waits least for others."""
        return self.prediction.critical.seconds_by_cause

    def explain(self) -> str:
        """The estimate in words: step, memory, and both by cause."""
        return "\n\n".join(
            (
                self._summary(),
                time_by_cause(self.prediction),
                memory_by_cause(self.prediction),
            )
        )

    def _summary(self) -> str:
        peak, usable = self.peak_bytes, self.usable_bytes
        room = (
            f"fits: {bytes_text(usable - peak)} are left"
            if self.fits
            else f"does not fit: {bytes_text(peak - usable)} too much"
        )
        used = self.candidate.mesh().num_ranks
        return "\n".join(
            (
                f"{self.model} on {self.cluster.used(used)}",
                f"  {self.candidate}",
                f"  step {seconds_text(self.step_s)}, {self.tokens_per_s:,.0f} tokens/s, "
                f"MFU {self.mfu:.1%}",
                f"  fullest rank {bytes_text(peak)} of {bytes_text(usable)}: {room}",
            )
        )

    def __str__(self) -> str:
        return self.explain()


def estimate(
    model: str | Path | nn.Module,
    cluster: Cluster,
    layout: Mapping[str, int | str],
    **arguments: Unpack[EstimateArguments],
) -> Estimate:
    """The step of ``layout``: what ``plan`` predicts with these pins, also where it does not fit.

    Args:
        layout: Pins by the names that ``plan`` takes, which leave nothing to choose.
        arguments: As of ``plan``; see ``EstimateArguments`` (``autopar.api.arguments``).

    Raises:
        InputError: An argument is wrong, a pin cannot hold, or something is left open.
        CaptureError: The model cannot be captured.
    """
    check_names("estimate", arguments, EstimateArguments)
    request = open_request(model, cluster, only(OpenArguments, {**arguments, "pin": layout}))
    found = solver_estimate.estimate(
        capture_request(request),
        cluster,
        global_batch_size=request.global_batch_size,
        training=request.training,
        pin=request.pin,
    )
    return Estimate(
        candidate=found.candidate,
        prediction=found.prediction,
        reserved_bytes=found.reserved_bytes,
        model=request.source.name,
        cluster=cluster.ref(),
    )
