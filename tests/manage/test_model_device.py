"""``model.device`` of models that have such a property: where inputs belong, though parameters are at home."""

import gc

import pytest
import torch
from equality import fresh_memory
from torch import nn
from twins import device

import hetero

transformers = pytest.importorskip("transformers")


def small(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, bos_token_id=1, eos_token_id=2)
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=100, n_layer=2, n_head=2, n_embd=32, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def trained_and_asked(model, optimizer, beams):
    """A loop that puts its batches where the model says it is, and generates between steps."""
    torch.manual_seed(1)
    seen = []
    for _ in range(4):
        model.train()
        tokens = torch.randint(3, 100, (2, 12)).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        start = torch.ones(2, 3, dtype=torch.long, device=model.device)
        mask = torch.ones_like(start)
        said = model.generate(
            start, attention_mask=mask, max_new_tokens=5, do_sample=False, num_beams=beams, pad_token_id=0
        )
        seen += [loss.item(), *said.tolist()]
    return seen


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("share", "beams"), [(0.6, 1), (0.6, 3), (4.0, 1)])
def test_hugging_face_models_generate_between_steps(kind, share, beams):
    target = device()
    before = fresh_memory()
    model = small(kind)
    model.to(target)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    expected = trained_and_asked(model, optimizer, beams)
    peak = torch.accelerator.max_memory_allocated() - before
    del model, optimizer
    gc.collect()

    model = small(kind)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with hetero.manage(model, optimizer, device=target, device_budget=before + int(share * peak)) as manager:
        assert model.device == manager.device
        assert model.base_model.device == manager.device
        assert trained_and_asked(model, optimizer, beams) == expected
        assert small(kind).device == torch.device("cpu")  # another of its class
    assert model.device == torch.device("cpu")


class Placed(nn.Linear):
    @property
    def device(self):
        return self.weight.device


def test_the_property_is_the_classes_own_after_the_last_manager():
    target = device()
    own = vars(Placed)["device"]
    first = hetero.manage(Placed(4, 4), device=target, device_budget="16MiB")
    second = hetero.manage(nn.Sequential(model := Placed(4, 4)), device=target, device_budget="16MiB")
    first.close()
    first.close()
    assert model.device == target
    assert model.weight.device == torch.device("cpu")
    second.close()
    assert vars(Placed)["device"] is own
    dropped = hetero.manage(Placed(4, 4), device=target, device_budget="16MiB")
    assert vars(Placed)["device"] is not own
    del dropped
    gc.collect()
    gc.collect()
    assert vars(Placed)["device"] is own
