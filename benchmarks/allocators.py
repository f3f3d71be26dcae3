"""What TensorFlow's and PyTorch's allocators reserve and hand out in first and later training iterations.

    python -m benchmarks.allocators [NAME ...]

The analysis of Lee et al. (TensorFlow 1.6, tf_cnn_benchmarks, V100, 20 iterations), repeated by simulation: four
iterations of each network are traced under fake tensors and fed to the simulated allocators. T: bytes requested, C:
bytes handed out, each at the peak of the first (1) and of the later (2) iterations, as shares of what is
reserved. CNNs train with plain SGD, tf_cnn_benchmarks' default, the transformers with AdamW.

What only a first iteration does is traced with it: the weights are loaded from a checkpoint on the device, and each
convolution also tries the explicit-GEMM algorithm, as autotuners do, whose workspace is its unfolded input. The
paper says that the first iteration differs, not why; how much it differs here follows from this choice.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from benchmarks.record import write
from examples import cnn
from hetero.pool.allocators import (
    Allocator,
    BfcAllocator,
    CachingSettings,
    CudaCachingAllocator,
    IterationAnalysis,
    analyse_iterations,
    simulate,
)
from hetero.trace import allocation_events, trace_recipe
from hetero.units import format_bytes

ITERATIONS = 4
Recipe = Callable[[], tuple[Any, ...]]

ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "tensorflow bfc": BfcAllocator,
    "pytorch": CudaCachingAllocator,
    "pytorch, expandable segments": lambda: CudaCachingAllocator(CachingSettings(expandable_segments=True)),
}
# The four findings of the paper, as it words them in figures.
PAPER = {
    "C1 (share of reserved)": "68.7 % on average",
    "T1 to C1 (wasted in chunks)": "7.5 % on average, 31.4 % at most",
    "C1 over C2 (first over later)": "25.8 % on average, 82.8 % at most (AlexNet)",
    "idle later (1 - C2)": "45.4 % on average",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(networks())}; default: all")
    arguments = parser.parse_args()
    chosen = {name: recipe for name, recipe in networks().items() if name in (arguments.names or networks())}
    rows = []
    print(f"{'network':<10} {'allocator':<28} {'reserved':>9}    T1    C1    T2    C2  first over later")
    for name, recipe in chosen.items():
        for allocator, analysis in analyse(recipe).items():
            rows.append({"network": name, "allocator": allocator, **asdict(analysis)})
            print(format_row(name, allocator, analysis), flush=True)
    bfc = [row for row in rows if row["allocator"] == "tensorflow bfc"]
    summary = summarise(bfc)
    for finding, value in summary.items():
        print(f"{finding:<30} here {value:<50} paper {PAPER[finding]}")
    result = {"rows": rows, "summary": summary, "paper": PAPER}
    path = write("allocators", {"iterations": ITERATIONS}, result, device=None)
    path.with_suffix(".md").write_text(as_markdown(bfc, summary))


def analyse(recipe: Recipe) -> dict[str, IterationAnalysis]:
    """Each allocator's figures for `ITERATIONS` iterations of ``recipe`` from a cold start."""
    events = allocation_events(trace_recipe(cold_start(recipe), warmup=0))
    return {name: analyse_iterations(simulate(events, make())) for name, make in ALLOCATORS.items()}


def cold_start(recipe: Recipe) -> Recipe:
    """A recipe whose step is the whole beginning of a training: loading, a first iteration, later ones."""

    def make() -> tuple[Any, ...]:
        step, model, optimizer, *batch = recipe()

        def train(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> None:
            model.load_state_dict({name: torch.empty_like(t) for name, t in model.state_dict().items()})
            convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
            hooks = [convolution.register_forward_pre_hook(try_gemm) for convolution in convolutions]
            for _ in range(ITERATIONS):
                step(model, optimizer, *batch)
                while hooks:
                    hooks.pop().remove()

        return train, model, optimizer, *batch

    return make


def try_gemm(convolution: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Allocate and drop the workspace of a convolution by explicit matrix multiplication."""
    assert isinstance(convolution, nn.Conv2d)
    assert not isinstance(convolution.padding, str)
    functional.unfold(
        inputs[0].detach(),
        convolution.kernel_size,
        padding=convolution.padding,
        stride=convolution.stride,
    )


def networks() -> dict[str, Recipe]:
    """Every network's recipe: CNNs at tf_cnn_benchmarks' default batch sizes, on the images that ours take."""
    recipes: dict[str, Recipe] = {"alexnet": convolutional("alexnet", 512)}
    for name in (*cnn.VGG_LAYERS, *cnn.RESNET_BLOCKS):
        recipes[name] = convolutional(name, 64)
    recipes["gpt2"] = language_model(transformers.GPT2LMHeadModel, transformers.GPT2Config(), (4, 1024))
    # TinyLlama's shape.
    llama = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4
    )
    recipes["llama"] = language_model(transformers.LlamaForCausalLM, llama, (1, 2048))
    return recipes


def convolutional(name: str, batch: int) -> Recipe:
    def recipe() -> tuple[Any, ...]:
        step, model, _, images, labels = cnn.recipe(name, batch=batch)
        return step, model, torch.optim.SGD(model.parameters(), lr=0.01), images, labels

    return recipe


def language_model(build: Callable[[Any], nn.Module], config: Any, shape: tuple[int, int]) -> Recipe:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def recipe() -> tuple[Any, ...]:
        model = build(config)
        return step, model, torch.optim.AdamW(model.parameters()), torch.zeros(shape, dtype=torch.long)

    return recipe


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The four findings over the BFC rows, in the words of `PAPER`."""

    def share(key: str) -> list[float]:
        return [row[key] for row in rows]

    def mean(values: list[float]) -> str:
        return f"{100 * sum(values) / len(values):.1f} %"

    def most(key: str) -> str:
        row = max(rows, key=lambda row: row[key])
        return f"{100 * row[key]:.1f} % at most ({row['network']})"

    return {
        "C1 (share of reserved)": f"{mean(share('c1'))} on average",
        "T1 to C1 (wasted in chunks)": f"{mean(share('waste_first'))} on average, {most('waste_first')}",
        "C1 over C2 (first over later)": (
            f"{mean(share('first_over_later'))} on average, {most('first_over_later')}"
        ),
        "idle later (1 - C2)": f"{mean(share('idle_later'))} on average",
    }


def format_row(name: str, allocator: str, row: IterationAnalysis) -> str:
    return (
        f"{name:<10} {allocator:<28} {format_bytes(row.reserved_nbytes):>9} {row.t1:5.3f} {row.c1:5.3f} "
        f"{row.t2:5.3f} {row.c2:5.3f} {100 * row.first_over_later:+8.1f} %"
    )


def as_markdown(rows: Sequence[dict[str, Any]], summary: dict[str, str]) -> str:
    lines = [
        "| network | reserved | T1 | C1 | T2 | C2 | C1 over C2 | idle later |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = " | ".join(f"{100 * row[key]:.1f} %" for key in ("t1", "c1", "t2", "c2"))
        ends = f"{100 * row['first_over_later']:+.1f} % | {100 * row['idle_later']:.1f} %"
        lines.append(f"| {row['network']} | {format_bytes(row['reserved_nbytes'])} | {shares} | {ends} |")
    lines += ["", "| finding | here | paper |", "|---|---|---|"]
    lines += [f"| {finding} | {value} | {PAPER[finding]} |" for finding, value in summary.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
