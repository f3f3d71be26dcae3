"""HOLD, COMPUTE, FREE, and the count of bytes, against a model of them that recounts from the beginning each time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import hetero
from hetero.stm import Kind, Ledger, State, StatefulTensor, Tier
from hetero.stm.tensors.state import begin_compute, end_compute

_COUNT = 4
_WHICH = st.integers(0, _COUNT - 1)
# What may follow what, written down once more.
_ALLOWED = {
    (State.FREE, State.HOLD),
    (State.HOLD, State.FREE),
    (State.HOLD, State.COMPUTE),
    (State.COMPUTE, State.HOLD),
}


class States(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.kinds = [Kind.PARAMETER, Kind.PARAMETER, Kind.ACTIVATION, Kind.GRADIENT]
        self.tensors = [StatefulTensor(self.ledger, kind, f"{i}") for i, kind in enumerate(self.kinds)]
        self.bytes = [{tier: 0 for tier in Tier} for _ in range(_COUNT)]
        self.states = [State.FREE] * _COUNT
        self.using: list[list[int]] = []  # operators that run, by what they use

    def users(self, which: int) -> int:
        return sum(operator.count(which) for operator in self.using)

    @rule(which=_WHICH, tier=st.sampled_from(Tier), nbytes=st.integers(0, 1 << 40))
    def place(self, which: int, tier: Tier, nbytes: int) -> None:
        self.tensors[which].place(tier, nbytes)
        self.bytes[which][tier] = nbytes
        if nbytes and self.states[which] is State.FREE:
            self.states[which] = State.HOLD

    @rule(which=_WHICH)
    def release(self, which: int) -> None:
        if self.users(which):
            with pytest.raises(hetero.StateError, match=f"{which}: COMPUTE -> FREE"):
                self.tensors[which].release()
        else:
            self.tensors[which].release()
            self.bytes[which] = {tier: 0 for tier in Tier}
            self.states[which] = State.FREE

    @rule(operands=st.lists(_WHICH, max_size=_COUNT, unique=True))
    def begin(self, operands: list[int]) -> None:
        operands = [which for which in operands if self.states[which] is not State.FREE]
        begin_compute(self.tensors[which] for which in operands)
        self.using.append(operands)
        for which in operands:
            self.states[which] = State.COMPUTE

    @precondition(lambda self: self.using)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        operands = self.using.pop(data.draw(st.integers(0, len(self.using) - 1)))
        end_compute(self.tensors[which] for which in operands)
        for which in operands:
            if not self.users(which):
                self.states[which] = State.HOLD

    @rule()
    def interrupt(self) -> None:
        for tensor in self.tensors:
            tensor.abandon_compute()
        self.using.clear()
        self.states = [State.HOLD if state is State.COMPUTE else state for state in self.states]

    @rule(which=_WHICH, new=st.sampled_from(State))
    def change(self, which: int, new: State) -> None:
        """By hand; only where content and operators, of which the table knows nothing, agree with it."""
        if (self.states[which], new) not in _ALLOWED:
            with pytest.raises(hetero.StateError, match=f"{which}: .* is not allowed"):
                self.tensors[which].transition(new)
        elif new is State.HOLD and self.states[which] is State.FREE:  # of a tensor without bytes
            self.tensors[which].transition(new)
            self.states[which] = new

    @precondition(lambda self: not all(map(self.users, range(_COUNT))))
    @rule(which=_WHICH)
    def end_what_nobody_began(self, which: int) -> None:
        if not self.users(which):
            with pytest.raises(hetero.StateError, match="without begin_compute"):
                end_compute([self.tensors[which]])

    @rule(which=_WHICH)
    def begin_what_is_free(self, which: int) -> None:
        if self.states[which] is State.FREE:
            with pytest.raises(hetero.StateError, match="FREE -> COMPUTE"):
                begin_compute([self.tensors[which]])

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        assert [tensor.state for tensor in self.tensors] == self.states
        assert [tensor.users for tensor in self.tensors] == [self.users(which) for which in range(_COUNT)]

    @invariant()
    def every_count_is_a_sum_over_tensors(self) -> None:
        for tier in Tier:
            assert self.ledger.nbytes(tier) == sum(nbytes[tier] for nbytes in self.bytes)
            for kind in Kind:
                assert self.ledger.nbytes(tier, kind) == sum(
                    nbytes[tier] for nbytes, of in zip(self.bytes, self.kinds, strict=True) if of is kind
                )
        assert self.ledger.device_bytes == self.ledger.nbytes(Tier.DEVICE)
        assert self.ledger.host_bytes == self.ledger.nbytes(Tier.HOST)


TestStates = States.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=30)
