"""The gradients of parameters that live on the device take its memory while they are there, and no longer."""

import gc
from types import SimpleNamespace

import pytest
import torch
from accelerators import GAPS
from hypothesis import assume, given
from hypothesis import strategies as st
from loops import batch, mlp
from residents import managed_mlp
from residents import step as one_step
from torch import nn
from twins import adamw, assert_same, device, managed, unmanaged

import hetero
from hetero.eviction import Links, OnTheirWay, gradient_reserves, on_their_way
from hetero.msc import Period, PeriodTimes, Phase, Segment, SegmentKey
from hetero.msc.periods import HandedOver
from hetero.stm import Kind, Tier
from hetero.stm.gradients import kept
from hetero.stm.interception.parameter import is_managed, managed_of
from hetero.stm.plans.homechoice import HomeChoice
from hetero.stm.plans.rows import freed_once_made, home_gradients, sends_to_come

pytestmark = pytest.mark.usefixtures("homes_on_device")

STEPS = 10


def dropping(when, *, until=STEPS, then=None):
    """A loop that drops gradients ``when``; from step ``until`` on ``then``."""

    def loop(model, optimizer, target):
        seen = []
        for step in range(STEPS + 4):
            now = when if step < until else then or when
            for micro in range(2 if now == "after two" else 1):
                if now == "first":
                    optimizer.zero_grad()
                loss = model(batch(target)).square().mean()
                if now == "between" and micro == 0:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            if now in ("last", "after two"):
                optimizer.zero_grad()
            if now == "in place":
                optimizer.zero_grad(set_to_none=False)
            seen.append(loss.detach())
        return seen

    return loop


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(dropping("first"), id="before the forward"),
        pytest.param(dropping("between"), id="between forward and backward"),
        pytest.param(dropping("last"), id="after the step"),
        pytest.param(dropping("never"), id="never"),
        pytest.param(dropping("in place"), id="in place"),
        pytest.param(dropping("after two"), id="after two micro-batches"),
        pytest.param(dropping("last", until=6, then="between"), id="later than planned"),
        pytest.param(dropping("last", until=6, then="never"), id="no more"),
    ],
)
def test_wherever_the_loop_drops_gradients_the_budget_holds(loop, share):
    seen, state, peak = unmanaged(mlp, loop)
    got, got_state, manager = managed(mlp, loop, int(share * peak))  # asserts the budget
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    assert manager._stm.plans.device_homes


def scaled(scaler, model, optimizer):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


LOOKS = {
    "the scaler": lambda scaler, model, optimizer: None,
    "unscaled and clipped": scaled,
    "clipped by value": lambda s, model, o: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "a loss that is kept with its graph": lambda scaler, model, optimizer: None,
    "clipped twice": lambda s, model, o: [
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=order) for order in (2.0, 1.0)
    ],
}


