"""A model under budgets of 100 to 20 % of its unmanaged peak: a GPT, beside FSDP2 and DeepSpeed, or a ResNet50.

python -m benchmarks sweep                     # billions of parameters on an accelerator, within ten minutes
python -m benchmarks sweep --toy               # millions, on the virtual accelerator: writes results/sweep_cpu.json
python -m benchmarks sweep --layers 48 --width 2560 --batch 4
python -m benchmarks sweep --resume            # only what the file with the same settings lacks: it ran out of time
python -m benchmarks sweep --model resnet50    # of images, most of whose memory is activations
python -m benchmarks sweep --toy --deepspeed-python PYTHON    # its environment has deepspeed and hetero's requirements

Smaller devices are emulated with ``device_budget``. Every way trains the same model from the same weights on the
same batches, float32 weights and AdamW, in a process of its own (`benchmarks.sweep_ways`). hetero, FSDP2
(``fully_shard`` of every block and the root, `CPUOffloadPolicy`, one rank) and DeepSpeed (ZeRO-3, parameters and
optimizer offloaded) step on the host, unmanaged on the device. Without an accelerator, unmanaged and hetero run on
the virtual one, FSDP2 and DeepSpeed on the CPU itself, whose kernels the virtual one uses; their speed says nothing
then, because nothing of theirs is moved. Activations, of which a ResNet's memory consists, neither moves: of it they
are left out. deepspeed 0.19.8 installs from source and runs on a CPU; it compiles an
operator there at first use, for minutes.

Reported: seconds a step, peak by the allocator's own counter, bytes moved, and

* losses of every step. With ``--exact`` (``--toy`` implies it: attention written out, optimizers not fused,
  deterministic kernels) hetero's must be those of the unmanaged run on the virtual accelerator, and the same under
  every budget on a real one, where unmanaged steps on another processor; if they are not, the exit code is 1;
* host bytes while parameters, gradients and states are all there: hetero's by its ledger, the others' by the
  storages of their tensors. Pinned bytes are the slabs' for hetero. Beside them, as a check, how far the process's
  resident set has grown: on the virtual accelerator that holds the device's bytes as well.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import sweep_ways
from benchmarks.record import commit, read, write
from benchmarks.sweep_models import add_model_arguments, model_settings, shapes
from hetero.cli.placing import choose_device
from hetero.cli.provenance import provenance
from hetero.devices import Accelerator, host_memory_free
from hetero.units import format_bytes, parse_bytes

_SHARES = (0.6, 0.2, 0.4, 0.8, 1.0, 0.3)  # in the order of interest, should time run out
_GRACE = 90.0  # seconds that a way may take beyond the time in which it may start

Row = dict[str, Any]


def main() -> int:
    arguments = _parse()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and not arguments.toy:
        print("skipped: no accelerator on this machine (--toy runs it small on a virtual one)")
        return 0
    device = choose_device(None)
    settings = {k: v for k, v in model_settings(arguments).items() if k not in ("seconds", "resume")}
    if arguments.host_budget is not None:
        settings["host_budget"] = parse_bytes(arguments.host_budget, name="--host-budget")
    parameters = sum(p.numel() for p in shapes(settings).parameters())
    if device.type == "virtual":
        torch.set_num_threads(1)  # as `benchmarks.sweep_ways` does: the record says so
    print(
        f"{parameters:,} parameters on {device}; {format_bytes(host_memory_free())} of host memory free",
        flush=True,
    )
    facts = {
        **{key: value for key, value in settings.items() if key != "deepspeed_python"},  # a local path
        "parameters": parameters,
        "dtype": "float32 (TF32 matmul)" if device.type == "cuda" else "float32",
        "shares": sorted(_SHARES, reverse=True),
    }

    name = "sweep_cpu" if device.type == "virtual" else "sweep_toy" if arguments.toy else "sweep"
    if arguments.model != "gpt":
        name += f"_{arguments.model}"

    def keep(rows: list[Row]) -> None:
        write(name, facts, rows, device=device)

    known = _known(read(name, device=device), facts, device) if arguments.resume else []
    rows = Sweep(settings, device, arguments.seconds, keep, known).run()
    same = _compare(rows, device)
    keep(rows)
    if settings["exact"] and not same:
        print("hetero's losses are not what they must be", file=sys.stderr)
        return 1
    return 0


class Sweep:
    """Everything that starts within ``seconds``; a way that fails is a row that says why. ``keep``: is given the rows
    there are after each one, because whoever lends the machine may end us. ``known``: rows of those that need not run.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        device: torch.device,
        seconds: float,
        keep: Callable[[list[Row]], None],
        known: list[Row],
    ) -> None:
        self._settings = settings
        self._device = device
        self._end = time.perf_counter() + seconds
        self._keep = keep
        self._known = known

    def run(self) -> list[Row]:
        first = self._attempt("unmanaged")
        peak = first.get("peak_device_bytes", Accelerator(self._device).total_bytes())
        ways: list[tuple[str, float | None]] = [("hetero", share) for share in _SHARES]
        if self._settings["model"] == "gpt":
            ways[1:1] = [("FSDP2 CPUOffloadPolicy", None), ("DeepSpeed ZeRO-3 offload", None)]
        rows = [first]
        for way, share in ways:
            if share is None:
                rows.append(self._attempt(way))
            else:
                rows.append(self._attempt(way, share=share, device_budget=int(share * peak)))
            rows[1:] = sorted(rows[1:], key=lambda row: -row.get("share", 0.0))
            self._keep(rows)
        return rows

    def _attempt(self, way: str, **budget: float) -> Row:
        begin = time.perf_counter()
        for known in self._known:
            if (known["way"], known.get("share")) == (way, budget.get("share")):
                return known
        if begin > self._end:
            outcome: Row = {"error": "not run: out of time"}
        else:
            outcome = self._in_a_process({**self._settings, "way": way, **budget})
        # With `--resume`, rows of one file are of several days and commits.
        made = {"date": time.strftime("%Y-%m-%dT%H:%M+00:00", time.gmtime()), "commit": commit()}
        row = {"way": way, **budget, **made, **outcome}
        print(f"{_line(row)} [{time.perf_counter() - begin:.0f} s]", flush=True)
        return row

    def _in_a_process(self, settings: dict[str, Any]) -> Row:
        other = settings["way"].startswith("DeepSpeed") and self._settings["deepspeed_python"]
        limit = self._end - time.perf_counter() + _GRACE
        with tempfile.TemporaryDirectory() as folder:
            asked, answered, printed = (
                Path(folder) / name for name in ("settings.json", "row.json", "printed")
            )
            asked.write_text(json.dumps(settings))
            printed.touch()  # a process may end before it prints
            if other:
                code = _run(other, asked, answered, printed, limit)
            else:
                code = _fork(asked, answered, printed, limit)
            if code is None:
                return {"error": f"stopped after {limit:.0f} s"}
            if not answered.exists():
                last = (printed.read_text(errors="replace").strip().splitlines() or [""])[-1]
                return {"error": f"the process ended with {code}: {last}"}
            row: Row = json.loads(answered.read_text())
            return row


