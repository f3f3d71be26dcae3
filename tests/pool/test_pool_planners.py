"""Every planner against the naive validator and the bound, on random problems and the sources' examples."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetero.pool as pool
import hetero.pool.placement as placement
from hetero.errors import ConfigError, PlanError
from hetero.pool import Buffer, Problem, Solution
from hetero.pool.reduction import clique_lives, pieces

GREEDY = ("smartpool", "smartpool-first-fit", "tflite", "xla", "skyline", "max-block", "binary-block", "ge")
# The example of GE's public account: five outputs A to E with the lives of its figure, made half-open.
GE_EXAMPLE = Problem.from_lives([(1, 3, 1024), (2, 5, 2048), (3, 5, 1024), (4, 6, 512), (5, 7, 4096)])

lives = st.tuples(st.integers(-3, 12), st.integers(1, 6), st.integers(0, 9)).map(
    lambda t: (t[0], t[0] + t[1], t[2])
)
problems = st.lists(lives, max_size=14).map(Problem.from_lives)
small_problems = st.lists(lives, max_size=6).map(Problem.from_lives)


def smallest_footprint(problem):
    """By trying every order with first fit: some order, offsets ascending, gives an optimal placement."""
    best = sum(b.nbytes for b in problem.buffers)
    for order in itertools.permutations(problem.buffers):
        placed = []
        for buffer in order:
            offset = 0
            for low, other in sorted(placed, key=lambda p: p[0]):
                alive = other.begin < buffer.end and buffer.begin < other.end
                if alive and low < offset + buffer.nbytes:
                    offset = max(offset, low + other.nbytes)
            placed.append((offset, buffer))
        best = min(best, max((low + b.nbytes for low, b in placed), default=0))
    return best


def generated(count, seed, horizon=200):
    """Nested and streaming lives as in training: activations long and nested, temporaries short."""
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, horizon, count)
    lengths = np.where(
        rng.random(count) < 0.3, 2 * np.maximum(1, horizon - begins), rng.integers(1, 8, count)
    )
    sizes = rng.choice([64, 256, 1000, 4096, 10_000], count)
    return Problem.from_lives(
        (int(b), int(b + n), int(s)) for b, n, s in zip(begins, lengths, sizes, strict=True)
    )


@pytest.mark.parametrize("planner", GREEDY)
@given(problem=problems)
@settings(deadline=None, max_examples=60)
def test_every_greedy_planner_is_valid_and_not_below_the_bound(planner, problem):
    solution = pool.plan(problem, planner)
    pool.validate(problem, solution)
    assert solution.footprint >= pool.lower_bound(problem)
    assert solution.planner == planner


@pytest.mark.parametrize("planner", ["random-keys", "hill-climb", "exact", "portfolio"])
@given(problem=problems)
@settings(deadline=None, max_examples=25)
def test_every_search_is_valid_and_no_worse_than_smartpool(planner, problem):
    solution = pool.solve(problem, planner, seconds=2.0)
    assert pool.lower_bound(problem) <= solution.footprint <= pool.plan(problem, "smartpool").footprint
    assert solution.planner == planner


@pytest.mark.parametrize("planner", [pool.exact, pool.portfolio])
@given(problem=small_problems)
@settings(deadline=None, max_examples=40)
def test_the_exact_search_finds_and_proves_the_smallest_footprint(planner, problem):
    solution = planner(problem, seconds=30.0)
    assert solution.footprint == smallest_footprint(problem)
    assert solution.proven_optimal


def test_an_optimum_above_the_bound_is_proven_by_exhaustion():
    # Loads are 5 at most, but no placement of these six fits into 5 bytes.
    problem = Problem.from_lives(
        [(0, 2, 2), (0, 1, 2), (1, 4, 2), (2, 5, 2), (4, 6, 2), (0, 6, 1), (3, 4, 1), (5, 6, 2)]
    )
    solution = pool.portfolio(problem, seconds=30.0)
    pool.validate(problem, solution)
    assert solution.proven_optimal


@pytest.mark.parametrize(
    ("planner", "footprint"), [("max-block", 6656), ("ge", 4608), ("binary-block", 7680), ("portfolio", 4608)]
)
def test_the_example_of_ge_gives_the_source_s_figures(planner, footprint):
    assert sum(b.nbytes for b in GE_EXAMPLE.buffers) == 8704
    assert pool.lower_bound(GE_EXAMPLE) == 4608
    solution = pool.plan(GE_EXAMPLE, planner)
    pool.validate(GE_EXAMPLE, solution)
    assert solution.footprint == footprint


def test_best_fit_takes_the_smallest_hole_and_first_fit_the_first():
    # Four walls leave holes of 3 bytes at 5 and of 2 bytes at 12 when the last buffer comes.
    problem = Problem.from_lives([(0, 2, 5), (0, 1, 4), (0, 2, 4), (1, 2, 2), (0, 2, 3)])
    best, first = pool.smartpool(problem), pool.smartpool_first_fit(problem)
    assert best.offsets[:3] == first.offsets[:3] == (0, 5, 9)
    # Buffer 3 lives in [1, 2): the hole of 4 bytes at 5, left by buffer 1.
    assert best.offsets[3] == first.offsets[3] == 5

    holes = Problem.from_lives([(0, 9, 9), (0, 1, 8), (0, 9, 7), (0, 1, 6), (0, 9, 5), (1, 9, 4)])
    assert pool.smartpool(holes).offsets == (0, 9, 17, 24, 30, 24)
    assert pool.smartpool_first_fit(holes).offsets == (0, 9, 17, 24, 30, 9)


@given(problem=problems)
@settings(deadline=None)
def test_max_block_footprint_is_the_sum_of_its_aligned_blocks(problem):
    solution = pool.max_block(problem)
    largest = {}
    for buffer, offset in zip(problem.buffers, solution.offsets, strict=True):
        largest[offset] = max(largest.get(offset, 0), buffer.nbytes)
    assert solution.footprint == sum(-(-size // 512) * 512 for size in largest.values())


@given(problem=problems)
@settings(deadline=None)
def test_the_lower_bound_is_the_peak_of_live_bytes(problem):
    peak = max(
        (sum(b.nbytes for b in problem.buffers if b.begin <= t < b.end) for t in range(-4, 20)), default=0
    )
    assert pool.lower_bound(problem) == peak


@given(problem=problems)
@settings(deadline=None)
def test_clique_lives_keep_who_overlaps_whom(problem):
    if len(problem) == 0:
        return
    begins, ends = clique_lives(problem.begins, problem.ends)
    assert (begins < ends).all()
    for (i, a), (j, b) in itertools.combinations(enumerate(problem.buffers), 2):
        together = a.begin < b.end and b.begin < a.end
        assert together == (begins[i] < ends[j] and begins[j] < ends[i])


@given(problem=problems)
@settings(deadline=None)
def test_pieces_cover_every_buffer_once_and_keep_the_bound(problem):
    offsets, parts = pieces(problem)
    members = np.concatenate([part.members for part in parts] or [np.array([], dtype=np.int64)])
    assert len(np.unique(members)) == len(members)
    settled = int((np.delete(offsets + problem.sizes, members)).max(initial=0))
    assert max([settled, *(part.base + part.bound for part in parts)]) == pool.lower_bound(problem)


def test_large_problems_are_placed_validly_by_every_greedy_planner():
    problem = generated(3000, seed=1, horizon=1500)
    for planner in GREEDY:
        solution = pool.plan(problem, planner)
        pool.validate(problem, solution)


def test_pure_numpy_and_compiled_placement_agree():
    problem = generated(400, seed=2)
    placer = placement.Placer(problem.begins, problem.ends, problem.sizes)
    rng = np.random.default_rng(0)
    for best_fit in (True, False):
        order = rng.permutation(len(problem))
        compiled = placer.place(order, best_fit=best_fit)
        plain = placement._place_with_numpy(
            placer.begins, placer.ends, placer.sizes, order, best_fit, placement.NO_LIMIT
        )
        assert compiled[1] == plain[1]
        assert (compiled[0] == plain[0]).all()
        assert placer.place(order, best_fit=best_fit, limit=compiled[1] - 1) is None
    order = rng.permutation(len(problem))
    compiled, footprint = placer.skyline(order)
    offsets = np.zeros(len(problem), dtype=np.int64)
    begins, ends, sizes = placer.begins[order], placer.ends[order], placer.sizes[order]
    assert placement._skyline_with_numpy(begins, ends, sizes, placement.NO_LIMIT, offsets) == footprint
    assert (compiled[order] == offsets).all()


@pytest.mark.parametrize("planner", ["exact", "portfolio"])
def test_sizes_near_the_end_of_the_integers_are_placed(planner):
    huge = 2**56
    problem = Problem.from_lives(
        [
            (b, e, size * huge)
            for b, e, size in [(0, 2, 2), (0, 1, 2), (1, 4, 2), (2, 5, 2), (4, 6, 2), (3, 4, 1)]
        ]
    )
    pool.validate(problem, pool.solve(problem, planner, seconds=1.0))


def test_lives_and_sizes_at_the_limits_are_placed_and_reported():
    problem = Problem.from_lives([(-(2**61), 2**61, 2**60), (0, 1, 2**61), (1, 2, 1)])
    report = pool.report(problem, seconds=0.1)
    assert {solution.footprint for solution in report.solutions} >= {report.bound_nbytes}
    assert all(row.reserved_nbytes >= report.bound_nbytes for row in report.allocators)


def tight(columns, height, cuts, seed):
    """Rectangles that fill ``columns`` moments by ``height`` bytes without a gap, cut by guillotine, shuffled."""
    rng = np.random.default_rng(seed)
    boxes = [(0, columns, 0, height)]
    while len(boxes) < cuts:
        begin, end, low, high = boxes.pop(int(np.argmax([(e - b) * (h - a) for b, e, a, h in boxes])))
        if end - begin > 1 and (rng.random() < 0.5 or high - low < 2):
            cut = int(rng.integers(begin + 1, end))
            boxes += [(begin, cut, low, high), (cut, end, low, high)]
        else:
            cut = int(rng.integers(low + 1, high))
            boxes += [(begin, end, low, cut), (begin, end, cut, high)]
    rng.shuffle(boxes)
    return Problem.from_lives([(int(b), int(e), int(h - a)) for b, e, a, h in boxes])


@pytest.mark.parametrize("seed", range(4))
def test_the_portfolio_packs_what_fits_without_a_gap(seed):
    # Every moment is full: any wasted byte shows. Best fit alone wastes some.
    problem = tight(columns=40, height=1000, cuts=60, seed=seed)
    solution = pool.portfolio(problem, seconds=60.0)
    pool.validate(problem, solution)
    assert solution.footprint == pool.lower_bound(problem) == 1000
    assert pool.smartpool(problem).footprint > 1000


def test_random_planners_repeat_themselves():
    problem = generated(300, seed=3)
    for planner in ("random-keys", "hill-climb"):
        assert pool.plan(problem, planner).offsets == pool.plan(problem, planner).offsets


def test_an_empty_problem_needs_no_memory():
    problem = Problem(buffers=())
    for planner in pool.planner_names():
        solution = pool.plan(problem, planner)
        pool.validate(problem, solution)
        assert (solution.footprint, solution.offsets) == (0, ())


def test_the_validator_names_the_first_overlapping_pair():
    problem = Problem.from_lives([(0, 2, 4), (1, 3, 4), (2, 4, 4)])
    solution = Solution(offsets=(0, 3, 0), footprint=7, planner="hand", seconds=0.0, proven_optimal=False)
    with pytest.raises(PlanError, match=r"buffers 0 \(bytes \[0, 4\).* and 1 \(bytes \[3, 7\)"):
        pool.validate(problem, solution)


@pytest.mark.parametrize(
    ("offsets", "footprint", "message"),
    [((0, 4), 9, "2 offsets for 3"), ((0, -4, 0), 9, "negative"), ((0, 4, 0), 7, "past the footprint of 7")],
)
def test_the_validator_refuses_what_is_no_placement(offsets, footprint, message):
    problem = Problem.from_lives([(0, 2, 4), (1, 3, 4), (2, 4, 4)])
    solution = Solution(
        offsets=offsets, footprint=footprint, planner="hand", seconds=0.0, proven_optimal=False
    )
    with pytest.raises(PlanError, match=message):
        pool.validate(problem, solution)


def test_bad_buffers_and_names_are_refused():
    with pytest.raises(PlanError, match="negative"):
        Buffer(id="a", begin=0, end=1, nbytes=-1)
    with pytest.raises(PlanError, match="empty"):
        Buffer(id="a", begin=1, end=1, nbytes=1)
    with pytest.raises(PlanError, match="twice"):
        Problem(buffers=(Buffer(id=1, begin=0, end=1, nbytes=1),) * 2)
    with pytest.raises(ConfigError, match=r"use one of .*smartpool"):
        pool.plan(GE_EXAMPLE, "none such")
    with pytest.raises(ConfigError, match="negative"):
        pool.portfolio(GE_EXAMPLE, seconds=-1.0)


def test_every_public_name_exists():
    assert all(hasattr(pool, name) for name in pool.__all__)
    assert all(hasattr(pool.allocators, name) for name in pool.allocators.__all__)
