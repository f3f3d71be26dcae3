"""Peaks of AOTAutograd's graphs in the given order, in Inductor's choice of orders and in ours.

    python -m benchmarks.reorder

Each network's forward and backward graphs are captured under fake tensors. ``given``: the peak of live bytes in
AOTAutograd's order; ``inductor``: the best of that, lpmf, bfs and dfs, the orders among which Inductor's
``reorder_for_peak_memory`` chooses, on the same graph; ``hetero``: the best of all rules; ``backend``: what
`hetero.trace.reorder_backend` takes, which for a backward must not be worse either should its inputs stay alive.
Inputs of the forward are kept by the caller; the backward gives back what was saved for it.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.record import write
from examples import cnn
from hetero.pool.reorder import inductor, reorder
from hetero.trace.reorder import dataflow_of
from hetero.units import format_bytes


def main() -> None:
    rows = []
    print(
        f"{'network':<12} {'graph':<9} {'operators':>9} {'given':>10} {'inductor':>9} {'hetero':>9} {'backend':>9}  by"
    )
    for name, make in networks().items():
        for row in compare(name, make):
            rows.append(row)
            print(
                f"{name:<12} {row['graph']:<9} {row['operators']:>9} {format_bytes(row['given']):>10} "
                f"{row['inductor'] / row['given']:9.4f} {row['hetero'] / row['given']:9.4f} "
                f"{row['backend'] / row['given']:9.4f}  "
                f"{row['rule']} ({row['seconds']:.1f} s)",
                flush=True,
            )
    write("reorder", {}, rows, device=None)


def compare(name: str, make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row a graph that one training step compiles."""
    rows: list[dict[str, Any]] = []

    def measuring(graph: str, *, inputs_kept: bool) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            flow = dataflow_of(module.graph, inputs_kept=inputs_kept)
            also = None if inputs_kept else dataflow_of(module.graph, inputs_kept=True)
            peer = inductor(flow)
            started = time.perf_counter()
            ours = reorder(flow)
            seconds = time.perf_counter() - started
            rows.append(
                {
                    "network": name,
                    "graph": graph,
                    "operators": len(flow),
                    "given": ours.given_nbytes,
                    "inductor": peer.peak_nbytes,
                    "inductor_rule": peer.rule,
                    "hetero": ours.peak_nbytes,
                    "rule": ours.rule,
                    "backend": reorder(flow, also=also).peak_nbytes,
                    "seconds": seconds,
                }
            )
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=measuring("forward", inputs_kept=True),
        bw_compiler=measuring("backward", inputs_kept=False),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compiler.reset()
    torch.manual_seed(0)
    model, inputs = make()
    made = torch.compile(model, backend=backend)(**inputs)
    loss = made.loss if hasattr(made, "loss") else made.square().mean()
    loss.backward()
    return rows


def networks() -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    """Small enough to be run, as compiling does: a CPU computes each once."""
    found: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {}
    for name in ("vgg16", "resnet18", "resnet50"):
        found[name] = partial(_network, name)
    for name, (build, config) in transformer_configs().items():
        found[name] = partial(_transformer, build, config)
    return found


def _network(name: str) -> tuple[nn.Module, dict[str, Any]]:
    build = cnn.vgg if name in cnn.VGG_LAYERS else cnn.resnet
    return build(name), {"input": torch.randn(4, 3, 32, 32)}


def _transformer(build: Callable[[Any], nn.Module], config: object) -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.zeros(2, 128, dtype=torch.long)
    return build(config), {"input_ids": tokens, "labels": tokens}


def transformer_configs() -> dict[str, tuple[Callable[[Any], nn.Module], Any]]:
    gpt2 = transformers.GPT2Config(n_layer=6, n_embd=256, n_head=8, vocab_size=4096)
    llama = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8, vocab_size=4096
    )
    bert = transformers.BertConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8, vocab_size=4096
    )
    return {
        "gpt2": (transformers.GPT2LMHeadModel, gpt2),
        "llama": (transformers.LlamaForCausalLM, llama),
        "bert": (transformers.BertForMaskedLM, bert),
    }


if __name__ == "__main__":
    main()
