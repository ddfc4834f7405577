"""All layouts of a model on a cluster that a study looks at, and the best of some of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.plan import RecomputeName
from benchmarks.papers.study import FUSED, Found, Layout, Study

Choose = Callable[[Layout], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What layouts are made of; the data axis takes the GPUs that are left."""

    tp: Sequence[int] = (1, 2, 4, 8)
    pp: Sequence[int] = (1, 2, 4, 8)
    micro_batch_size: Sequence[int] = (1, 2, 4)
    recompute: Sequence[RecomputeName] = ("none", "selective", "full")
    sequence_parallel: Sequence[bool] = (False, True)
    zero_stage: Sequence[int] = (1, 2, 3)
    kernel: str = FUSED

    def layouts(self, *, num_gpus: int, num_layers: int, batch: int) -> Iterator[Layout]:
        """Each that uses all GPUs, has as many layers on each stage and divides the batch."""
        for tp, pp, size, recompute, sharded, zero in itertools.product(
            self.tp,
            self.pp,
            self.micro_batch_size,
            self.recompute,
            self.sequence_parallel,
            self.zero_stage,
        ):
            if num_gpus % (tp * pp) or num_layers % pp:
                continue
            dp = num_gpus // (tp * pp)
            if batch % (dp * size) or (dp == 1 and zero != self.zero_stage[0]):
                continue
            yield Layout(
                tp=tp,
                pp=pp,
                dp=dp,
                micro_batch_size=size,
                recompute=recompute,
                sequence_parallel=sharded and tp > 1,  # one rank has all positions
                zero_stage=zero,
                kernel=self.kernel,
            )


PAPER = Space(zero_stage=(1,))
"""What Hagemann et al. sweep, with selective recomputation."""

SHARDED = Space(
    tp=(1, 2, 4),
    pp=(1, 2),
    recompute=("none", "full"),
    sequence_parallel=(True,),
    zero_stage=(2, 3),
)
"""ZeRO 2 and 3, also known as FSDP: they gather or reduce for every micro-batch, so that many
micro-batches of long pipelines are no use of them. (Over one tensor rank positions are whole.)
"""

NARROW = replace(PAPER, recompute=("none", "full"))
"""Where nothing but the mesh and the micro-batch is asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A model on a cluster, and the estimates of its layouts, fitting or not."""

    model: str
    seq: int
    study: Study
    found: Sequence[Found]

    def fastest(self, choose: Choose = lambda _: True) -> Found | None:
        """The fastest layout that fits; of those that ``choose`` takes. None: none fits."""
        fitting = [f for f in self.found if f.estimate.fits and choose(f.layout)]
        return min(fitting, key=lambda found: found.seconds, default=None)

    @property
    def best(self) -> Found:
        """The fastest layout of all that fit."""
        found = self.fastest()
        assert found is not None, f"nothing fits of {self.model}"
        return found

    def price(self, choose: Choose) -> float | None:
        """How many times the best step the fastest step with such a layout takes."""
        found = self.fastest(choose)
        return found.seconds / self.best.seconds if found else None

    def ratio(self, better: Choose, worse: Choose) -> float | None:
        """The fastest ``worse`` step over the fastest ``better`` step."""
        one, other = self.fastest(better), self.fastest(worse)
        return other.seconds / one.seconds if one and other else None

    @property
    def where(self) -> str:
        """In words: the model and its length."""
        return f"{self.model}, {length(self.seq)}"


def sweep(model: str, seq: int, study: Study, num_layers: int, *spaces: Space) -> Sweep:
    """Estimate all layouts of ``spaces``."""
    layouts = dict.fromkeys(
        layout
        for space in spaces
        for layout in space.layouts(
            num_gpus=study.cluster.num_gpus, num_layers=num_layers, batch=study.global_batch_size
        )
    )
    return Sweep(model=model, seq=seq, study=study, found=[study(layout) for layout in layouts])


def length(seq: int) -> str:
    """``2048`` as ``2k``."""
    return f"{seq // 1024}k" if seq % 1024 == 0 else str(seq)


def times(ratio: float | None) -> str:
    """A ratio for a table."""
    return "–" if ratio is None else f"{ratio:.2f}"
