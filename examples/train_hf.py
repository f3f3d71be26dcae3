"""A Hugging Face model, built from a config (nothing is downloaded), trained under a device budget.

Run it: ``pip install transformers``, then ``python examples/train_hf.py``.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hetero


def main() -> None:
    torch.manual_seed(0)
    virtual = None if torch.accelerator.is_available() else hetero.virtual_device(memory="64MiB")
    budget = "16MiB" if virtual else "80MiB"  # on a GPU, cuBLAS alone keeps up to 64 MiB
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with hetero.manage(model, optimizer, device=virtual, device_budget=budget) as manager:
        tokens = torch.randint(config.vocab_size, (2, 64), device=manager.device)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}")
        stats = manager.stats

    print(
        f"model data {stats.model_data_bytes:,} bytes, budget {stats.device_budget:,}, "
        f"peak {stats.peak_device_bytes:,}, moved in an iteration {stats.bytes_moved:,}"
    )


if __name__ == "__main__":
    main()
