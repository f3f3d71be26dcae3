"""Training ResNet50, GPT-2 and Llama where activations have to leave: hetero beside two ways that move all of them.

python -m benchmarks activations_models

The yardsticks are those of `benchmarks.swap_everything`: weights, gradients and optimizer states stay on the device,
every saved tensor leaves. hetero gets the peak of each as its budget, parameters and optimizer included, and its plan's
predicted step time is beside what was measured.

Needs the virtual accelerator, whose link is set such that what an unmanaged step keeps for backward would take as long
on it as a third of that step. Its operators run on the CPU, and compete for two or more of its cores with the threads
that copy, and with the host's optimizer step, as no GPU's would: one core fewer is left to each, caches are shared, and
an own time that was measured beside one schedule's copies is not quite that beside another's. What the machine itself
varies by is seen in the unmanaged steps, which are timed in turns with the others. On the chain of
`benchmarks.activations`, whose compute is a pause, none of this matters.
"""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import hetero
from benchmarks.activations import timed
from benchmarks.allocators import load_cnn
from benchmarks.record import median, write
from benchmarks.swap_everything import WAYS, Around
from hetero.cli.placing import choose_device
from hetero.devices import virtual

_LATENCY = 10e-6
_WARM_UP = 10  # measured, planned, timed, planned again
_VOCABULARY = 1024


class Job:
    """One model and how it is trained; the same weights and batches every time."""

    def __init__(
        self, device: torch.device, build: Callable[[], nn.Module], loss: Callable[..., Tensor]
    ) -> None:
        self.device = device
        self.build = build
        self.loss = loss

    def start(self) -> None:
        torch.manual_seed(0)
        self.model = self.build()

    def optimize(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, foreach=False)

    def step(self, around: Around) -> None:
        with around():
            loss = self.loss(self.model, self.device)
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unmanaged(
        self, steps: int, way: Callable[[torch.device, nn.Module], Around]
    ) -> tuple[list[float], int]:
        """Seconds of each step, and the peak above what was in use before."""
        before = torch.accelerator.memory_allocated()
        self.start()
        self.model.to(self.device)
        self.optimize()
        around = way(self.device, self.model)
        self.step(around)
        torch.accelerator.reset_peak_memory_stats()
        seconds = timed(lambda: self.step(around), steps)
        peak = torch.accelerator.max_memory_allocated() - before
        del self.model, self.optimizer
        return seconds, peak

    def managed(self, steps: int, budget: int) -> tuple[list[float], dict[str, Any]]:
        before = torch.accelerator.memory_allocated()
        self.start()
        self.optimize()
        torch.accelerator.reset_peak_memory_stats()
        with hetero.manage(
            self.model, self.optimizer, device=self.device, device_budget=before + budget
        ) as manager:
            for _ in range(_WARM_UP):
                self.step(contextlib.nullcontext)
            began = manager.stats
            seconds = timed(lambda: self.step(contextlib.nullcontext), steps)
            ended = manager.stats
            peak = torch.accelerator.max_memory_allocated() - before
            assert peak <= budget
            plan = manager.plan
            assert plan is not None
            facts = {
                "peak_bytes": peak,
                "activation_out_bytes": (ended.activation_out_bytes - began.activation_out_bytes) / steps,
                "fetched_bytes": (ended.total_fetched_bytes - began.total_fetched_bytes) / steps,
                "lives_on_device": len(plan.lives_on_device),
                "predicted_seconds": plan.predicted_seconds,
                "measured_over_predicted": median(seconds) / plan.predicted_seconds,
            }
        del self.model, self.optimizer
        return seconds, facts


def _resnet50() -> nn.Module:
    network: nn.Module = load_cnn().resnet("resnet50")
    return network


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=256,
        n_layer=8,
        n_head=8,
        vocab_size=_VOCABULARY,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
    )
    return transformers.LlamaForCausalLM(config)


def _image_loss(model: nn.Module, device: torch.device) -> Tensor:
    images, labels = torch.randn(2, 3, 32, 32).to(device), torch.randint(10, (2,)).to(device)
    return functional.cross_entropy(model(images), labels)


def _text_loss(model: nn.Module, device: torch.device) -> Tensor:
    tokens = torch.randint(_VOCABULARY, (4, 128)).to(device)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


_MODELS = {
    "resnet50": (_resnet50, _image_loss),
    "gpt2": (_gpt2, _text_loss),
    "llama": (_llama, _text_loss),
}


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    device = choose_device(None)
    if device.type != "virtual":
        print(f"skipped: {device} has a link of its own, which cannot be set")
        return
    virtual.set_memory_limit("1GiB")
    rows = []
    for name in arguments.models:
        job = Job(device, *_MODELS[name])
        row = _measure(job, arguments)
        rows.append({"model": name, **row})
        ways = ", ".join(f"{way} {seconds:.3f} s" for way, seconds in row["medians"].items())
        print(f"{name}: {ways}", flush=True)
        for way, facts in row["facts"].items():
            print(
                f"  {way}: measured / predicted {[round(f['measured_over_predicted'], 3) for f in facts]}",
                flush=True,
            )
    write("activations_models", {**vars(arguments), "latency": _LATENCY}, rows, device=device)


def _measure(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    virtual.set_link(bandwidth="100GiB/s", latency=_LATENCY)
    trial, peak = job.unmanaged(arguments.steps, WAYS["unmanaged"])
    weights = sum(p.nbytes for p in job.build().parameters())
    bandwidth = max(peak - 3 * weights, weights) / (median(trial) / 3)
    virtual.set_link(bandwidth=bandwidth, latency=_LATENCY)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    facts: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name, way in WAYS.items():
            times, peak = job.unmanaged(arguments.steps, way)
            seconds.setdefault(name, []).extend(times)
            peaks.setdefault(name, peak)
            if name == "unmanaged":
                continue
            times, fact = job.managed(arguments.steps, peaks[name])
            seconds.setdefault(f"hetero_at_{name}", []).extend(times)
            facts.setdefault(f"hetero_at_{name}", []).append(fact)
    return {
        "bandwidth": bandwidth,
        "medians": {way: median(times) for way, times in seconds.items()},
        "spread": {way: [min(times), max(times)] for way, times in seconds.items()},
        "peak_bytes": peaks,
        "facts": facts,
        "seconds": seconds,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(_MODELS), default=list(_MODELS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed per round and way")
    return parser.parse_args()


if __name__ == "__main__":
    main()
