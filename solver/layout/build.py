"""From the problem to a MathOpt model. The formulation, with the symbols of ``problem``:

(0) minimize  Σ_o Σ_k (w_f f[o,k] + w_g g[o,k]) u[o,k]
              + Σ_v Σ_s Σ_t (w_f f[v,s,t] + w_g g[v,s,t]) z[v,s,t]
              + Σ_c Σ_s w_c[s] y[c,s] + Σ_q w_q h[q]
(1) Σ_k u[o,k] = 1                           every op takes one option
(2) x[v,s] = Σ_{k gives v in s} u[o,k]       a value is in the state that its op gives it
    x[v,s] = y[class of v, s]                a placeholder is in the state of its class
(3) Σ_s y[c,s] = 1                           a class has one state
(4) Σ_s w[c,s,t] = Σ_{k demands t} u[o,k]    consumer c, an operand of op o, gets what it demands;
    Σ_s w[c,s,t] = y[class, t]               a block hands v on in the state of the class
(5) Σ_t w[c,s,t] = x[v,s]                    … from the state in which the value is
(6) z[v,s,t] ≥ w[c,s,t]                      a move is paid once, whoever shares it
(7) h[q] ≥ Σ_{k keeps q} u[o,k]              for each op o; less z[v,t,t] where only a moved copy
                                             costs bytes
(8) Σ_q copies · bytes[q] h[q] + Σ_c Σ_s bytes[c,s] y[c,s] ≤ limit     for each memory limit

``w[c,s,t]`` says that consumer c takes v, which is in s, in t. Without it, one relaxed value could
serve each consumer from another share of itself, and the relaxation is weaker by 2 to 9 %.

u and y are binary; all others are continuous and integral at an optimum. Seconds are written in µs
and bytes in MB, so that coefficients are near 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from autopar.solver.layout.problem import MemoryLimit, Problem, Value, Weights

MICROSECONDS = 1e6
MEGABYTES = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A MathOpt model and its variables, by the names of the formulation."""

    problem: Problem
    model: mathopt.Model
    u: tuple[tuple[mathopt.Variable, ...], ...]
    y: tuple[tuple[mathopt.Variable, ...], ...]
    z: tuple[Mapping[tuple[int, int], mathopt.Variable], ...]
    h: tuple[mathopt.Variable, ...]


def build(problem: Problem, limits: Sequence[MemoryLimit] = ()) -> Model:
    """The model of ``problem`` with memory limits; ``set_objective`` gives it an objective."""
    builder = _Builder(problem)
    builder.choose_options()  # (1)
    builder.choose_class_states()  # (3)
    builder.place_values()  # (2)
    builder.move_values()  # (4), (5), (6)
    builder.hold_tensors()  # (7)
    for limit in limits:
        builder.limit_memory(limit)  # (8)
    return Model(
        problem=problem,
        model=builder.model,
        u=tuple(builder.u),
        y=tuple(builder.y),
        z=tuple(builder.z),
        h=tuple(builder.h),
    )


def set_objective(model: Model, weights: Weights) -> None:
    """(0), in place of the objective that the model had."""
    problem = model.problem
    terms: list[tuple[mathopt.Variable, float]] = []
    for op, options in zip(problem.ops, model.u, strict=True):
        forward, backward = weights.forward[op.kind], weights.backward[op.kind]
        for option, variable in zip(op.options, options, strict=True):
            terms.append((variable, forward * option.forward_s + backward * option.backward_s))
    for value, moves in zip(problem.values, model.z, strict=True):
        forward, backward = weights.forward[value.kind], weights.backward[value.kind]
        for pair, variable in moves.items():
            cost = value.moves[pair]
            terms.append((variable, forward * cost.forward_s + backward * cost.backward_s))
    for state_class, states, size in zip(problem.classes, model.y, weights.parameters, strict=True):
        for step_s, numel, variable in zip(
            state_class.step_s, state_class.numel, states, strict=True
        ):
            terms.append((variable, weights.step * step_s + size * numel))
    for held, variable in zip(problem.held, model.h, strict=True):
        terms.append((variable, weights.held[held.kind] * held.num_bytes))
    model.model.objective.clear()
    model.model.objective.is_maximize = False
    for variable, seconds in terms:
        if seconds:
            model.model.objective.set_linear_coefficient(variable, MICROSECONDS * seconds)


_Sum = mathopt.LinearSum


