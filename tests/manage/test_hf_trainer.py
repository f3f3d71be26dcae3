"""Hugging Face's Trainer on a managed model, nothing of it changed: it moves the model to the device, accumulates,
clips, evaluates, writes checkpoints and resumes from them."""

import accelerate
import pytest
import small_transformers
import torch
from accelerators import device
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from twins import assert_same, managed, unmanaged

VOCABULARY, LENGTH = 64, 16
STEPS, SAVED = 9, 4


class Arguments(TrainingArguments):
    """Trainer and Accelerate know devices by name: here they are told of ours."""

    @property
    def device(self):
        super().device  # noqa: B018  # sets up what else they need
        return device()


class Texts(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (24, LENGTH), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


@pytest.fixture(autouse=True)
def on_our_device(monkeypatch):
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda self: device()))


def gpt2():
    return small_transformers.gpt2(width=64, layers=3, heads=4, vocabulary=VOCABULARY, length=LENGTH)


def train(model, optimizer, folder, *, resume=None):
    """Losses, norms and evaluations as the Trainer logs them."""
    arguments = Arguments(
        output_dir=str(folder),
        use_cpu=device().type == "virtual",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        optimizers=(optimizer, schedule),
    )
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_gives_the_same_numbers(tmp_path, checkpointing):
    def loop(model, optimizer, target):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return train(model, optimizer, tmp_path)

    expected, parameters, peak = unmanaged(gpt2, loop)
    got, state, manager = managed(gpt2, loop, int(0.6 * peak))
    assert len(got) == STEPS + STEPS // 3 + 1
    assert_same(got, expected, "logged")
    assert_same(state, parameters, "parameters")
    assert manager.stats.total_fetched_bytes > 0


def test_where_everything_fits_it_trains_an_ordinary_model(tmp_path):
    def loop(model, optimizer, target):
        return train(model, optimizer, tmp_path)

    def make_fused(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def make_open(model):  # the kernels of ``fused=True`` are chosen, by a step around torch's
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    expected, parameters, peak = unmanaged(gpt2, loop, make_fused)
    got, state, manager = managed(gpt2, loop, 4 * peak, make_open)
    assert_same(got, expected, "logged")
    assert_same(state, parameters, "parameters")
    assert manager.stats.settled_forwards > 0


def test_resuming_gives_the_same_numbers_as_not_stopping(tmp_path):
    def whole(model, optimizer, target):
        return train(model, optimizer, tmp_path)

    def resumed(model, optimizer, target):
        return train(model, optimizer, tmp_path, resume=str(tmp_path / f"checkpoint-{SAVED}"))

    expected, parameters, peak = unmanaged(gpt2, whole)
    got, state, _ = managed(gpt2, resumed, int(0.6 * peak))
    assert_same(got[-4:], expected[-4:], "logged")
    assert_same(state, parameters, "parameters")
