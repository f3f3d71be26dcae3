"""Bytes a second of the optimizer's step on the host, against the memory's own speed.

python -m benchmarks host_bandwidth

In one process, in turns, for each optimizer: torch's default on a CPU (its for-loop), ``fused=True`` where it is
offered, and hetero's queue with the optimizer as the user made it, nothing given. Beside them a copy and a triad
(``a = b + 2 c``) of as many bytes, as the STREAM benchmark has them. Bytes are those that any implementation has to
read or write once: parameter, gradient and states; not temporaries, nor the cache lines that a write fetches first.
As with STREAM, the quickest run of each is its rate; medians are kept beside it.

Two models of equal size are stepped: a few large tensors, and many small ones.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.record import interleaved, median, write
from hetero.stm.deferred import Batch, Update, UpdateQueue
from hetero.stm.updates.captured import ParameterUpdate, run_together
from hetero.stm.updates.kernels import is_open, takes_fused
from hetero.stm.updates.optimizers import hyper_parameters, make_shell

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    # With how many numbers are read or written for each of the parameter's.
    "SGD": (torch.optim.SGD, {"lr": 1e-6}, 3),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}, 5),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-6}, 5),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-6}, 7),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-6}, 5),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-6}, 7),
}
_FUSED = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW)


def main() -> None:
    arguments = _parse()
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rows.append({"threads": threads, "memory": _memory(arguments)})
        print(f"{threads} threads: " + _rates(rows[-1]["memory"]), flush=True)
        for model, (count, elements) in _models(arguments).items():
            for name in _OPTIMIZERS:
                rates = _step(name, count, elements, arguments.repeats)
                rows.append({"threads": threads, "model": model, "optimizer": name, "step": rates})
                print(f"  {model}, {name}: " + _rates(rates), flush=True)
    write("host_bandwidth", vars(arguments), rows, device=None)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24, help="of a model's parameters")
    parser.add_argument("--large", type=int, default=4, help="tensors of the one model")
    parser.add_argument("--small", type=int, default=1 << 12, help="elements of the other's tensors")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    return parser.parse_args()


def _models(arguments: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Tensors, and elements of each."""
    return {
        "large": (arguments.large, arguments.elements // arguments.large),
        "small": (arguments.elements // arguments.small, arguments.small),
    }


def _rates(rates: dict[str, dict[str, Any]]) -> str:
    return ", ".join(
        f"{way} {row['bytes_per_second'] / 1e9:.1f} (best {row['best_bytes_per_second'] / 1e9:.1f}) GB/s"
        for way, row in rates.items()
    )


def _timed(ways: dict[str, Callable[[], object]], nbytes: dict[str, int], repeats: int) -> dict[str, Any]:
    for run in ways.values():
        run()
    samples = interleaved(ways, repeats=repeats)
    return {
        way: {
            "bytes_per_second": nbytes[way] / median(samples[way]["seconds"]),
            "best_bytes_per_second": nbytes[way] / min(samples[way]["seconds"]),
            **samples[way],
        }
        for way in ways
    }


def _memory(arguments: argparse.Namespace) -> dict[str, Any]:
    a, b, c = (torch.full((arguments.elements,), 1.0) for _ in range(3))
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: a.copy_(b),
        "triad": lambda: torch.add(b, c, alpha=2.0, out=a),
    }
    return _timed(ways, {"copy": 2 * a.nbytes, "triad": 3 * a.nbytes}, arguments.repeats)


def _step(name: str, count: int, elements: int, repeats: int) -> dict[str, Any]:
    kind, keywords, accesses = _OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.randn(elements)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(elements)
    default = kind(parameters, **keywords)
    default.step()
    ways: dict[str, Callable[[], object]] = {"torch": default.step}
    if kind in _FUSED:
        # The same states: only the kernel differs, not the memory.
        fused = kind(parameters, **keywords, fused=True)
        fused.state = default.state
        ways["torch, fused"] = fused.step
    queue = UpdateQueue()
    ways["hetero"] = lambda: _queued(queue, default)
    rates = _timed(ways, dict.fromkeys(ways, 4 * elements * count * accesses), repeats)
    queue.close()
    return rates


def _queued(queue: UpdateQueue, optimizer: torch.optim.Optimizer) -> None:
    """What a managed ``step`` queues, until it is done."""
    shell = make_shell(optimizer)
    updates = []
    for group in optimizer.param_groups:
        settings = hyper_parameters(group)
        chosen = {**settings, "fused": True} if is_open(optimizer, group) else None
        for parameter in group["params"]:
            entry = optimizer.state.get(parameter)
            fits = chosen is not None and takes_fused(optimizer, parameter, parameter.grad, entry)
            update = ParameterUpdate(
                shell,
                parameter,
                parameter.detach(),
                parameter.grad,
                chosen if fits and chosen is not None else settings,
                entry,
                moves_version=fits,
            )
            updates.append(_queue_entry(update))
    queue.submit(updates)
    queue.finish_all()
    queue.raise_error()


def _queue_entry(update: ParameterUpdate) -> Update:
    batch = Batch(
        key=update.batch_key,
        nbytes=update.nbytes,
        run_all=lambda runs: run_together([r.__self__ for r in runs]),
    )
    return Update(update.run, batch)


if __name__ == "__main__":
    main()
