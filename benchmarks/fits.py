"""A step of a model that fits: managed under half as much again as its unmanaged peak, beside unmanaged.

python -m benchmarks fits                      # the sweep's GPT on an accelerator, where there is room for two of them
python -m benchmarks fits --model resnet50 --batch 64
python -m benchmarks fits --toy                # on the virtual accelerator: shows that it runs, not how fast

Both train the same model from the same weights, in one process, step by step in turns; by then nothing is intercepted
any more, and all lives on the device.
"""

import argparse
import itertools
import sys
from collections.abc import Callable

import torch
from torch import nn

import hetero
from benchmarks.record import Samples, interleaved, median, write
from benchmarks.sweep_models import (
    Settings,
    adamw,
    add_model_arguments,
    batches,
    build,
    loss_of,
    model_settings,
)
from benchmarks.sweep_ways import WARM_UP
from hetero.cli.placing import choose_device
from hetero.devices import Accelerator

_SHARE = 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_model_arguments(parser)
    parser.set_defaults(steps=25, exact=False)
    arguments = parser.parse_args()
    if torch.accelerator.current_accelerator(check_available=True) is None and not arguments.toy:
        print("skipped: no accelerator on this machine (--toy runs it small on a virtual one)")
        return 0
    settings = model_settings(arguments)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = choose_device(None)
    peak, samples = _measure(settings, device)
    seconds = {way: median(clocks["seconds"]) for way, clocks in samples.items()}
    ratio = seconds["managed"] / seconds["unmanaged"]
    print(
        f"unmanaged {seconds['unmanaged'] * 1e3:.2f} ms, managed {seconds['managed'] * 1e3:.2f} ms: x {ratio:.4f}"
    )
    if device.type != "virtual":
        result = {
            "unmanaged_peak_bytes": peak,
            "seconds": seconds,
            "step_ratio": ratio,
            "samples": samples,
        }
        write(f"fits_{settings['model']}", {**settings, "share": _SHARE}, result, device=device)
    return 0


def _measure(settings: Settings, device: torch.device) -> tuple[int, Samples]:
    """The unmanaged run's peak, and the timed steps."""
    accelerator = Accelerator(device)
    accelerator.reset_peak()
    model = build(settings, device).to(device)
    plain = _stepper(settings, device, model, adamw(settings, model, device))
    for _ in range(WARM_UP):
        plain()
    peak = accelerator.peak_bytes()
    model = build(settings, device)
    optimizer = adamw(settings, model, torch.device("cpu"))
    budget = int(_SHARE * peak) + accelerator.used_bytes()  # the other one's is in use, too
    with hetero.manage(model, optimizer, device=device, device_budget=budget) as manager:
        managed = _stepper(settings, device, model, optimizer)
        for _ in range(WARM_UP):
            managed()
        assert manager.stats.settled_forwards, "warm-up was too short: it has not settled"
        samples = interleaved({"unmanaged": plain, "managed": managed}, repeats=settings["steps"])
    return peak, samples


def _stepper(
    settings: Settings, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """A function that trains one step and waits for its end."""
    batch = batches(settings, WARM_UP + settings["steps"])
    numbers = itertools.count()

    def step() -> None:
        inputs, targets = (tensor.to(device) for tensor in batch(next(numbers)))
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize(device)

    return step


if __name__ == "__main__":
    sys.exit(main())
