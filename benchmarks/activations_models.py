"""Training ResNet50, GPT-2 and Llama where activations have to leave: hetero beside two ways that move all of them.

python -m benchmarks activations_models

The yardsticks are those of `benchmarks.swap_everything`: weights, gradients and optimizer states stay on the device,
every saved tensor leaves. hetero gets the peak of each as its budget, parameters and optimizer included, and its plan's
predicted step time is beside what was measured.

Needs the virtual accelerator, whose link is set such that what an unmanaged step keeps for backward would take as long
on it as a third of that step. Its operators run on the CPU, and compete for a few cores with the threads that copy, and
with the host's optimizer step, as no GPU's would; and from one minute to the next the same operators take up to a fifth
longer, which no prediction knows. So each block of the model is followed by a pause (`benchmarks.chain`): real
operators, on a device whose time is mostly not the processor's. All pauses of a step take ``--pauses`` times as
long together as its operators; 0: without.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.activation_ways import LATENCY, Job, lines, measure
from benchmarks.chain import Pause
from benchmarks.models import MODELS
from benchmarks.record import commit, median, read, write
from benchmarks.swap_everything import WAYS
from examples import cnn
from hetero.cli.placing import choose_device
from hetero.devices import virtual

_ROWS, _LENGTH, _VOCABULARY = 8, 64, 512


def _resnet50() -> nn.Module:
    network: nn.Module = cnn.resnet("resnet50")
    return network


def _image_loss(model: nn.Module, device: torch.device) -> Tensor:
    images, labels = torch.randn(2, 3, 32, 32).to(device), torch.randint(10, (2,)).to(device)
    return functional.cross_entropy(model(images), labels)


def _text_loss(model: nn.Module, device: torch.device) -> Tensor:
    tokens = torch.randint(_VOCABULARY, (_ROWS, _LENGTH)).to(device)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


_JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str]] = {
    "resnet50": (_resnet50, _image_loss, "Block"),
    "gpt2": (MODELS["GPT-2"][0], _text_loss, "GPT2Block"),
    "llama": (MODELS["Llama"][0], _text_loss, "LlamaDecoderLayer"),
}
"""Model, loss, and the class of the blocks that pause."""


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    device = choose_device(None)
    if device.type != "virtual":
        print(f"skipped: {device} has a link of its own, which cannot be set")
        return
    virtual.set_memory_limit("1GiB")
    # One model at a time may be measured anew: each row says of which commit it is.
    rows = {row["model"]: row for row in (read("activations_models") or {"results": []})["results"]}
    for name in arguments.models:
        row = _row(name, device, arguments)
        rows[name] = {"model": name, "commit": commit(), **row}
        print(f"{name}: {lines(row)}", flush=True)
        found = [rows[model] for model in _JOBS if model in rows]
        write("activations_models", {**vars(arguments), "latency": LATENCY}, found, device=device)


def _row(name: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    build, loss, block = _JOBS[name]

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)

    virtual.set_link(bandwidth="100GiB/s", latency=LATENCY)
    bare, _ = Job(device, build, loss, sgd).unmanaged(arguments.steps, WAYS["unmanaged"])

    def pausing() -> nn.Module:
        model = build()
        blocks = [module for module in model.modules() if type(module).__name__ == block]
        seconds = arguments.pauses * median(bare) / (3 * len(blocks))
        for module in blocks:
            if seconds > 0.0:
                module.register_forward_hook(_pause(seconds))
        return model

    job = Job(device, pausing, loss, sgd)
    trial, peak = job.unmanaged(arguments.steps, WAYS["unmanaged"])
    weights = sum(p.nbytes for p in build().parameters())
    bandwidth = max(peak - 3 * weights, weights) / (median(trial) / 3)
    virtual.set_link(bandwidth=bandwidth, latency=LATENCY)
    found = measure(job, rounds=arguments.rounds, steps=arguments.steps)
    facts = {"bandwidth": bandwidth, "pauses": arguments.pauses, "seconds_without_pauses": median(bare)}
    return {**facts, **found}


def _pause(seconds: float) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook after a block: ``seconds`` in forward, in backward twice as long."""

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (Pause.apply(output[0], seconds), *output[1:])
        return Pause.apply(output, seconds)

    return after


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(_JOBS), default=list(_JOBS))
    parser.add_argument(
        "--pauses", type=float, default=4.0, help="of all blocks, over the time of a step's operators"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="timed per round and way")
    return parser.parse_args()


if __name__ == "__main__":
    main()