def _fork(asked: Path, answered: Path, printed: Path, limit: float) -> int | None:
    """Train in a process forked off one that has imported everything and done nothing else. The exit code; None: it
    was stopped after ``limit`` seconds."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([sweep_ways.__name__])
    process = forks.Process(target=sweep_ways.train_quietly, args=(asked, answered, printed))
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _run(python: str, asked: Path, answered: Path, printed: Path, limit: float) -> int | None:
    """As `_fork`, in another environment."""
    with printed.open("wb") as stream:
        command = [python, "-m", sweep_ways.__name__, str(asked), str(answered)]
        try:
            ended = subprocess.run(command, check=False, stdout=stream, stderr=stream, timeout=limit)
        except subprocess.TimeoutExpired:
            return None
    return ended.returncode


def _known(record: dict[str, Any] | None, facts: dict[str, Any], device: torch.device) -> list[Row]:
    """Rows that an earlier run has left, of the same settings and on such a device."""
    if record is None or record["parameters"] != facts:
        return []
    if record["machine"]["accelerator"] != provenance(device)["accelerator"]:
        return []
    return [row for row in record["results"] if "error" not in row]


def _compare(rows: list[Row], device: torch.device) -> bool:
    """Adds to each row how far its losses are from the unmanaged run's, over the steps that both ran; whether hetero's
    are what they must be."""
    unmanaged = rows[0].get("losses", [])
    managed = [row for row in rows if row["way"] == "hetero" and "losses" in row]
    expected = unmanaged if device.type == "virtual" else next((row["losses"] for row in managed), [])
    for row in rows[1:]:
        if unmanaged and "losses" in row:
            row["losses_equal_unmanaged"] = _agree(row["losses"], unmanaged)
            row["largest_relative_loss_difference"] = max(
                abs(a - b) / abs(b) for a, b in zip(row["losses"], unmanaged, strict=False)
            )
            print(
                f"{_name(row)}: losses "
                + ("equal" if row["losses_equal_unmanaged"] else "differ from")
                + f" unmanaged, by {row['largest_relative_loss_difference']:.2g} at most"
            )
    return all(_agree(row["losses"], expected) for row in managed)


def _agree(losses: list[float], expected: list[float]) -> bool:
    """In all steps that both have: one waits longer for its plan to stay."""
    return bool(losses and expected) and losses[: len(expected)] == expected[: len(losses)]


def _name(row: Row) -> str:
    return f"{row['way']} {row['share']:.0%}" if "share" in row else str(row["way"])


def _line(row: Row) -> str:
    if "error" in row:
        return f"{_name(row)}: {row['error']}"
    line = f"{_name(row)}: {row['seconds']:.3f} s a step ({row['optimizer_seconds']:.3f} s of it the optimizer), "
    line += f"host {format_bytes(row['host_bytes'])} ({format_bytes(row['pinned_bytes'])} pinned; resident "
    line += f"{format_bytes(max(row['resident_growth_bytes'], 0))})"
    if "peak_device_bytes" in row:
        line += f", device peak {format_bytes(row['peak_device_bytes'])}"
    if "device_budget" in row:
        line += f" of {format_bytes(row['device_budget'])}, moved {format_bytes(int(row['bytes_moved']))}, "
        if row["lower_bound_bytes"]:
            line += f"{row['last_bytes_moved'] / row['lower_bound_bytes']:.3f} x the least, "
        line += f"{row['unplanned_fetches']} unplanned"
    return line


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--seconds", type=float, default=450.0, help="start nothing new after this")
    parser.add_argument(
        "--host-budget",
        help="for hetero, such as 100GiB; default: what is free, which may be less than can be had",
    )
    parser.add_argument("--resume", action="store_true", help="keep what has run already; see above")
    parser.add_argument("--exact", action="store_true", help="deterministic kernels; see above")
    parser.add_argument("--deepspeed-python", help="an interpreter that has deepspeed; default: this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
