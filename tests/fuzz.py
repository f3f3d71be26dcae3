"""Random models in random training loops under random budgets, unmanaged and managed, number by number:

    python -m tests.fuzz --seconds 600 [--seed FIRST]    # seed after seed, from a random one unless told
    python -m tests.fuzz --seed N                        # that one, in this process

A managed run has to show the numbers and errors of the unmanaged one, keep the budget, race nowhere, end, and leave
nothing; what does not fit has to be explained. Prints of a seed that fails what it trains, how, and the first
difference. Exits with 1 if any failed.
"""

import argparse
import collections
import contextlib
import copy
import faulthandler
import io
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Where pytest looks for the helpers; and no real device, which rounds otherwise and cannot tell of races.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parent / "manage")])

import torch
from accelerators import clear_races, device, races
from backward_ends import wait_for_backward_ends
from equality import as_chosen, fresh_memory, peak_memory
from loops import ACTIONS, batch, mixed_loop
from node_numbers import number_apart
from random_graphs import KINDS, WIDTH, Graph, Net, Node
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twins import assert_same, plain

import hetero

HANGS_AFTER = 240.0  # seconds that a seed may take, on a busy machine as well
# What clipping begins to keep for a model on the device may pass the budget once (docs/limits.md): norms and a factor.
OF_CLIPPING = 2 * 512

# -- models and programs --------------------------------------------------------------------------------------


def _linear(inputs=64, outputs=64):  # as `loops.batch` is wide
    return nn.Linear(inputs, outputs)


def _score(layer, x):
    score = torch.func.grad(lambda y: layer(y).tanh().square().sum())(x)
    # Else what autograd's thread still holds is in some peaks and not in others. Within a reentrant checkpoint's
    # backward that thread waits for us.
    if torch._C._current_graph_task_id() == -1:
        wait_for_backward_ends(x.device)
    return score


_call = nn.Module.__call__
# What to build, and how it is called, for what random graphs do not have.
PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "wide": (lambda: nn.Sequential(_linear(64, 256), nn.GELU(), _linear(256, 64)), _call),
    "batch norm": (lambda: nn.BatchNorm1d(64), _call),
    "attention": (lambda: nn.MultiheadAttention(64, 4, 0.1), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "gru": (lambda: nn.GRU(64, 64), lambda m, x: m(x[None])[0][0]),
    "weight norm": (lambda: parametrizations.weight_norm(_linear()), _call),
    "spectral norm": (lambda: parametrizations.spectral_norm(_linear()), _call),
    "low": (lambda: _linear().bfloat16(), lambda m, x: m(x.bfloat16()).to(x.dtype)),
    # Transforms within the model's own forward, over its parameters as well.
    "mapped": (_linear, lambda m, x: torch.func.vmap(lambda row: m(row))(x)),
    "score": (_linear, _score),
    # The memory that it takes depends on values.
    "expert": (_linear, lambda m, x: m(x[x[:, 0] > 0]).sum(0, dtype=torch.float32)),
}


class Part(nn.Module):
    def __init__(self, name):
        super().__init__()
        build, self.call = PARTS[name]
        self.inner = build()

    def forward(self, x):
        return x + self.call(self.inner, x)


def build_model(graph, *names):
    narrow = nn.Sequential(_linear(64, WIDTH), Net(graph), _linear(WIDTH, 64))
    return nn.Sequential(narrow, *[Part(name) for name in names], _linear())


FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    *((kind, {}) for kind in (*FUSED, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam)),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
)
# How iterations go, and how models are managed. The first of each is not mentioned in descriptions.
ITERATION: dict[str, tuple[Any, ...]] = {
    "models": ((0,), (-1,), (0, -1)),  # one after the other
    "penalizes": (False, True),  # the size of gradients
    "anchored": (False, True),  # weights are drawn to where they were
    "rows": ((8,), (8,), (4, 16), (256,), (24,), (28,), (250,), (12,), (20,)),
    "micro": (1, 1, 1, 2, 3),  # batches for a step
    "forwards": (1, 1, 1, 2),  # for a backward
    "asks": (False, True),  # without gradients, before it
    "clip": (False, True),
    "autocast": (False, False, False, True),
    "zero": ("none", "none", "in place", "never"),
    "look": (False, False, True),
    "retain": (*[False] * 7, True),
    "closure": (*[False] * 7, True),
    "called": (*["as it is"] * 9, "checkpointed", "reentrant", "saved on cpu"),
    "freezes": (*[False] * 5, True),  # the first half of the parameters, as long as it lasts
    "scaled": (*[False] * 5, True),
    "input": (*[False] * 5, True),  # has a gradient as well
    "averages": (*[False] * 5, True),  # on the host, from copies
    "sharp": (*[False] * 5, True),  # gradients are those of where the first ones lead
}
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "policy": ("opt", "opt", "opt", "cost-opt", "lru", "fifo"),
    "prefetch": (True, True, True, False),
    "pin_memory": (None, True, False),
    "warmup_steps": (1, 1, 2),
    "activations": (True, True, True, False),
    "device_homes": (True, True, True, False),
    "speculate": (None, True, False),
}


def _on_cpu(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "as it is": _call,
    "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "saved on cpu": _on_cpu,
}
SHARES = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.6, 4.0)  # of the unmanaged peak, as a budget
LINKS = (*[{"bandwidth": "100GiB/s", "latency": "1us"}] * 4, {"bandwidth": "200MiB/s", "latency": "100us"})

# Iterations that docs/limits.md lets differ, or torch refuses, are not drawn. ``words``: models and incidents.
AVOIDED: tuple[Callable[[SimpleNamespace, str], bool], ...] = (
    # Attention used twice in a region of autocast: its gradients are then summed in float32.
    lambda how, words: how.autocast and how.forwards > 1 and "attention" in words,
    # A backward, after a step, through a graph from before it, which has casts.
    lambda how, words: how.autocast and "hold" in words,
    # Passes the budget once: what takes more than when the same inputs were measured.
    lambda how, words: how.penalizes != (how.rows in ((24,), (28,))),
    lambda how, words: (how.penalizes and how.forwards > 1) != (how.rows == (28,)),
    lambda how, words: how.asks != (how.rows == (250,)),
    lambda how, words: how.anchored != (how.rows == (12,)),
    lambda how, words: how.sharp != (how.rows == (20,)),
    # Where everything fits, a graph that is kept of views that a model's own code has made keeps it there.
    lambda how, words: "hold" in words and "views" in words and max(how.rows) > 24,
    # A loss that takes much of what comes out of such a checkpoint: likewise.
    lambda how, words: how.called == "reentrant" and (max(how.rows) > 24 or how.anchored),
    # torch has no gradients of gradients through reentrant checkpoints.
    lambda how, words: how.penalizes and ("checkpoint" in words or how.called == "reentrant"),
    # They go through a graph once, and what no input leads to has no gradient.
    lambda how, words: how.called == "reentrant" and (how.retain or not how.input),
    # A scaler has no closures, and neither has who moves the parameters in between.
    lambda how, words: (how.scaled or how.sharp) and how.closure,
    # And raises where an optimizer has no gradient at all, unless that is fused, as the unmanaged one is made to be.
    lambda how, words: how.scaled and how.freezes,
)


def draw(seed: int) -> SimpleNamespace:
    """Models, optimizers, steps, and the settings that they are managed with."""
    rng = random.Random(seed)
    models = [_draw_model(rng) for _ in range(rng.choice([1, 1, 2]))]
    incidents = [rng.choice(INCIDENTS[len(models) < 2 :]) for _ in range(rng.randint(1, 5))]
    steps: list[tuple[str, dict[str, Any], int]] = []  # what, how if it is an iteration, and a seed
    for _ in range(rng.randint(1, 3)):  # a kind of iteration is planned for only if it comes again
        kinds = [_draw_iteration(rng, str([models, incidents])) for _ in range(rng.randint(1, 2))]
        for count in range(rng.randint(2, 7)):
            steps.append(("iterate", kinds[count % len(kinds)], rng.randrange(1 << 30)))
            if rng.random() < 0.35:
                steps.append((rng.choice(incidents), {}, rng.randrange(1 << 30)))
    settings = [_draw_each(rng, {"share": SHARES, **KEYWORDS}) for _ in range(rng.choice([1, 2, 2]))]
    optimizers = [_draw_optimizer(rng, str([model, incidents])) for model in models]
    drawn = {"models": models, "optimizers": optimizers, "steps": steps, "settings": settings}
    return SimpleNamespace(seed=seed, link=rng.choice(LINKS), **drawn)


