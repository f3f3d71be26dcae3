"""The plan lists what it reached beside what no schedule can go below, in bytes and in time."""

import torch
from blocks import ROWS, WIDTH, deep, steps
from twins import adamw, device, unmanaged

import hetero


def test_the_plan_reports_lower_bounds_of_time_beside_its_own():
    _, _, peak = unmanaged(deep, steps)
    target = device(bandwidth="1GiB/s")
    model = deep()
    optimizer = adamw(model)
    budget = torch.accelerator.memory_allocated() + int(0.3 * peak)
    with hetero.manage(model, optimizer, device=target, device_budget=budget, device_homes=False) as manager:
        for _ in range(6):
            model(torch.randn(ROWS, WIDTH).to(target)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = manager.plan
        assert plan is not None
        trace, links = (
            manager._stm.plans.last.trace,
            manager._stm.plans.timings.links(manager._stm.plans.last.keys),
        )
        bounds = plan.lower_bounds
        assert bounds.operators == sum(moment.seconds for moment in trace.moments) > 0.0
        # Sums of the same times in another order.
        assert bounds.operators * (1 - 1e-9) <= bounds.copies <= plan.predicted_seconds * (1 + 1e-9)
        gradients = [tensor.device_nbytes for tensor in manager._stm.tensors]
        assert bounds.gradients == sum(links.d2h_seconds(nbytes) for nbytes in gradients)
        # At the fastest that any byte was updated: no slower than on an average, as which the plan has it. If they are
        # the same, these are sums in another order as well.
        assert trace.updates is not None
        assert 0.0 < bounds.host_step <= sum(trace.updates.seconds) * (1 + 1e-9)
        assert sum(trace.updates.seconds) <= plan.predicted_seconds * (1 + 1e-9)
        assert bounds.seconds == max(bounds.operators, bounds.copies, bounds.gradients, bounds.host_step)
        assert "no faster than" in str(plan)
        assert plan.to_dict()["lower_bounds"]["operators"] == bounds.operators
