"""`hetero verify`: equal, different, and what cannot be compared."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hetero.cli import app
from hetero.cli.loading import load_function

RUN = CliRunner()

SOURCE = """
import collections
import itertools
import torch
from torch import nn

CALLS = itertools.count(1)

def network():
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

def pairs():
    while True:
        yield torch.randn(8, 64), torch.randint(10, (8,))

def adam():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, pairs(), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])

def sgd_with_torch_loss():
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, pairs(), nn.CrossEntropyLoss(label_smoothing=0.1)

def ever_faster():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * next(CALLS))
    return model, optimizer, pairs(), nn.functional.cross_entropy

def three():
    return 1, 2, 3

def a_list():
    return [1, 2, 3, 4]

def wrong_model():
    return "model", *adam()[1:]

def wrong_optimizer():
    return adam()[0], "optimizer", *adam()[2:]

def two_batches():
    model, optimizer, batches, loss = adam()
    return model, optimizer, [next(batches), next(batches)], loss

def no_batches():
    model, optimizer, _, loss = adam()
    return model, optimizer, [], loss

class Moving(collections.UserDict):
    def to(self, device):
        return Moving({key: value.to(device) for key, value in self.items()})

def tokens_and_tied_weights():
    import transformers
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(500, (2, 16))
    batches = [Moving(input_ids=ids, labels=ids)]
    return model, torch.optim.AdamW(model.parameters()), batches, lambda model, batch: model(**batch).loss

def raises():
    raise ValueError("first line\\nsecond line")

def frozen():
    model, *others = adam()
    return model.requires_grad_(False), *others

def lbfgs():
    model, _, *others = adam()
    return model, torch.optim.LBFGS(model.parameters()), *others

def no_scalar():
    return *adam()[:3], lambda model, batch: model(batch[0])

KEPT = adam()

def the_same_twice():
    return KEPT

not_callable = 3
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "verified_here.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("function", ["adam", "sgd_with_torch_loss", "two_batches"])
def test_equal_training_exits_0_and_lists_every_tensor_if_asked(source: Path, function: str) -> None:
    for listed in (False, True):
        arguments = ["verify", f"{source}:{function}", "--steps", "4", *["--all"][:listed]]
        result = RUN.invoke(app, arguments)
        assert result.exit_code == 0, result.output + result.stderr
        assert "bit-identical" in result.output
        for name in ("0.weight", "8.bias", "gradient", "parameter", "buffer"):
            assert (name in result.output) is listed
        assert "differ" not in result.output


def test_a_hugging_face_model_with_tied_weights_is_equal(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:tokens_and_tied_weights", "--all"])
    assert result.exit_code == 0, result.output + result.stderr
    assert "transformer.h.1.mlp.c_fc.weight" in result.output
    assert "bit-identical" in result.output


def test_the_budget_is_kept(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:adam", "--device-budget", "800KiB"])
    assert result.exit_code == 0, result.output + result.stderr
    assert "device budget 800.0 KiB" in result.output


def test_so_is_one_under_which_everything_fits(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:adam", "--steps", "8", "--device-budget", "1GiB"])
    assert result.exit_code == 0, result.output + result.stderr


def test_different_training_exits_1_and_says_that_unmanaged_runs_differ_too(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:ever_faster"])
    assert result.exit_code == 1, result.output + result.stderr
    assert "tensors differ" in result.output
    assert "So do two unmanaged runs" in result.output


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("three", "returned 3 values: expected the 4 values (model, optimizer, batches, loss_fn)"),
        ("a_list", "returned a list: expected the 4 values"),
        ("wrong_model", "returned a str as model"),
        ("wrong_optimizer", "returned a str as optimizer"),
        ("no_batches", "returned no batches"),
        ("raises", "raised ValueError: first line second line"),
        ("no_scalar", "gave a tensor of shape (8, 10): expected a scalar"),
        ("frozen", "all parameters are frozen"),
        ("lbfgs", "returned a LBFGS, whose step() needs closure"),
        ("the_same_twice", "must build them anew"),
        ("missing", "missing is not there"),
        ("not_callable", "not_callable is not a function"),
    ],
)
def test_a_function_that_cannot_be_compared_is_one_line_and_exits_2(
    source: Path, function: str, message: str
) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:{function}"])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_colon.py", "expected FILE.py:FUNCTION"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        (f"{Path(__file__).parent}:make", "there is no file"),
    ],
)
def test_a_target_that_names_nothing_is_refused(target: str, message: str) -> None:
    result = RUN.invoke(app, ["verify", target])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    text, broken = tmp_path / "train.txt", tmp_path / "train_broken.py"
    text.write_text("def make(): pass")
    broken.write_text("def make(:")
    assert "its name must end in .py" in RUN.invoke(app, ["verify", f"{text}:make"]).stderr
    result = RUN.invoke(app, ["verify", f"{broken}:make"])
    assert result.exit_code == 2
    assert "raised SyntaxError" in result.stderr


@pytest.mark.parametrize("name", ["torch", "json", "wave", "its_own_name"])
def test_a_file_may_be_called_as_a_library_is_and_takes_its_place_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path, before = tmp_path / f"{name}.py", sys.modules.get(name)
    path.write_text("import torch\nclass Batch:\n    pass\ndef make():\n    return torch.zeros(1), Batch()\n")
    for _ in range(2):
        zeros, batch = load_function(f"{path}:make")()
        assert torch.equal(zeros, torch.zeros(1))
        assert type(pickle.loads(pickle.dumps(batch))) is type(batch)
    if name == "its_own_name":  # workers that unpickle find it by that
        assert type(batch).__module__ == name
    else:
        assert sys.modules.get(name) is before


def test_a_budget_too_small_is_refused_with_the_least_that_would_do(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:adam", "--device-budget", "100KiB"])
    assert result.exit_code == 2
    assert "device_budget is 102400 bytes" in result.stderr


def test_a_budget_that_cannot_be_read_is_refused_before_anything_is_trained(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:adam", "--device-budget", "2G"])
    assert result.exit_code == 2
    assert "ambiguous" in result.stderr
    assert "unmanaged" not in result.output


def test_a_budget_that_holds_everything_is_said_to(source: Path) -> None:
    result = RUN.invoke(app, ["verify", f"{source}:adam", "--device-budget", "1GiB"])
    assert "no less than the unmanaged peak" in result.output
    assert (
        "no less than" not in RUN.invoke(app, ["verify", f"{source}:adam", "--device-budget", "80%"]).output
    )


def test_debug_shows_the_traceback_wherever_it_is_put(source: Path) -> None:
    for arguments in (["--debug", "verify", f"{source}:raises"], ["verify", f"{source}:raises", "--debug"]):
        result = RUN.invoke(app, arguments)
        assert result.exit_code == 1
        assert isinstance(result.exception, ValueError)


def test_by_default_there_is_room_where_states_are_never_on_the_device(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where all steps are the host's."""
    for name in ("training", "verify"):
        module = importlib.import_module(f"hetero.cli.{name}")  # the package has a function of that name
        monkeypatch.setattr(module, "steps_differ", lambda device: True)
    result = RUN.invoke(app, ["verify", f"{source}:adam"])
    assert result.exit_code == 0, result.output