@pytest.mark.parametrize("share", [0.646, 0.65])
@pytest.mark.parametrize("look", LOOKS)
def test_what_usual_loops_do_beside_sends_none_home(look, share):
    steps = []  # bytes of parameters at home, and bytes written so far

    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=4)
        seen, total = [], 0.0
        for _ in range(2 * STEPS):
            loss = model(batch(target)).square().mean()
            scaler.scale(loss).backward()
            if "kept" in look:
                total = total + loss
            LOOKS[look](scaler, model, optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            # Not on the device: 512 bytes more with each iteration would send one home as soon as they are wanting.
            seen.append(loss.detach().cpu())
            tensors = [managed_of(p) for p in model.parameters() if is_managed(p)]
            if tensors:
                at_home = sum(tensor.home.nbytes for tensor in tensors if not tensor.stays)
                steps.append((at_home, tensors[0].owner.collector.total.written_bytes))
        return seen

    seen, state, peak = unmanaged(mlp, loop)
    got, got_state, _ = managed(mlp, loop, int(share * peak))
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")
    (before, written), (at_home, then) = steps[-2:]
    assert 0 < before == at_home < sum(p.nbytes for p in mlp().parameters())
    assert then - written == at_home


@pytest.mark.parametrize("turn", [0, 1, 3, 7])
@pytest.mark.parametrize("when", ["changed", "cloned", "kept"])
def test_sent_home_in_the_middle_for_want_of_memory(monkeypatch, when, turn):
    """What makes a tensor is tried again after room was made, perhaps by this very gradient. Once it is kept, another
    may make room before autograd, which has a thread for what is at home, has taken it over."""
    owner = {
        "changed": (kept.KeptGradients, "_become"),
        "cloned": (kept, "owns_memory"),
        "kept": (kept.KeptGradients, "keep"),
    }[when]
    inner, turns = getattr(*owner), []

    def interrupted(*args, **keywords):
        if when == "changed" and args[2].gradient is args[3]:  # in place, which takes no memory
            return inner(*args)
        manager = managers[-1] if when == "cloned" else args[1].owner
        taken = inner(*args, **keywords) if when == "kept" else None
        turns.append(manager.plans.last is not None and bool(manager.plans.device_homes))
        if sum(turns) == turn + 1 and turns[-1]:
            manager.residency.room.send_home(1 << 60)
        return {"changed": lambda: inner(*args), "cloned": lambda: False, "kept": lambda: taken}[when]()

    def loop(model, optimizer, target):
        seen = []
        for _ in range(8):
            for micro in range(3):
                loss = model(batch(target)).square().mean()
                loss.backward()
                if micro == 1:
                    seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    managers = []
    seen, state, peak = unmanaged(mlp, loop)
    monkeypatch.setattr(*owner, interrupted)
    monkeypatch.setattr(kept._Kept, "owns", lambda self: self.is_ours)  # as if autograd still held all others
    monkeypatch.setattr(
        kept.KeptGradients,
        "takes",
        lambda self, tensor, takes=kept.KeptGradients.takes: (
            managers.append(tensor.owner) or takes(self, tensor)
        ),
    )
    got, got_state, _ = managed(mlp, loop, int(0.8 * peak))
    assert sum(turns) > turn
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("turn", [0, 1, 3, 7])
def test_sent_home_before_autograd_has_taken_it_over_it_is_what_the_queued_step_reads(
    monkeypatch, late_queue, turn, clips
):
    """With nobody in between who looks at it: in its memory at home there still is the one of an earlier iteration."""
    keep, turns, until_the_step = kept.KeptGradients.keep, [], []

    def interrupted(self, tensor, *args, **keywords):
        taken = keep(self, tensor, *args, **keywords)
        turns.append(bool(tensor.owner.plans.device_homes))
        if sum(turns) == turn + 1 and turns[-1]:
            freed = tensor.owner.residency.room.send_home(1 << 60)
            until_the_step.append(torch.empty(freed, dtype=torch.uint8, device=tensor.owner.device))
            assert not tensor.stays
            assert tensor in self
        return taken

    def loop(model, optimizer, target):
        seen = []
        for _ in range(10):
            loss = model(batch(target)).square().mean()
            loss.backward()
            if clips:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
            optimizer.step()
            until_the_step.clear()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    seen, state, peak = unmanaged(mlp, loop)
    monkeypatch.setattr(kept.KeptGradients, "keep", interrupted)
    got, got_state, _ = managed(mlp, loop, int(0.8 * peak))
    assert sum(turns) > turn
    assert_same(got, seen, "observed")
    assert_same(got_state, state, "state")


def test_a_forward_leaves_their_room_to_copies():
    def room(loop):
        _, _, peak = unmanaged(mlp, loop)
        _, _, manager = managed(mlp, loop, int(0.65 * peak))
        plan = manager._stm.plans.last
        forward, backward, step = plan.bounds[:3]
        assert plan.device_homes
        gradients = sum(manager._stm.tensors[index].device_nbytes for index in plan.device_homes)
        return [plan.home_bytes[at] for at in (forward, backward, step)], gradients

    (forward, backward, step), gradients = room(dropping("last"))
    assert forward == backward == step - gradients  # a backward begins with its operators' own
    (forward, backward, step), gradients = room(dropping("between"))
    assert forward == step == backward + gradients


def test_what_is_planned_for_is_what_there_is():
    target = device()
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    budget = torch.accelerator.memory_allocated() + (1 << 20)
    there = []
    with hetero.manage(model, optimizer, device=target, device_budget=budget) as manager:
        for _ in range(STEPS):
            loss = model(batch(target)).square().mean()
            after_forward = manager._stm.ledger.nbytes(Tier.DEVICE, Kind.GRADIENT)
            loss.backward()
            there.append((after_forward, len(manager._stm.gradients.kept)))
            torch.accelerator.synchronize()  # what is on its way home is there when the step looks
            optimizer.step()
            optimizer.zero_grad()
        homes = manager._stm.plans.device_homes
    assert homes
    assert there[-1] == (0, len(homes))


@pytest.mark.parametrize("held", [6.4, 7.4, 8.4, 9.4])
def test_what_has_landed_makes_room_where_no_more_gradients_go_home(held):
    """The first layers live on the device: at backward's end their gradients are made, and copies are renewed, in the
    memory of those before them, which were on their way home."""
    target = device(bandwidth="2GiB/s")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(12)])
    layer = model[0].weight.nbytes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    budget = torch.accelerator.memory_allocated() + int(held * layer)
    x = torch.randn(8, 256)
    with hetero.manage(model, optimizer, device=target, device_budget=budget, speculate=True) as manager:
        for _ in range(16):
            loss = model(x.to(target)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            optimizer.zero_grad()
            assert torch.accelerator.max_memory_allocated() <= budget + GAPS
        assert manager._stm.plans.device_homes


# -- the arithmetic ------------------------------------------------------------------------------------

INDICES = st.integers(0, 4)
SENDS = st.lists(st.tuples(INDICES, st.integers(1, 50), st.floats(0.0, 1.0)), max_size=3)


def period(sends):
    return Period(operands=(), sends=tuple(sends))


# What a period allocates: (None, bytes) for an operator's memory, (index, bytes) for a gradient; freed so many later.
MADE = st.tuples(st.none() | INDICES, st.integers(1, 50), st.integers(1, 3))


def in_use(made):
    """Bytes after each allocation."""
    return [
        sum(nbytes for at, (_, nbytes, alive) in enumerate(made[: now + 1]) if at + alive > now)
        for now in range(len(made))
    ]


def measured_period(made):
    """As the collector measures it, where each gradient goes home as soon as it is made."""
    used = in_use(made)
    gradients = [now for now, (index, _, _) in enumerate(made) if index is not None]
    handed_over = []
    for now, end in zip(gradients, [*gradients[1:], len(made) - 1], strict=False):
        index, nbytes, _ = made[now]
        more = sum(nbytes for _, nbytes, _ in made[now + 1 : end + 1])
        handed_over.append(HandedOver(index, nbytes, used[now] - nbytes + more))
    return Period(
        operands=(),
        non_model_bytes=max(used, default=0),
        sends=tuple((made[now][0], made[now][1], 0.0) for now in gradients),
        handed_over=handed_over,
    )


def peak_with(made, staying):
    """Of a period in which the first gradient of each of ``staying`` is freed no more."""
    firsts = {index: at for at, (index, _, _) in reversed(list(enumerate(made))) if index in staying}
    return max(
        in_use(
            [(i, n, len(made) if firsts.get(i) == at else alive) for at, (i, n, alive) in enumerate(made)]
        ),
        default=0,
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Phase),
            st.booleans(),
            st.lists(st.lists(MADE, max_size=5), min_size=1, max_size=4),
        ),
        max_size=4,
    )
)
def test_home_gradients_against_memory_counted_instant_by_instant(iteration):
    sizes = {index: 50 for index in range(4)}  # what the allocator takes for any of them
    measured = [
        [Segment(SegmentKey(phase, True, number), True, periods=[measured_period(made) for made in rows])]
        for number, (phase, _, rows) in enumerate(iteration)
    ]
    found = iter(home_gradients(measured, sizes, are_there=[there for _, there, _ in iteration]))
    seen = {index for _, _, rows in iteration for made in rows for index, _, _ in made}
    for phase, all_there, rows in iteration:
        there = {x for x in sizes if all_there or (phase is Phase.BACKWARD and x not in seen)}
        for made in rows:
            base = sum(sizes[x] for x in there)
            measured_peak = measured_period(made).non_model_bytes
            row = next(found)
            new = {index for index, _, _ in made if index in sizes} - there
            assert row + measured_peak >= base + peak_with(made, new)
            assert base <= row <= base + sum(sizes[x] for x in new)
            there |= new


