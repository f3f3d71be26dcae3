"""Small transformers, built from configurations: nothing is downloaded, and what is not named is their authors'."""

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def gpt2(*, width: int, layers: int, heads: int, vocabulary: int, length: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def llama(
    *, width: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int
) -> LlamaForCausalLM:
    """``groups`` of heads share keys and values; ``inner`` is the width between the two products of a layer."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
    )
    return LlamaForCausalLM(config)