class _Builder:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = mathopt.Model()
        self.u: list[tuple[mathopt.Variable, ...]] = []
        self.y: list[tuple[mathopt.Variable, ...]] = []
        self.x: list[list[mathopt.LinearBase]] = []
        self.z: list[dict[tuple[int, int], mathopt.Variable]] = []
        self.h: list[mathopt.Variable] = []

    def choose_options(self) -> None:
        for op in self.problem.ops:
            options = tuple(self.model.add_binary_variable() for _ in op.options)
            self.u.append(options)
            self.model.add_linear_constraint(_Sum(options) == 1)

    def choose_class_states(self) -> None:
        for state_class in self.problem.classes:
            states = tuple(self.model.add_binary_variable() for _ in state_class.states)
            self.y.append(states)
            if states:
                self.model.add_linear_constraint(_Sum(states) == 1)

    def place_values(self) -> None:
        """``x`` is the sum itself: no variables of its own."""
        given: list[list[list[mathopt.Variable]]] = [
            [[] for _ in value.states] for value in self.problem.values
        ]
        for op, options in zip(self.problem.ops, self.u, strict=True):
            for option, variable in zip(op.options, options, strict=True):
                for value, state in zip(op.results, option.option.results, strict=True):
                    given[value][self.problem.values[value].states.index(state)].append(variable)
        for produced, by_state in zip(self.problem.values, given, strict=True):
            if produced.state_class is not None:
                self.x.append(list(self.y[produced.state_class]))
            else:
                self.x.append([_Sum(variables) for variables in by_state])

    def move_values(self) -> None:
        """A value with one consumer needs no ``w``: it is ``z``."""
        consumers = self.consumers()
        for value, x, demands in zip(self.problem.values, self.x, consumers, strict=True):
            moves = {pair: self.model.add_variable(lb=0, ub=1) for pair in value.moves}
            self.z.append(moves)
            for demand in demands:
                taken = moves
                if len(demands) > 1:
                    taken = {
                        pair: self.model.add_variable(lb=0, ub=1)
                        for pair in value.moves
                        if pair[1] in demand
                    }
                    for pair, variable in taken.items():
                        self.model.add_linear_constraint(moves[pair] >= variable)
                self.take(value, x, demand, taken)

    def take(
        self,
        value: Value,
        x: Sequence[mathopt.LinearBase],
        demand: Mapping[int, Sequence[mathopt.Variable]],
        taken: Mapping[tuple[int, int], mathopt.Variable],
    ) -> None:
        """(4) and (5) for one consumer."""
        for target in range(len(value.demanded)):
            flow = [variable for (_, to), variable in taken.items() if to == target]
            if flow or target in demand:
                self.model.add_linear_constraint(_Sum(flow) == _Sum(demand.get(target, ())))
        for source in range(len(value.states)):
            flow = [variable for (at, _), variable in taken.items() if at == source]
            self.model.add_linear_constraint(_Sum(flow) == x[source])

    def consumers(self) -> list[list[dict[int, list[mathopt.Variable]]]]:
        """For each value, for each consumer, the choices that demand it in each state."""
        found: list[list[dict[int, list[mathopt.Variable]]]] = [[] for _ in self.problem.values]
        for op, options in zip(self.problem.ops, self.u, strict=True):
            for position, value in enumerate(op.operands):
                demanded = self.problem.values[value].demanded
                by_state: dict[int, list[mathopt.Variable]] = {}
                for option, variable in zip(op.options, options, strict=True):
                    state = demanded.index(option.option.operands[position])
                    by_state.setdefault(state, []).append(variable)
                found[value].append(by_state)
        for delivery in self.problem.deliveries:
            demanded = self.problem.values[delivery.value].demanded
            state_class = self.problem.classes[delivery.state_class]
            variables = self.y[delivery.state_class]
            found[delivery.value].append(
                {
                    demanded.index(state): [variable]
                    for state, variable in zip(state_class.states, variables, strict=True)
                }
            )
        return found

    def hold_tensors(self) -> None:
        self.h = [self.model.add_variable(lb=0, ub=1) for _ in self.problem.held]
        for op, options in zip(self.problem.ops, self.u, strict=True):
            keeping: dict[int, list[mathopt.Variable]] = {}
            for option, variable in zip(op.options, options, strict=True):
                for number in option.held:
                    keeping.setdefault(number, []).append(variable)
            for number, variables in keeping.items():
                moved = self.problem.held[number].moved
                kept = _Sum(variables)
                if moved is not None:
                    value, target = moved
                    states = self.problem.values[value].states
                    state = self.problem.values[value].demanded[target]
                    if state in states:  # kept as it is stored: no other copy
                        kept = kept - self.z[value][states.index(state), target]
                self.model.add_linear_constraint(self.h[number] >= kept)

    def limit_memory(self, limit: MemoryLimit) -> None:
        total = [
            MEGABYTES * limit.copies[held.kind] * held.num_bytes * variable
            for held, variable in zip(self.problem.held, self.h, strict=True)
            if limit.copies[held.kind]
        ]
        for state_class, variables, size in zip(
            self.problem.classes, self.y, limit.parameter_bytes, strict=True
        ):
            total += [
                MEGABYTES * size * numel * variable
                for numel, variable in zip(state_class.numel, variables, strict=True)
                if size
            ]
        self.model.add_linear_constraint(_Sum(total) <= MEGABYTES * limit.num_bytes)