def test_a_gradient_counts_once_in_the_period_that_makes_it():
    def row(*made):
        segment = Segment(SegmentKey(Phase.BACKWARD, True, 0), True, periods=[measured_period(made)])
        sizes = {index: 50 for index, _, _ in made if index is not None}
        return home_gradients([[segment]], sizes, are_there=[False])

    assert row((0, 50, 1)) == [0]  # the peak is the gradient itself
    assert row((0, 50, 1), (1, 50, 1)) == [50]  # the first, beside the second
    assert row((None, 80, 1), (0, 50, 1), (1, 50, 1)) == [20]
    assert row((0, 50, 1), (None, 80, 1)) == [50]


@given(st.lists(SENDS, max_size=8), st.frozensets(INDICES))
def test_sends_to_come_against_a_naive_look(rows, at_home):
    segment = Segment(SegmentKey(Phase.BACKWARD, True, 0), True, periods=[period(sends) for sends in rows])
    expected = [
        any(index in at_home for sends in rows[now:] for index, _, _ in sends) for now in range(len(rows))
    ]
    assert sends_to_come(segment, at_home) == expected


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), SENDS), max_size=8),
    st.sampled_from([1.0, 10.0, 1000.0]),
    st.sampled_from([0, 8, 20, 10**6]),
)
def test_on_their_way_against_a_naive_count(rows, bandwidth, most):
    links = Links(h2d_bandwidth=1.0, d2h_bandwidth=bandwidth, latency=0.0)
    rows = [
        (max([seconds, *(at for _, _, at in sends)]), sorted(sends, key=lambda s: s[2]))
        for seconds, sends in rows
    ]
    times = [PeriodTimes(seconds=seconds, sends=tuple(sends)) for seconds, sends in rows]
    at_home = frozenset({0, 1, 2})
    trips, looks, clock, free = [], [], 0.0, 0.0
    for seconds, sends in rows:
        looks.append([(clock, len(trips))])  # when, and how many have been made by then
        for index, nbytes, at in sends:
            if index in at_home:
                made = clock + at
                free = max(free, made) + 1.05 * nbytes / bandwidth
                trips.append((made, free, nbytes))
                # It may have to wait until enough of those before it, and perhaps itself, have arrived.
                instants = [made, *(arrives for _, arrives, _ in trips if arrives > made)]
                made, waited = next(
                    (now, now - made)
                    for now in instants
                    if sum(n for _, arrives, n in trips if arrives > now) <= most
                )
                clock += waited
                looks[-1].append((made, len(trips)))
        clock += seconds
    # Sums of the same times in another order differ in their last bits: whether one has landed is not a matter of them.
    instants = [now for looked in looks for now, _ in looked]
    assume(not any(0.0 < abs(arrives - now) < 1e-9 for _, arrives, _ in trips for now in instants))
    # As a period begins, and at each instant when one is made: those made before that have not arrived; and it.
    there = [
        [
            sum(n for at, arrives, n in trips[:made] if arrives > now or (at == now and place > 0))
            for place, (now, made) in enumerate(instants)
        ]
        for instants in looks
    ]
    assert on_their_way(times, links, at_home, most=most) == [
        OnTheirWay(nbytes[0], max(nbytes)) for nbytes in there
    ]


