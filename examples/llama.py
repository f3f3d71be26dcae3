"""A model of seven billion parameters, to be planned for rather than trained here.

``hetero plan examples/llama.py:seven_billion --machine rtx4090 --device-budget 20GiB``
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn


def seven_billion() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor], Callable[[Any, Tensor], Tensor]]:
    """Llama 2's shape in bfloat16, with AdamW; one text of 2048 tokens."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return model, optimizer, [torch.zeros(1, 2048, dtype=torch.long)], _loss


def _loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss
