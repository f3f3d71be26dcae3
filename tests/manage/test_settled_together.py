"""Several models whose iterations go on at once: all settle where all fit, and else nobody passes the budget."""

import itertools

import pytest
from loops import batch, mlp
from several import sgd, twins, unmanaged_peak


def _step(optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _together(model_losses):
    sum(model_losses).backward()


def _first_made_first(model_losses):
    while model_losses:
        model_losses.pop(0).backward()


def _last_made_first(model_losses):
    while model_losses:
        model_losses.pop().backward()


def each_trained(backward, forwards, rows):
    """``forwards`` of each model before any backward."""

    def loop(models, optimizers, target):
        seen = []
        for _ in range(12):
            losses = [model(batch(target, rows)).square().mean() for _ in range(forwards) for model in models]
            seen += [loss.detach() for loss in losses]
            backward(losses)
            del losses
            _step(optimizers)
        return seen

    return loop


def one_after_the_other(forwards, rows):
    """Steps come in the end."""

    def loop(models, optimizers, target):
        seen = []
        for _ in range(12):
            for model in models:
                for _ in range(forwards):
                    loss = model(batch(target, rows)).square().mean()
                    loss.backward()
                    seen.append(loss.detach())
                    del loss
            _step(optimizers)
        return seen

    return loop


def pipeline(micro_batches, rows):
    """Parts of a model, each with what the one before it makes, whose gradients are handed on by hand."""

    def loop(models, optimizers, target):
        seen = []
        for _ in range(12):
            under_way = []
            for _ in range(micro_batches):
                given, made = batch(target, rows), []
                for model in models:
                    given = given.detach().requires_grad_()
                    result = model(given)
                    made.append((given, result))
                    given = result
                under_way.append(made)
            del given, made, result
            while under_way:
                made = under_way.pop(0)
                given, result = made.pop()
                loss = result.square().mean()
                seen.append(loss.detach())
                loss.backward()
                del loss, result
                while made:
                    gradient = given.grad
                    given, result = made.pop()
                    result.backward(gradient)
                    del result, gradient
                seen.append(given.grad)
                del given
            _step(optimizers)
        return seen

    return loop


def models_of(*depths):
    def build():
        models = [mlp(depth=depth) for depth in depths]
        return models, [sgd(model) for model in models]

    return build


BACKWARDS = [_together, _first_made_first, _last_made_first]
LOOPS = [
    *(
        pytest.param(each_trained(backward, forwards, rows), id=f"{backward.__name__[1:]}-{forwards}-{rows}")
        for backward, forwards, rows in itertools.product(BACKWARDS, [1, 2, 3], [4, 64])
    ),
    *(
        pytest.param(one_after_the_other(forwards, rows), id=f"in turn-{forwards}-{rows}")
        for forwards, rows in itertools.product([1, 2], [4, 64])
    ),
    *(pytest.param(pipeline(number, 64), id=f"pipeline-{number}") for number in (1, 2, 4)),
]


@pytest.mark.parametrize("depths", [(2, 3), (2, 2), (1, 2, 3)])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_does_not_fit_passes_no_budget(loop, depths):
    """Each by itself would fit beside what there is when its forward begins."""
    build = models_of(*depths)
    peak = unmanaged_peak(loop, build)
    for share in (0.85, 0.9, 0.97):
        twins(loop, build, int(share * peak))  # which looks at the peak


@pytest.mark.parametrize("depths", [(2, 3), (2, 2)])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_fits_settles(loop, depths):
    build = models_of(*depths)
    stats = twins(loop, build, int(1.3 * unmanaged_peak(loop, build)))
    assert all(each.settled_forwards > 0 for each in stats)


@pytest.mark.parametrize("depths", [(2, 3), (2, 2)])
def test_who_never_runs_keeps_nobody_from_settling(depths):
    """It is large, and at home."""
    together = each_trained(_together, 1, 4)

    def build():
        models, optimizers = models_of(*depths)()
        return [*models, mlp(depth=12)], [*optimizers, None]

    def loop(models, optimizers, target):
        return together(models[:-1], optimizers[:-1], target)

    peak = unmanaged_peak(together, models_of(*depths))
    stats = twins(loop, build, int(1.3 * peak))
    assert all(each.settled_forwards > 0 for each in stats[:-1])
