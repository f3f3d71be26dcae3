"""Step time where activations have to leave the device: hetero's plan beside two ways that move all of them.

python -m benchmarks activations

A chain of layers whose saved tensors are far larger than their weights runs forward and backward. Two yardsticks:
torch's `save_on_cpu` (every saved tensor goes to pinned memory and comes back when it is read), and swapping everything
beside compute (`benchmarks.swap_everything`). hetero gets the peak of each as its budget, and its plan's prediction is
beside what was measured. The weights of the yardsticks stay on the device, and so do their gradients.

On the virtual accelerator the link is set; on a real device, whose link is what it is, the pauses are. Most of a
layer's time is a pause, in which the processor is free as it is when a GPU computes (`benchmarks.chain`).
"""

import argparse

import torch
from torch import Tensor, nn

from benchmarks.activation_ways import LATENCY, Job, lines, measure
from benchmarks.chain import Pause
from benchmarks.record import write
from hetero.cli.placing import choose_device
from hetero.devices import Accelerator, probe_links, virtual


class Layer(nn.Module):
    """A small Linear, an activation function and a pause; saves one storage of ``rows x width``, twice: for the
    activation function, and for the next layer."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        paused: Tensor = Pause.apply(self.linear(x).tanh(), self.seconds)
        return paused


def main() -> None:
    device = choose_device(None)
    is_real = device.type != "virtual"
    arguments = _parse(is_real)
    if not is_real:
        torch.set_num_threads(1)
    saved = arguments.rows * arguments.width * 4
    bandwidth = probe_links(Accelerator(device), nbytes=saved).d2h_bandwidth if is_real else 0.0
    rows = []
    for share in (0.25, 0.5, 1.0, 2.0):
        # ``share``: of a layer's forward time that its saved tensors take on the link.
        if is_real:
            arguments.layer_seconds = saved / bandwidth / share
        else:
            virtual.set_link(bandwidth=saved / (share * arguments.layer_seconds), latency=LATENCY)
        row = measure(_job(device, arguments), rounds=arguments.rounds, steps=arguments.steps)
        rows.append({"transfer_over_forward": share, "layer_seconds": arguments.layer_seconds, **row})
        print(f"transfer / forward {share}: {lines(row)}", flush=True)
    write("activations", {**vars(arguments), "latency": LATENCY}, rows, device=device)


def _job(device: torch.device, arguments: argparse.Namespace) -> Job:
    batch = torch.randn(arguments.rows, arguments.width, generator=torch.Generator().manual_seed(0))

    def build() -> nn.Module:
        layers = (Layer(arguments.width, arguments.layer_seconds) for _ in range(arguments.layers))
        return nn.Sequential(*layers)

    def loss(model: nn.Module, device: torch.device) -> Tensor:
        out: Tensor = model(batch.to(device))
        return out.sum()

    return Job(device, build, loss)


def _parse(is_real: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256 if is_real else 64)
    parser.add_argument("--rows", type=int, default=65536 if is_real else 4096)
    parser.add_argument(
        "--layer-seconds", type=float, default=0.012, help="a layer's pause in forward; backward twice"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="timed per round and way")
    return parser.parse_args()


if __name__ == "__main__":
    main()
