"""Under ``precision`` the numbers are those of FSDP2's mixed precision."""

import collections
import dataclasses
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from accelerators import ON_CUDA
from equality import fresh_memory
from sharded import assert_as_fsdp2, sharded
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils.checkpoint import checkpoint
from twins import assert_same, device, managed

import hetero
from hetero.stm.gradients.offload import Gradients
from hetero.stm.tensors.precision import cast_inputs

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

WIDTH = 64
LOW = torch.bfloat16

# The virtual accelerator computes what the CPU does, where FSDP2 runs here.
pytestmark = pytest.mark.skipif(ON_CUDA, reason="compares the virtual accelerator with FSDP2 on the CPU")


def mlp(width=WIDTH, depth=4):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
    )


def steps(model, optimizer, target, count=4, *, micro_batches=1, clip=None, batch=None, clear=True):
    seen = []
    for _ in range(count):
        for _ in range(micro_batches):
            output = model(torch.randn(8, WIDTH).to(target) if batch is None else batch().to(target))
            loss = output.float().square().mean()
            loss.backward()
            seen.append([output, loss])
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        seen.append([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=clear)
    return seen


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_losses_gradients_and_parameters(precision):
    manager = assert_as_fsdp2(mlp, steps, precision)
    assert manager.config.precision is precision


def test_gradients_that_nobody_looks_at_are_cast_by_the_queued_step():
    def loop(model, optimizer, target):
        for _ in range(5):
            model(torch.randn(8, WIDTH).to(target)).float().square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    manager = assert_as_fsdp2(lambda: mlp(depth=8), loop, budget=96 << 10)
    assert manager._host_step.queued > 2 * len(manager._stm.tensors)


def test_gradients_larger_than_what_is_cast_through_a_buffer():
    build = lambda: nn.Sequential(nn.Linear(WIDTH, 6000), nn.Tanh(), nn.Linear(6000, WIDTH))  # noqa: E731
    assert_as_fsdp2(build, lambda m, o, t: steps(m, o, t, clip=1e-2), budget=16 << 20)


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_micro_batches_add_up_in_float32(clip, clear):
    assert_as_fsdp2(mlp, lambda m, o, t: steps(m, o, t, micro_batches=3, clip=clip, clear=clear))


def test_as_without_gradient_synchronisation():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            for micro in range(3):
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(micro == 2)
                model(torch.randn(8, WIDTH).to(target)).float().square().mean().backward()
            seen.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_as_fsdp2(mlp, loop)


def test_two_forwards_and_one_backward():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            outputs = [model(torch.randn(8, WIDTH).to(target)) for _ in range(3)]
            sum(output.float().square().mean() for output in outputs).backward()
            seen.append([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_as_fsdp2(mlp, loop)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_norms_are_those_of_float32_gradients(norm_type):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(4):
            model(torch.randn(8, WIDTH).to(target)).float().square().mean().backward()
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=norm_type))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_as_fsdp2(mlp, loop)


def test_frozen_parameters_and_unfreezing():
    def build():
        model = mlp()
        for module in model[:3]:
            module.requires_grad_(False)
        return model

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def loop(model, optimizer, target):
        seen = [steps(model, optimizer, target, 3)]
        model[1].requires_grad_(True)
        seen.append(steps(model, optimizer, target, 3))
        return seen

    assert_as_fsdp2(build, loop, make_optimizer=make)


class Tied(nn.Module):
    """A language model's head that is its embedding, and a weight that several operators use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = torch.tanh(x @ self.mix) + F.linear(x, self.mix) * self.mix.mean()
        x = self.norm(x + x @ self.mix.t())
        return self.head(x)


def test_a_tied_weight_and_one_used_by_several_operators():
    assert_as_fsdp2(
        Tied, lambda m, o, t: steps(m, o, t, batch=lambda: torch.randint(0, 50, (4, 7)), clip=1.0)
    )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x + self.attention(x, x, x, need_weights=False)[0])


def test_attention_which_does_not_call_its_modules():
    assert_as_fsdp2(Attention, lambda m, o, t: steps(m, o, t, batch=lambda: torch.randn(2, 9, WIDTH)))


def test_attention_in_evaluation():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            seen.append(steps(model, optimizer, target, 1, batch=lambda: torch.randn(2, 9, WIDTH)))
            model.eval()
            with torch.no_grad():
                seen.append(model(torch.randn(2, 5, WIDTH).to(target)))
            model.train()
        return seen

    assert_as_fsdp2(Attention, loop)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.first = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    assert_as_fsdp2(lambda: Checkpointed(reentrant), lambda m, o, t: steps(m, o, t, micro_batches=2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(reentrant):
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            x = torch.randn(8, WIDTH).to(target).requires_grad_()
            # FSDP2 of torch 2.11 recomputes with the inputs that it has cast: the other kind has the same numbers.
            kind = reentrant or (TORCH <= (2, 11) and target.type == "cpu")
            output = checkpoint(model, x, use_reentrant=kind)
            output.float().square().mean().backward()
            seen.append([output, x.grad, *[p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_as_fsdp2(mlp, loop)


# Dynamo looks at ``.grad`` of everything that it finds.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks():
    def compiled():
        model = mlp()
        for block in model:
            block.compile(backend="aot_eager")
        return model

    expected, state = sharded(mlp, steps, LOW)
    got, got_state, _ = managed(compiled, steps, 4 << 20, precision=LOW)
    assert_same(got, expected, "observed")
    assert_same(got_state, state, "state")


class Kinds(nn.Module):
    """Parameters and buffers of every kind; notes the types that forward sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(WIDTH).bfloat16(), requires_grad=False)
        turn = torch.randn(WIDTH // 2, dtype=torch.complex64)
        order = torch.randperm(WIDTH)
        if TORCH <= (2, 11):  # whose FSDP2 takes no parameters of integers, and makes complex ones real
            self.register_buffer("turn", turn)
            self.register_buffer("order", order)
        else:
            self.turn = nn.Parameter(turn, requires_grad=False)
            self.order = nn.Parameter(order, requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.types = []

    def forward(self, x):
        tensors = (*self.parameters(), *self.buffers(), x)
        self.types.append([(str(t.dtype), t.element_size(), t.itemsize, t.nbytes) for t in tensors])
        self.types.append([t.is_floating_point() for t in tensors])
        x = self.linear(x) * self.wide + self.narrow
        x = x[:, self.order]
        turned = torch.view_as_real(torch.view_as_complex(x.float().view(-1, WIDTH // 2, 2)) * self.turn)
        return turned.view(-1, WIDTH) + self.shift


def test_what_is_cast_and_what_is_not():
    def loop(model, optimizer, target):
        return [steps(model, optimizer, target, 3), str(model.types)]

    assert_as_fsdp2(Kinds, loop)


@pytest.mark.parametrize("home", [torch.float64, torch.float16])
@pytest.mark.parametrize("clip", [None, 1e-2])
def test_homes_of_other_types(home, clip):
    # All of one type, as FSDP2 demands of what is trained.
    build = lambda: mlp().to(home)  # noqa: E731
    make = lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, foreach=False)  # noqa: E731
    loop = lambda m, o, t: steps(m, o, t, micro_batches=2, clip=clip)  # noqa: E731
    assert_as_fsdp2(build, loop, make_optimizer=make)


class Losses(nn.Module):
    """Losses with weights that are buffers, and so of another type."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 10)
        self.losses = nn.ModuleList(
            [
                nn.BCELoss(weight=torch.rand(10)),
                nn.BCEWithLogitsLoss(weight=torch.rand(10), pos_weight=torch.rand(10)),
            ]
        )

    def forward(self, x):
        y = self.linear(x)
        return self.losses[0](y.sigmoid(), y.flip(0).sigmoid()) + self.losses[1](y, y.flip(0).sigmoid())


def test_losses_of_mixed_types():
    assert_as_fsdp2(Losses, steps)


Pair = collections.namedtuple("Pair", "one other")


@dataclasses.dataclass
class Given:
    x: torch.Tensor
    name: str = "given"


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.types = []

    def forward(self, x, rest, *, pair, given, ordered, mask=None):
        tensors = [x, *rest["list"], *pair, given.x, ordered["x"], mask]
        self.types.append(
            [str(t.dtype) for t in tensors] + [type(rest).__name__, type(ordered).__name__, given.name]
        )
        y = sum(self.linear(t) for t in (x, *rest["list"][:1], *pair, given.x, ordered["x"]))
        return {"y": y.masked_fill(mask, 0.0), "double": y.double()}


def test_arguments_are_cast_within_containers_and_differentiably_and_results_are_not():
    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            leaves = [torch.randn(4, WIDTH).to(target).requires_grad_() for _ in range(6)]
            result = model(
                leaves[0],
                {"list": [leaves[1], torch.arange(3).to(target)]},
                pair=Pair(leaves[2], leaves[3]),
                given=Given(leaves[4]),
                ordered=collections.OrderedDict(x=leaves[5].double()),
                mask=(torch.randn(4, WIDTH) > 0).to(target),
            )
            sum(value.float().square().mean() for value in result.values()).backward()
            seen.append([result["y"], result["double"], *[leaf.grad for leaf in leaves]])
            optimizer.step()
            optimizer.zero_grad()
        return [seen, model.types]

    assert_as_fsdp2(Containers, loop)


def test_containers_are_looked_into_where_fsdp2_does():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3), torch.randn(2)])
    value = {
        "packed": packed,
        "deep": [(torch.randn(2), {"x": {3: Pair(torch.ones(2, dtype=torch.int64), torch.randn(2))}})],
        "set": {torch.randn(2)},
        "frozen": torch.Size([2]),
        "given": Given(torch.randn(2)),
        "nothing": None,
    }
    (ours,), named = cast_inputs(LOW, (value,), value)
    theirs = _apply_to_tensors(functools.partial(_cast_fp_tensor, LOW), value)
    for got in (ours, named):
        assert str(got) == str(theirs)
        assert got["packed"] is packed
        assert got["frozen"] is value["frozen"]
    assert cast_inputs(LOW, (packed, [1, {"a": 2}]), {})[0][1] == [1, {"a": 2}]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_under_autocast(precision):
    # Without layers that autocast treats one way on the CPU and another on accelerators.
    build = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])  # noqa: E731

    def loop(model, optimizer, target):
        seen = []
        for _ in range(3):
            with torch.autocast(target.type, dtype=torch.bfloat16):
                losses = [model(torch.randn(8, WIDTH).to(target)).float().square().mean() for _ in range(2)]
            sum(losses).backward()
            seen.append([*losses, *[p.grad for p in model.parameters()]])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_as_fsdp2(build, loop, precision)


def test_grad_scaler_in_float16_with_an_overflow():
    def loop(model, optimizer, target):
        scaler = torch.amp.GradScaler(target.type, init_scale=2.0**14, growth_interval=2)
        seen = []
        for step in range(6):
            output = model(torch.randn(8, WIDTH).to(target) * (1e4 if step == 2 else 1))
            scaler.scale(output.float().square().mean()).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([output, norm, scaler.get_scale()])
        return seen

    manager = assert_as_fsdp2(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), loop, torch.float16
    )
    assert manager.config.precision is torch.float16


def test_parts_called_by_themselves_are_refused_where_their_whole_copies_do_not_fit():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x):
            return self.second(self.first(x))

    torch.manual_seed(0)
    model, target = Halves(), device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    weights = sum(p.nbytes for p in model.parameters())
    budget = before + weights // 2
    x = torch.randn(4, WIDTH).to(target)
    with hetero.manage(
        model, optimizer, device=target, device_budget=budget, precision=torch.bfloat16
    ) as manager:
        with pytest.raises(
            hetero.BudgetError, match=r"second\.\d\.\d\.weight, used outside of the model"
        ) as caught:
            model.second(model.first(x))
        assert any("under precision parameters do too" in note for note in caught.value.__notes__)
        del caught  # whose frames hold what did fit
        with torch.no_grad():  # nothing keeps them
            model.second(model.first(x))
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert max(torch.accelerator.max_memory_allocated(), manager.stats.peak_device_bytes) <= budget


def _reclaim_no_more(gradients, reclaim, nbytes):
    """Give back what is asked for, and nothing that has arrived besides."""
    while nbytes > 0 and gradients._downloads:
        before, (first, *others) = gradients._in_flight_bytes, gradients._downloads
        gradients._downloads = collections.deque([first])
        reclaim(gradients, nbytes)
        gradients._downloads.extend(others)
        nbytes -= before - gradients._in_flight_bytes


@pytest.mark.parametrize("all_seem_on_their_way", [False, True])
@pytest.mark.parametrize("share", [0.45, 0.5, 0.55])
def test_a_norm_is_planned_for_whichever_micro_batch_of_several_sizes_comes_first(
    share, all_seem_on_their_way, monkeypatch
):
    """What was measured as an iteration's second added its gradients to the first one's, whose norms are not taken.
    Gradients of which nobody sees that they have arrived, because the link or its thread is late, have to be waited for
    before a norm is taken that takes the room of what they leave."""
    if all_seem_on_their_way:
        monkeypatch.setattr(
            Gradients, "reclaim", functools.partialmethod(_reclaim_no_more, Gradients.reclaim)
        )
    target = device()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(m for _ in range(3) for m in (nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    base = fresh_memory()
    budget = base + int(share * sum(p.nbytes for p in model.parameters()))
    with hetero.manage(model, optimizer, device=target, device_budget=budget, precision=LOW):
        for iteration in range(12):
            for rows in [16, 8] if iteration % 6 == 0 else [8]:
                model(torch.randn(rows, 128).to(target)).float().square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert torch.accelerator.max_memory_allocated() <= budget, iteration


@pytest.mark.parametrize("clip", [None, 1e-2])
def test_a_norm_that_there_is_no_room_for_is_taken_at_home(clip):
    """Its cast to float32 takes twice what the gradient does. On processors that multiply in low precision, the product
    that makes the gradient needs memory of its own, two thirds of it, for which there is room."""

    def build():
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, WIDTH)
        )

    weight = 1024 * WIDTH * LOW.itemsize
    assert_as_fsdp2(build, lambda *given: steps(*given, clip=clip), budget=weight * 5 // 2 + (52 << 10))
