"""Which tensors autograd keeps, each (value, state) once, and views as what they look at."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.ir.graph import Role, TensorInfo
from autopar.ir.moves import Collective, collective_of
from autopar.ir.placement import INVARIANT, State
from autopar.ir.rules.core import Option
from autopar.solver.costs.saved import Saved, own_bytes, saved_for_backward
from autopar.solver.layout.costing import Coster
from autopar.solver.layout.draft import Draft
from autopar.solver.layout.frame import FrameHeld, KeptInside, KeptValue
from autopar.solver.layout.outer import NodeView


class KeptTensors:
    """The list of tensors that may be kept; ``by`` adds what an op keeps under an option.

    Ops come in the order of the graph, so that views are noted before they are kept.
    """

    def __init__(self, coster: Coster, drafts: Sequence[Draft]) -> None:
        self.coster, self.drafts = coster, drafts
        self.tensors: list[FrameHeld] = []
        self._numbers: dict[tuple[int, State, float], int] = {}
        self._made_again: set[int] = set()
        self._looks_at: dict[tuple[int, State], tuple[int, State]] = {}

    def note_view(self, view: int, state: State, value: int, value_state: State) -> None:
        """``view`` in ``state`` is another look at ``value`` in ``value_state``."""
        self._looks_at.setdefault((view, state), (value, value_state))

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
        found = [(operands[i], option.operands[i], view.operands[i]) for i in saved.operands]
        found += [(results[i], option.results[i], view.results[i]) for i in saved.results]
        numbers = dict.fromkeys(
            self._number(*self._root(value, state), self._copies(value, tensor))
            for value, state, tensor in found
        )
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
                    moved=None,
                    free=frozenset(),
                    what=KeptInside(node=node, view=view, option=option),
                )
            )
        return tuple(number for number in numbers if number is not None)

    def note_made_again(self, results: Sequence[int]) -> None:
        """Nobody keeps these values: backward computes them again. What ranks have sent each other
        of them is kept: collectives are never repeated.
        """
        self._made_again.update(results)

    def _root(self, value: int, state: State) -> tuple[int, State]:
        while (value, state) in self._looks_at:
            value, state = self._looks_at[value, state]
        return value, state

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

    def _number(self, value: int, state: State, copies: float) -> int | None:
        """None for inputs and constants, which are there anyway, and for what is computed again
        wherever it is.
        """
        draft = self.drafts[value]
        if draft.role in (Role.INPUT, Role.CONSTANT):
            return None
        moved, free = None, frozenset[int]()
        if draft.role is Role.PARAMETER:
            free = frozenset(n for n, other in enumerate(draft.states) if other == state)
        elif value in self._made_again and copies <= 1:  # more are gathered on a typed axis
            free = self._not_sent(draft, state)
            if len(free) == len(draft.states):
                return None
        if free or draft.role is Role.PARAMETER:
            moved = (value, tuple(draft.demanded).index(state))
        key = (value, state, copies)
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            what = KeptValue(tensor=draft.tensor, state=state, copies=copies)
            self.tensors.append(
                FrameHeld(kind=draft.kind, tensor=value, moved=moved, free=free, what=what)
            )
        return self._numbers[key]