def _draw_each(rng, choices):
    return {key: rng.choice(values) for key, values in choices.items()}


def _draw_model(rng):
    weights = rng.randint(2, 5)
    kinds = rng.choices(KINDS, k=rng.randint(2, 8))
    nodes = [Node(kind, rng.randrange(weights), rng.randint(0, 3)) for kind in kinds]
    frozen = frozenset(rng.sample(range(weights), rng.choice([0, 0, 1])))
    return Graph(tuple(nodes), weights, frozen), *rng.sample(list(PARTS), rng.randint(0, 3))


def _draw_iteration(rng, words):
    while True:
        how = _draw_each(rng, ITERATION)
        if not any(avoids(SimpleNamespace(**how), words) for avoids in AVOIDED):
            return how


def _draw_optimizer(rng, words):
    kind, keywords = rng.choice(OPTIMIZERS)
    kernels: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}]
    # In half precision SGD's fused kernel computes something else, and hetero does not choose it. No fused kernel tells
    # autograd of its writes, so that a graph from before them is walked with other weights, where it should be refused.
    # And SGD's raises where some have momentum already and others get their first gradient.
    fits = kind is not torch.optim.SGD or not ("'low'" in words or "momentum" in keywords)
    if kind in FUSED and "'hold'" not in words and fits:
        kernels += [{}, {}, {"fused": True}]
    return kind, {"lr": rng.choice([1e-2, 1e-3]), **keywords, **rng.choice(kernels)}


def describe(program: SimpleNamespace) -> str:
    lines = [f"seed {program.seed}, link {program.link}"]
    for (graph, *parts), (kind, keywords) in zip(program.models, program.optimizers, strict=True):
        nodes = ", ".join(f"{node.kind} {node.weight} {node.reach}" for node in graph.nodes)
        lines.append(f"model: {nodes}, frozen {set(graph.frozen)}, {parts}; {kind.__name__} {keywords}")
    for number, (what, how, _) in enumerate(program.steps):
        lines.append(f"step {number}: {what} {_unusual(how, ITERATION)}")
    return "\n  ".join(lines)


def _unusual(chosen, choices):
    return {key: value for key, value in chosen.items() if key in choices and value != choices[key][0]}


# -- running one ----------------------------------------------------------------------------------------------


