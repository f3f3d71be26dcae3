"""Optimizers around the managed one, whose step calls its step: Lookahead, sharpness-aware ones, a framework's own."""

import pytest
import torch
from loops import batch, mlp
from twins import adamw, assert_twins, device

import hetero


class Lookahead(torch.optim.Optimizer):
    """After every third step of ``inner``, half of the way back."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.slow, self.steps = inner, {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                slow = self.slow.setdefault(parameter, torch.zeros_like(parameter))
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)
        return loss


class Unmade(Lookahead):
    """As that of timm, without the base class's ``__init__``."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, {}, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow, self.steps = {}, 0


@pytest.mark.parametrize("share", [0.5, 0.8, 1.2])
@pytest.mark.parametrize("kind", [Lookahead, Unmade])
def test_what_its_step_steps_within_another_is_written_once(kind, share):
    def loop(model, optimizer, target):
        wrapper, seen = kind(optimizer), []
        for _ in range(13):
            loss = model(batch(target)).square().mean()
            loss.backward()
            wrapper.step()
            wrapper.zero_grad()
            seen.append(loss)
        return [*seen, *model.state_dict().values()]

    assert_twins(mlp, loop, share=share)


def test_a_wrapper_that_is_not_told_of_loading_is_refused():
    model = mlp(depth=1)
    with pytest.raises(hetero.ManageError, match="pass that one"):
        hetero.manage(model, Unmade(adamw(model)), device=device(), device_budget="1MiB")