NONE, ALL = (0, 0), (9, 9)


@pytest.mark.parametrize(
    ("ways", "freed", "spare", "reserves"),
    [
        ([ALL, ALL, ALL, NONE], [0, 0, 0, 0], [50, 50, 50, 50], [(8, 8), (8, 8), (8, 8), NONE]),  # for two
        # For as many as there are at once.
        ([NONE, (0, 6), (6, 6), (2, 2)], [0, 0, 0, 0], [50, 50, 50, 50], [NONE, (6, 6), (6, 6), (2, 2)]),
        # Those that a period makes have their room.
        ([(0, 4), (4, 8), (4, 8), (4, 4)], [4, 4, 3, 0], [50, 50, 50, 50], [(0, 4), (4, 8), (5, 8), (4, 4)]),
        ([ALL, ALL, ALL, NONE], [4, 6, 1, 0], [50, 50, 50, 50], [(4, 8), (4, 10), (7, 8), NONE]),
        # No more than the fullest period leaves.
        ([ALL, ALL, ALL, NONE], [0, 0, 1, 0], [50, 5, 50, 50], [(5, 5), (5, 5), (5, 6), NONE]),
        ([ALL, NONE, ALL, ALL], [0, 0, 0, 0], [50, 50, 50, 2], [(8, 8), NONE, (8, 8), (2, 2)]),
        ([ALL, ALL, ALL, ALL], [0, 3, 0, 0], [-1, 50, 50, 50], [NONE, (0, 3), NONE, NONE]),
    ],
)
def test_room_for_gradients_of_four_bytes_on_their_way(ways, freed, spare, reserves):
    come = [True, True, True, False]
    rows = gradient_reserves(4, come=come, ways=[OnTheirWay(*way) for way in ways], freed=freed, spare=spare)
    assert rows == [OnTheirWay(*row) for row in reserves]


