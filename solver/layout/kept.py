"""Which tensors autograd keeps, each (value, state) once, and views as what they look at."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from torch import fx

from autopar.ir.graph import Role, TensorInfo
from autopar.ir.moves import Collective, collective_of
from autopar.ir.placement import INVARIANT, State
from autopar.ir.recompute import is_gather
from autopar.ir.rules.core import Option
from autopar.solver.costs.saved import Saved, own_bytes, saved_for_backward
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.draft import Draft
from autopar.solver.layout.frame import FrameHeld, GatheredAgain, KeptInside, KeptValue
from autopar.solver.layout.outer import NodeView


class KeptTensors:
    """The list of tensors that may be kept; ``by`` adds what an op keeps under an option.

    Ops come in the order of the graph, so that views are noted before they are kept.
    """

    def __init__(
        self, coster: Coster, drafts: Sequence[Draft], gathers: frozenset[int] = frozenset()
    ) -> None:
        self.coster, self.drafts = coster, drafts
        self.tensors: list[FrameHeld] = []
        self._gathers = gathers  # kinds that gather again
        self._numbers: dict[Hashable, int] = {}
        self._made_again: set[int] = set()
        self._looks_at: dict[tuple[int, State], tuple[int, State, bool]] = {}

    def note_view(
        self, view: int, state: State, value: int, value_state: State, outer: tuple[State, ...]
    ) -> None:
        """``view`` in ``state`` is another look at ``value`` in ``value_state``, and in ``outer``
        on the typed axes.
        """
        is_there = self.drafts[value].outer == outer
        self._looks_at.setdefault((view, state), (value, value_state, is_there))

    def by(
        self,
        node: fx.Node,
        view: NodeView,
        option: Option,
        operands: Sequence[int],
        results: Sequence[int],
    ) -> tuple[int, ...]:
        """Numbers of the tensors that ``node`` keeps; operands and results are values."""
        style = self.coster.style(node)
        saved = saved_for_backward(node, style)
        if node in self.coster.again:  # what it is computed from, and nothing that it makes
            saved = Saved(operands=tuple(range(len(operands))))
        split = len(operands)
        found = [(operands[i], option.operands[i], view.operands[i], i) for i in saved.operands]
        found += [
            (results[i], option.results[i], view.results[i], split + i) for i in saved.results
        ]
        numbers: dict[int, None] = {}
        for value, state, tensor, place in found:
            is_there = self.drafts[value].outer == view.states[place]
            root = self._root(value, state, is_there=is_there)
            numbers |= dict.fromkeys(self._kept(*root, self._copies(value, tensor)))
        shapes = self.coster.operand_shapes(view, option)
        own = (
            0
            if node in self.coster.again
            else own_bytes(node, shapes, dispatch=self.coster.dispatch(view, option), style=style)
        )
        if own:
            numbers[len(self.tensors)] = None
            self.tensors.append(
                FrameHeld(
                    kind=self.drafts[results[0]].kind,
                    tensor=-len(self.tensors) - 1,
                    made=None,
                    free=frozenset(),
                    what=KeptInside(node=node, view=view, option=option),
                )
            )
        return tuple(numbers)

    def note_made_again(self, results: Sequence[int]) -> None:
        """Nobody keeps these values: backward computes them again. What ranks have sent each other
        of them is kept, unless it is gathered again.
        """
        self._made_again.update(results)

    def _root(self, value: int, state: State, *, is_there: bool) -> tuple[int, State, bool]:
        """What a value in a state is a look at, and whether typed axes leave that where it is."""
        while (value, state) in self._looks_at:
            value, state, is_left = self._looks_at[value, state]
            is_there = is_there and is_left
        return value, state, is_there

    def _not_sent(self, draft: Draft, target: State) -> frozenset[int]:
        """States of a value from which ranks send nothing for it to be in ``target``."""
        return frozenset(
            number
            for number, state in enumerate(draft.states)
            if self.coster.group.size == 1 or collective_of(state, target) is Collective.NONE
        )

    def _copies(self, value: int, tensor: TensorInfo) -> float:
        """How large ``tensor``, which an op sees of a value, is beside the value as it was made.

        They differ where a typed axis moves the value: keys that all ranks gather, for example.
        """
        made = self.drafts[value].tensor
        if tensor is made:
            return 1.0
        return self.coster.numel(tensor, INVARIANT) / max(1, self.coster.numel(made, INVARIANT))

    def _kept(self, value: int, state: State, is_there: bool, copies: float) -> Iterator[int]:
        """Numbers of what is kept of a value for who needs it in ``state``, on typed axes as it was
        made if it ``is_there``.

        None for inputs and constants, which are there anyway, and for what is computed again
        wherever it is.
        """
        draft = self.drafts[value]
        if draft.role in (Role.INPUT, Role.CONSTANT):
            return
        kept_whole = draft.role is not Role.PARAMETER
        free = frozenset[int]()
        if not kept_whole:
            free = frozenset(n for n, other in enumerate(draft.states) if other == state)
        elif value in self._made_again and copies <= 1:  # more are gathered on a typed axis
            free, kept_whole = self._not_sent(draft, state), False
        gathered = self._gathered(draft, state) if is_there and copies == 1 else {}
        if kept_whole and is_there and self._may_gather(draft) and state in draft.states:
            gathered_from = {list(draft.states).index(state): state, **gathered}
        else:
            gathered_from = gathered if kept_whole else {}
        free = free.union(gathered, gathered_from)
        if len(free) < len(draft.states):
            made = value if free or draft.role is Role.PARAMETER else None
            kept = KeptValue(tensor=draft.tensor, state=state, copies=copies)
            yield self._number(draft, value, made, free, kept)
        for source, shards in gathered.items():
            again = GatheredAgain(tensor=draft.tensor, source=shards, target=state)
            yield self._number(draft, value, value, self._all_but(draft, source), again)
        for source, shards in gathered_from.items():  # as it was made, for whoever needs that
            kept = KeptValue(tensor=draft.tensor, state=shards, copies=1.0)
            yield self._number(draft, value, value, self._all_but(draft, source), kept)

    def _gathered(self, draft: Draft, target: State) -> dict[int, State]:
        """States of a value from which it is gathered again for it to be in ``target``."""
        if not self._may_gather(draft):
            return {}
        states = enumerate(draft.states)
        return {number: state for number, state in states if is_gather(state, target)}

    def _may_gather(self, draft: Draft) -> bool:
        return draft.kind in self._gathers and self.coster.group.size > 1

    @staticmethod
    def _all_but(draft: Draft, state: int) -> frozenset[int]:
        return frozenset(range(len(draft.states))) - {state}

    def _number(
        self,
        draft: Draft,
        value: int,
        made: int | None,
        free: frozenset[int],
        what: KeptValue | GatheredAgain,
    ) -> int:
        key = (value, made, free, what)
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(
                FrameHeld(kind=draft.kind, tensor=value, made=made, free=free, what=what)
            )
        return self._numbers[key]
