"""How many optimizer steps a training takes, by its batch (McCandlish et al. 2018, *An empirical
model of large-batch training*).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLength:
    """Steps to a given loss: S(B) = S_min · (1 + B_crit / B).

    Attributes:
        fewest_steps: S_min, which no batch is below.
        critical_batch: B_crit, sequences of the batch at which a training takes twice the fewest
            steps, and twice the fewest sequences; 0: sequences count alone, whatever the batch.
        fewest_sequences: S_min · B_crit, which small batches need.
    """

    fewest_steps: float
    critical_batch: float
    fewest_sequences: float

    @classmethod
    def to_budget(
        cls, tokens: float, *, seq_len: int, critical_batch: float | None = None
    ) -> TrainingLength:
        """A training that takes ``tokens`` tokens with small batches, and with larger ones more;
        without ``critical_batch`` with all batches alike.

        Raises:
            InputError: A number is not positive.
        """
        for name, value in (("token_budget", tokens), ("critical_batch_size", critical_batch)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; it must be a positive number")
        sequences = tokens / seq_len
        steps = 0.0 if critical_batch is None else sequences / critical_batch
        return cls(
            fewest_steps=steps, critical_batch=critical_batch or 0.0, fewest_sequences=sequences
        )

    @classmethod
    def at_critical_batch(cls, steps: float, *, critical_batch: float) -> TrainingLength:
        """A training that takes so many steps at the critical batch."""
        return cls(
            fewest_steps=steps / 2,
            critical_batch=critical_batch,
            fewest_sequences=steps / 2 * critical_batch,
        )

    def steps(self, batch: int) -> float:
        """Optimizer steps at a batch of so many sequences."""
        return self.fewest_steps + self.fewest_sequences / batch

    def seconds(self, batch: int, step_s: float) -> float:
        """Of the whole training, in steps of ``step_s`` seconds."""
        return self.steps(batch) * step_s

    def batches(self) -> tuple[int, ...]:
        """Batches worth a look: powers of two, from 1/64 of the critical one to 8 times it.

        Between two of them a training is at most some percent shorter. Below, a training takes as
        many sequences as with the smallest batch, to within 3 %, and the same machine does them no
        faster. Above, steps are the fewest to within 25 %, and each takes longer.
        """
        low, high = max(1.0, self.critical_batch / 64), 8 * self.critical_batch
        found = (2**power for power in range(int(math.log2(high)) + 1 if high >= 1 else 0))
        return tuple(batch for batch in found if low <= batch)