def test_room_for_gradients_on_their_way_where_none_are_made():
    ways = [OnTheirWay(3, 3)] * 2
    assert (
        gradient_reserves(4, come=[False, False], ways=ways, freed=[0, 0], spare=[50, 50])
        == [OnTheirWay(0, 0)] * 2
    )


HANDED_OVER = st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 12)), max_size=3)


@given(st.lists(st.tuples(st.integers(0, 10), HANDED_OVER), min_size=1, max_size=3), st.frozensets(INDICES))
def test_what_is_free_again_once_gradients_are_made(periods, at_home):
    """Of several samples of one period."""
    samples = []
    for peak, made in periods:
        one = period([(index, 1, 0.0) for index, _ in made])
        one.non_model_bytes = peak
        one.handed_over = [HandedOver(index, 1, beside) for index, beside in made]
        samples.append(Segment(SegmentKey(Phase.BACKWARD, True, 0), True, periods=[one]))
    freed = freed_once_made(samples, 0, at_home)
    most = max(peak for peak, _ in periods)
    afterwards = [min(beside, peak) for peak, made in periods for _, beside in made]
    if all(made and {index for index, _ in made} <= at_home for _, made in periods):
        assert max(afterwards) + freed == most
    else:
        assert freed == 0


def _living_bytes(manager):
    return sum(tensor.home.nbytes for tensor in manager._stm.tensors if tensor.stays)


def test_a_few_bytes_that_are_wanting_send_few_home():
    """They are the loop's own, which keeps more with each step until some have left."""
    model, optimizer, manager, target = managed_mlp(1300 << 10)
    kept, lived = [], []
    with manager:
        for _ in range(100):
            one_step(model, optimizer, target)
            lived.append(_living_bytes(manager))
            if lived[-1] < max(lived):
                break
            kept.append(torch.empty(512, device=target))
        assert lived[-1] < max(lived)
        for _ in range(3):
            one_step(model, optimizer, target)
        now = _living_bytes(manager)
    assert 0.7 * max(lived) < now < max(lived)


def test_of_what_had_to_leave_for_a_moment_no_more_than_half_stays_away():
    model, optimizer, manager, target = managed_mlp(1000 << 10)
    held, lived = [], []
    with manager:
        for number in range(40):
            one_step(model, optimizer, target)
            lived.append(_living_bytes(manager))
            if number == 20:
                held.append(torch.empty(100 << 8, device=target))
            elif number == 22:
                held.clear()
    assert lived[20] / 3 < min(lived[21:]) < lived[20]  # as far as whole parameters go


def test_all_may_be_tried_again_after_some_iterations_without_a_loss():
    budget = 1 << 20
    book = SimpleNamespace(
        budget=budget,
        last=SimpleNamespace(home_bytes=(0, 512 << 10)),
        device_homes=(),
        home_costs=dict,
        set_homes=lambda homes: None,
        is_verified=lambda keys: False,
        samples=SimpleNamespace(take_less=lambda: False),
    )
    choice, training = HomeChoice([], book), (SegmentKey(Phase.FORWARD, True, 0),)
    evaluation = (SegmentKey(Phase.FORWARD, False, 0),)
    for iterations in (32, 64, 128):
        choice.lose(1 << 10)
        choice.learn(training, [])
        for _ in range(iterations - 1):
            assert choice._most_bytes < 512 << 10
            choice.learn(training, [])
            for _ in range(3):  # which tell nothing
                choice.learn(evaluation, [])
        choice.learn(training, [])
        assert choice._most_bytes == budget


@given(
    there=st.integers(0, 1 << 40),
    left=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
)
def test_after_a_loss_between_half_and_nearly_all_stays_and_soon_no_more_than_half(there, left):
    choice = HomeChoice([], SimpleNamespace(budget=1 << 40, last=None))
    for times, share in enumerate(left, 1):
        choice.lose(max(1, int(share * there)))
        choice._failures.note()
        fewer = choice._fewer(there)
        assert there // 2 <= fewer <= there - there // 16
        assert fewer <= max(there - 2 * choice._lost_bytes, there - there // 2)
        assert times < 4 or fewer <= there - there // 2
        choice._lost_bytes, there = 0, fewer
