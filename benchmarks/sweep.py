"""A GPT of billions of parameters under budgets of 80 to 20 % of its unmanaged peak; unmanaged and FSDP2 beside it.

python -m benchmarks sweep                     # on an accelerator, within ten minutes; skips itself elsewhere
python -m benchmarks sweep --toy               # the same at toy size on the virtual accelerator; writes no result
python -m benchmarks sweep --layers 48 --width 2560 --batch 4

Smaller devices are emulated with ``device_budget``. Every way trains the same model from the same weights on the
same batches: float32 weights, AdamW (``fused=True``); hetero and FSDP2 (``fully_shard`` of every block and the
root, `CPUOffloadPolicy`, one process) step on the host, unmanaged on the device. Reported: seconds a step,
peak by the allocator's own counter, bytes moved, and the loss of every step.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

import hetero
from benchmarks.record import median, write
from hetero.cli.placing import choose_device
from hetero.devices import Accelerator, host_memory_free
from hetero.errors import HeteroError
from hetero.units import format_bytes

_VOCABULARY = 32_000
_TOY = {"layers": 4, "width": 128, "heads": 4, "length": 32, "batch": 2, "vocabulary": 512}
_SHARES = (0.8, 0.6, 0.4, 0.3, 0.2)
_WARM_UP = 3  # hetero measures, plans, and verifies its plan


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            # Recomputed in backward: without it activations, which hetero does not move, would fill small budgets.
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Sweep:
    """One model shape, run in different ways."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace) -> None:
        self.device = device
        self.accelerator = Accelerator(device)
        self._arguments = arguments
        torch.manual_seed(0)
        shape = (arguments.steps + _WARM_UP, arguments.batch, arguments.length + 1)
        self._batches = torch.randint(arguments.vocabulary, shape)

    def build(self) -> nn.Module:
        """The model on the host, initialised on the device, which is quicker; the same every time."""
        a = self._arguments
        with torch.device("meta"):
            model = GPT(
                layers=a.layers, width=a.width, heads=a.heads, length=a.length, vocabulary=a.vocabulary
            )
        model.to_empty(device="cpu")
        generator = torch.Generator(self.device if self.device.type != "virtual" else "cpu").manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                    continue
                fresh = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(fresh.normal_(std=0.02, generator=generator))
        return model

    def unmanaged(self) -> dict[str, Any]:
        model = self.build().to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type != "virtual")
        return {"way": "unmanaged", **self._train(model, optimizer)}

    def managed(self, budget: int, share: float) -> dict[str, Any]:
        model = self.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        begin = time.perf_counter()
        with hetero.manage(model, optimizer, device=self.device, device_budget=budget) as manager:
            attached = time.perf_counter() - begin
            facts = self._train(model, optimizer, lambda: _moved(manager))
            stats = manager.stats
            return {
                "way": "hetero",
                "share": share,
                "device_budget": budget,
                **facts,
                "peak_device_bytes": max(facts["peak_device_bytes"], stats.peak_device_bytes),
                "bytes_moved": median(facts["samples"]["bytes_moved"][_WARM_UP:]),
                "lower_bound_bytes": stats.lower_bound_bytes,
                "predicted_seconds": stats.predicted_seconds,
                "unplanned_fetches": stats.unplanned_fetches,
                "stall_seconds": stats.stall_seconds,
                "manage_seconds": attached,
            }

    def fsdp2(self) -> dict[str, Any]:
        """FSDP2 with everything offloaded, in one process: it gathers a block before it runs, frees it after."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(self.device.type)
        if backend is None:
            raise HeteroError(f"no communication backend for {self.device.type}")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(self.device.type, (1,))
            model = self.build()
            policy = CPUOffloadPolicy(pin_memory=True)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, offload_policy=policy)
            fully_shard(model, mesh=mesh, offload_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            return {"way": "FSDP2 CPUOffloadPolicy", **self._train(model, optimizer)}
        finally:
            torch.distributed.destroy_process_group()

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        moved_so_far: Callable[[], int] | None = None,
    ) -> dict[str, Any]:
        self.accelerator.synchronize()
        self.accelerator.reset_peak()
        seconds, step_seconds, losses, moved = [], [], [], []
        for batch in self._batches:
            before = moved_so_far() if moved_so_far else 0
            begin = time.perf_counter()
            inputs, targets = batch[:, :-1].to(self.device), batch[:, 1:].to(self.device)
            scores = model(inputs)
            loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            del scores
            loss.backward()
            losses.append(loss.item())
            self.accelerator.synchronize()
            stepped = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            self.accelerator.synchronize()
            step_seconds.append(time.perf_counter() - stepped)
            seconds.append(time.perf_counter() - begin)
            if moved_so_far:
                moved.append(moved_so_far() - before)
        return {
            "seconds": median(seconds[_WARM_UP:]),
            "optimizer_seconds": median(step_seconds[_WARM_UP:]),
            "peak_device_bytes": self.accelerator.peak_bytes(),
            "losses": losses,
            "samples": {"seconds": seconds, "optimizer_seconds": step_seconds, "bytes_moved": moved},
        }


def main() -> None:
    arguments = _parse()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and not arguments.toy:
        print("skipped: no accelerator on this machine (--toy runs it small on a virtual one)")
        return
    device = choose_device(None)
    torch.backends.cuda.matmul.allow_tf32 = True
    sweep = Sweep(device, arguments)
    parameters = sum(p.numel() for p in sweep.build().parameters())
    print(
        f"{parameters:,} parameters on {device}; {format_bytes(host_memory_free())} of host memory free",
        flush=True,
    )
    rows = _run(sweep, arguments.seconds)
    settings = {
        **vars(arguments),
        "parameters": parameters,
        "dtype": "float32 (TF32 matmul)",
        "shares": _SHARES,
    }
    if device.type != "virtual":
        write("sweep", settings, rows, device=device)


def _moved(manager: hetero.Manager) -> int:
    total = manager._stm.collector.total  # as in manager.stats, which does more than count
    return total.fetched_bytes + total.written_bytes


def _run(sweep: Sweep, seconds: float) -> list[dict[str, Any]]:
    """Everything that starts within ``seconds``; a way that fails is a row that says why."""
    begin = time.perf_counter()
    rows = [_attempt("unmanaged", sweep, sweep.unmanaged)]
    peak = rows[0].get("peak_device_bytes", sweep.accelerator.total_bytes())
    ways: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"hetero {share:.0%}", lambda share=share: sweep.managed(int(share * peak), share))
        for share in _SHARES
    ]
    # In the order of interest, should time run out.
    ways.insert(2, ("FSDP2", sweep.fsdp2))
    for name, run in ways:
        if time.perf_counter() - begin > seconds:
            print(f"{name}: not run, {seconds:.0f} s are over", flush=True)
            rows.append({"way": name, "error": "not run: out of time"})
            continue
        rows.append(_attempt(name, sweep, run))
    return rows


def _attempt(name: str, sweep: Sweep, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        row = run()
    except (
        HeteroError,
        RuntimeError,
        ValueError,
        ImportError,
    ) as error:  # an out-of-memory error is a RuntimeError
        row = {"way": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    gc.collect()
    if sweep.device.type == "cuda":
        torch.cuda.empty_cache()
    if "error" in row:
        print(f"{name}: {row['error']}", flush=True)
        return row
    line = (
        f"{name}: {row['seconds']:.3f} s a step ({row['optimizer_seconds']:.3f} s of it the optimizer), peak "
    )
    line += format_bytes(row["peak_device_bytes"])
    if "device_budget" in row:
        line += f" of {format_bytes(row['device_budget'])}, moved {format_bytes(row['bytes_moved'])}, "
        line += f"{row['bytes_moved'] / max(row['lower_bound_bytes'], 1):.3f} x the least, "
        line += f"{row['unplanned_fetches']} unplanned"
    print(f"{line} [{time.perf_counter() - begin:.0f} s]", flush=True)
    return row


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy size, on the virtual accelerator if need be")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=_VOCABULARY)
    parser.add_argument("--steps", type=int, default=5, help="timed, after three of warm-up")
    parser.add_argument("--seconds", type=float, default=480.0, help="start nothing new after this")
    arguments = parser.parse_args()
    if arguments.toy:
        vars(arguments).update(_TOY)
    return arguments


if __name__ == "__main__":
    main()