class Run:
    """``keywords``: of `hetero.manage`, or None for a run without it."""

    def __init__(self, program: SimpleNamespace, target: torch.device, keywords: dict[str, Any] | None):
        self.program, self.target, self.keywords = program, target, keywords
        self.seen: list[tuple[str, Any]] = []
        self.where, self.last_error, self.over = "", "", ""
        self.managers: list[hetero.Manager] = []
        self.held: list[torch.Tensor] = []  # graphs
        self.averages: nn.Module | None = None
        self.scaler = torch.amp.GradScaler(target.type, init_scale=256.0, growth_interval=3)
        torch.manual_seed(program.seed)
        self.models = nn.ModuleList(build_model(*spec) for spec in program.models)
        # Made here: what you keep may pass the budget once.
        self.anchors: dict[nn.Parameter, torch.Tensor] = {}
        if any(how.get("anchored") for _, how, _ in program.steps):
            self.anchors = {p: p.detach().to(target, copy=True) for p in self.models.parameters()}
        self.means = [p.detach().clone() for p in self.models.parameters()]
        self.models.to("cpu" if keywords else target)
        self.optimizers = [
            kind(model.parameters(), **(chosen if keywords else as_chosen(kind, chosen)))
            for model, (kind, chosen) in zip(self.models, program.optimizers, strict=True)
        ]

    def manage(self):
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if self.keywords:
                self.managers.append(hetero.manage(model, optimizer, device=self.target, **self.keywords))

    def close(self) -> str:
        """What is not as before `manage`."""
        self.held.clear()  # docs/limits.md: these graphs have the weights that they have seen
        while self.managers:
            self.managers.pop().close()
        ordinary = all(type(p) is nn.Parameter and not p.is_pinned() for p in self.models.parameters())
        return "" if ordinary else "close() left parameters managed or pinned"

    def note(self, what, value):
        self.seen.append((f"{self.where}: {what}", plain(value)))

    def play(self):
        self.manage()
        budget = self.keywords["device_budget"] if self.keywords else sys.maxsize
        for number, (what, how, seed) in enumerate([*self.program.steps, ("look", {}, 0)]):
            self.where = f"step {number}, {what}"
            torch.manual_seed(seed)
            try:
                getattr(self, what)(random.Random(seed), **how)
            except (hetero.BudgetError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                self.last_error = repr(error)
                self.note(f"raised {type(error).__name__}", None)  # messages name devices
                self.models.zero_grad()  # docs/limits.md: how much has been accumulated is undefined
            finally:  # where a step is refused as well
                excess = torch.accelerator.max_memory_allocated() - budget
                if excess > OF_CLIPPING * len(self.models):
                    self.over = self.over or f"{self.where}: {excess} bytes above the budget"

    def iterate(self, rng, **how):
        how = SimpleNamespace(**({key: values[0] for key, values in ITERATION.items()} | how))
        chosen = sorted({index % len(self.models) for index in how.models})
        model = nn.Sequential(*[self.models[index] for index in chosen])
        parameters, call = list(model.parameters()), CALLS[how.called]
        frozen = [p for p in parameters[: len(parameters) // 2] if p.requires_grad and how.freezes]
        for p in frozen:
            p.requires_grad_(False)

        def backward():
            for _ in range(how.micro):
                x = batch(self.target, rng.choice(how.rows))
                x.requires_grad_(how.input)
                with torch.autocast(self.target.type, torch.bfloat16, enabled=how.autocast):
                    loss = sum(call(model, x).float() for _ in range(how.forwards)).square().mean()
                self.note("loss", loss)
                with torch.no_grad():
                    if how.asks:
                        self.note("said", model(x).sum())
                if how.anchored:
                    distances = [
                        (p - self.anchors[p]).square().sum() for p in parameters if p.is_floating_point()
                    ]
                    loss = loss + 1e-2 * sum(distance.to(x.device) for distance in distances)
                if how.penalizes:
                    wanted = [p for p in parameters if p.requires_grad]
                    gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
                    loss = loss + sum(
                        g.float().square().sum().to(x.device) for g in gradients if g is not None
                    )
                for retains in [*[True] * how.retain, False]:
                    (self.scaler.scale(loss) if how.scaled else loss).backward(retain_graph=retains)
                self.note("input's gradient", x.grad)
            return loss

        if not how.closure:
            backward()
        if how.sharp:
            with torch.no_grad():
                moves = [(p, p.grad * 1e-2) for p in parameters if p.grad is not None]
                for p, move in moves:
                    p.add_(move)
                    p.grad = None
            backward()
            with torch.no_grad():
                for p, move in moves:
                    p.sub_(move)
            del moves
        if how.scaled and (how.clip or how.look):
            for index in chosen:
                self.scaler.unscale_(self.optimizers[index])
        if how.clip:
            self.note("norm", nn.utils.clip_grad_norm_(parameters, 1e-2))
        if how.look:
            self.note("gradients", [p.grad for p in parameters])
        for index in chosen:
            if how.scaled:
                self.scaler.step(self.optimizers[index])
            else:
                self.optimizers[index].step(backward if how.closure else None)
            if how.zero != "never":
                self.optimizers[index].zero_grad(set_to_none=how.zero == "none")
        if how.scaled:
            self.scaler.update()
        if how.averages:
            for mean, p in zip(self.means, self.models.parameters(), strict=True):
                mean.lerp_(p.detach().cpu(), 0.1)
            self.note("means", self.means)
        for p in frozen:
            p.requires_grad_()

    # Incidents, between iterations.

    def mixed(self, rng):
        """What `test_settled_random` mixes."""
        index = rng.randrange(len(self.models))
        actions = rng.choices([action for action in ACTIONS if action != "other step"], k=rng.randint(2, 8))
        self.note("", mixed_loop(actions)(self.models[index], self.optimizers[index], self.target))
        self.models.zero_grad()

    def adversaries(self, rng):
        """A generator learns by the gradients of a judge, which has learnt from the same sample."""
        sample = self.models[0](batch(self.target))
        for x, index in ((sample.detach(), -1), (sample, 0)):
            self.models.zero_grad()
            loss = self.models[-1](x).mean()
            self.note("loss", loss)
            loss.backward()
            self.optimizers[index].step()

    def evaluate(self, rng):
        model = rng.choice(self.models).train(rng.random() < 0.3)
        with rng.choice([torch.no_grad, torch.inference_mode])():
            self.note("output", model(batch(self.target, rng.choice([8, 9]))))
        model.train()

    def threads(self, rng):
        model = rng.choice(self.models).eval()  # dropout would draw in any order
        inputs = [batch(self.target) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            self.note("outputs", list(pool.map(lambda x: model(x).detach(), inputs)))
        model.train()

    def hold(self, rng):
        self.held.append(rng.choice(self.models)(batch(self.target)).square().mean())

    def unhold(self, rng):
        while self.held:
            self.held.pop().backward()

    def average(self, rng):
        self.averages = self.averages or copy.deepcopy(self.models)
        averages = list(self.averages.parameters())
        with torch.no_grad():
            for mean, p in zip(averages, self.models.parameters(), strict=True):
                # docs/limits.md: copies stay where they were made.
                mean.lerp_(p.detach().to(mean.device), 0.1)
        self.note("averages", averages)

    def rewind(self, rng):
        owners, stream = (*self.models, *self.optimizers), io.BytesIO()
        torch.save([owner.state_dict() for owner in owners], stream)
        self.iterate(rng, clip=True)
        stream.seek(0)
        for owner, state in zip(owners, torch.load(stream, map_location="cpu"), strict=True):
            owner.load_state_dict(state)

    def trim(self, rng):
        share = rng.choice([0.7, 0.9])
        for manager in self.managers:
            with contextlib.suppress(hetero.BudgetError):  # less than an operator needs
                manager.trim(int(share * self.keywords["device_budget"]))

    def close_and_manage(self, rng):
        self.note(self.close(), None)
        self.manage()

    def fail(self, rng):
        net = self.models[0][0][1]
        net.fail_at = (rng.choice(["forward", "backward"]), rng.randrange(len(net.graph.nodes)))
        try:
            self.iterate(rng)
        finally:
            net.fail_at = None

    def freeze(self, rng):
        p = rng.choice(list(self.models.parameters()))
        p.requires_grad_(not p.requires_grad)

    def schedule(self, rng):
        for group in rng.choice(self.optimizers).param_groups:
            group["lr"] *= 0.5

    def evaluate_averages(self, rng):
        self.average(rng)
        there = copy.deepcopy(self.models.state_dict())
        self.models.load_state_dict(self.averages.state_dict())
        self.evaluate(rng)
        self.models.load_state_dict(there)

    def hook(self, rng):
        if trained := [p for p in self.models.parameters() if p.requires_grad]:
            rng.choice(trained).register_hook(lambda g: g * 0.5)

    def glance(self, rng):
        p = rng.choice(list(self.models.parameters()))
        self.note("numbers", [p.abs().sum(), p.detach().norm(), p.data.clamp_(-1, 1).sum(), p[0]])

    def states(self, rng):
        optimizer = rng.choice(self.optimizers)
        p = rng.choice(optimizer.param_groups[0]["params"])
        if p in optimizer.state:
            self.note("states", list(optimizer.state[p].values()))

    def look(self, rng):
        states = [state.values() for o in self.optimizers for state in o.state_dict()["state"].values()]
        self.note("buffers", list(self.models.buffers()))
        self.note("parameters and gradients", [[p, p.grad] for p in self.models.parameters()])
        self.note("states", [value for values in states for value in values])


INCIDENTS = (
    *("adversaries", "mixed", "mixed", "mixed", "evaluate", "evaluate", "threads", "hold", "unhold"),
    *("average", "rewind", "trim", "close_and_manage", "fail", "hook", "look"),
    *("freeze", "schedule", "evaluate_averages", "glance", "states"),
)

# -- comparing ------------------------------------------------------------------------------------------------


def compare(program: Any, target: torch.device, setting: dict[str, Any], expected: Any, peak: int) -> str:
    """What is wrong; else "equal", or "refused" for what does not fit."""
    clear_races()
    base = fresh_memory()
    keywords = {key: setting[key] for key in KEYWORDS}
    keywords["device_budget"] = base + int(setting["share"] * peak)
    run, refused, difference = Run(program, target, keywords), "", ""
    is_explained = True
    if torch.accelerator.memory_allocated() > keywords["device_budget"]:
        return "refused"  # what the loop itself keeps does not fit
    try:
        run.play()
    except (hetero.BudgetError, torch.OutOfMemoryError) as refusal:
        refused, is_explained = f"{run.where}: refused: {refusal}", isinstance(refusal, hetero.BudgetError)
    try:
        for (where, value), (there, other) in zip(run.seen, expected, strict=not refused):  # until then
            assert where == there, f"{where} instead of {there}"
            assert_same(value, other, where)
    except AssertionError as error:
        difference = f"{error}; last error raised: {run.last_error}"
    over, unlike_before = run.over, run.close()
    del run
    left = fresh_memory() - base
    for wrong in (
        *races(),
        # There is room then; and the device has more than any budget.
        refused if setting["share"] >= 1.6 or not is_explained else "",
        difference,
        over,
        unlike_before,
        f"{left} bytes left after close()" if left else "",
    ):
        if wrong:
            return f"  {setting['share']} of {peak} bytes, {_unusual(keywords, KEYWORDS)}:\n    {wrong}"
    return "refused" if refused else "equal"


def check(seed: int) -> list[str]:
    """As `compare`, for each setting."""
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    torch.set_num_threads(1)
    program = draw(seed)
    target = device(**program.link)
    number_apart(target, seed % 2 == 1)
    base = fresh_memory()
    reference = Run(program, target, None)
    reference.play()
    expected, peak = reference.seen, peak_memory() - base
    del reference
    results = [compare(program, target, setting, expected, peak) for setting in program.settings]
    faulthandler.cancel_dump_traceback_later()
    return results


def run_until(end: float, seed: int) -> None:
    """Seed after seed, some of them to a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hetero"])
    counts: collections.Counter[str] = collections.Counter()
    pool, first = None, seed
    while time.monotonic() < end:
        pool = pool or ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=20)
        try:
            results = pool.submit(check, seed).result()
        except BrokenProcessPool:
            pool, results = None, ["  a hang, or a crash of the process"]
        except Exception as error:
            results = [f"  a crash: {error!r}"]
        if wrong := [result for result in results if result not in ("equal", "refused")]:
            print(f"FAILED {describe(draw(seed))}", *wrong, sep="\n", flush=True)
        counts.update("failed" if result in wrong else result for result in results)
        seed += 1
    print(f"seeds {first} to {seed - 1}: {dict(counts)}")
    raise SystemExit(counts["failed"] > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    if options.seconds is not None:
        run_until(time.monotonic() + options.seconds, options.seed)
    results = check(options.seed)
    print(describe(draw(options.seed)), *results, sep="\n")
    raise SystemExit(not set(results) <= {"equal", "refused"})


if __name__ == "__main__":
    main()
