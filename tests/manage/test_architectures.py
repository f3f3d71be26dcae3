"""Architectures of Hugging Face's transformers, small and with random weights: each trains to the same bits under about
half of the memory that it takes, and generates the same tokens in between."""

import pytest
import torch
import transformers
from torch import nn
from twins import assert_twins

import hetero
from hetero.trace import trace_recipe

VOCABULARY, WIDTH, LENGTH, SIDE = 64, 32, 16, 32

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2}
_GROUPED_BY_8 = {**_GROUPED, "head_dim": 8}
_WINDOW = {"sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_TWO_SIDED = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_PATCHES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": SIDE,
    "patch_size": 8,
}
_WINDOWS = {
    "image_size": SIDE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
_STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}

# What each configuration has beside `_TEXT` (beside nothing, for images).
CAUSAL = {
    "Llama": _GROUPED,
    "Mistral": {**_GROUPED, **_WINDOW},
    "Qwen2": _GROUPED,
    "Qwen3": _GROUPED_BY_8,
    "Gemma2": {**_GROUPED_BY_8, **_WINDOW},
    "Gemma3Text": {**_GROUPED_BY_8, **_WINDOW},
    "Phi3": _GROUPED,
    "Mixtral": {**_GROUPED, "num_local_experts": 4},
    "Qwen3Moe": {**_GROUPED_BY_8, **_EXPERTS},
    "Olmo2": _GROUPED,
    "Cohere": _GROUPED,
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "Rwkv": {"attention_hidden_size": WIDTH, "context_length": 64},
    "Jamba": {
        **_GROUPED,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "GptOss": {**_GROUPED_BY_8, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
MASKED = {
    "Bert": {},
    "Albert": {"embedding_size": 16},  # one layer's weights are used twice
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ModernBert": {},
    "Longformer": {"attention_window": 8},
    "ConvBert": {"embedding_size": WIDTH},
}
SEQUENCES = {
    "Bart": _TWO_SIDED,
    "T5": _T5,
    "SwitchTransformers": {**_T5, "num_experts": 4},
    "LED": {
        **_TWO_SIDED,
        "attention_window": 8,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
}
IMAGES = {
    "ViT": _PATCHES,
    "Beit": _PATCHES,
    "Swinv2": _WINDOWS,
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "Segformer": {**_STAGES, "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    "PoolFormer": _STAGES,
}


def config_of(name, **keywords):
    return getattr(transformers, f"{name}Config")(**keywords)


def tokens(seed, target):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator).to(target)


def loss_of_tokens(model, seed, target):
    given = tokens(seed, target)
    return model(input_ids=given, labels=given).loss


def loss_of_images(model, seed, target):
    given = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).to(target)
    return model(pixel_values=given, labels=torch.tensor([0, 1]).to(target)).loss


def assert_same_training(build, loss_of, *, share=0.5, after=None):
    """``after(model, step, target)``: what is seen in evaluation after each step."""

    def loop(model, optimizer, target):
        seen = []
        for step in range(6):
            model.train()
            loss = loss_of(model, step, target)
            loss.backward()
            seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen.append(after(model, step, target) if after else loss_of(model, step + 100, target))
        return seen

    assert_twins(build, loop, share=share)


ARCHITECTURES = [
    *(("CausalLM", name) for name in CAUSAL),
    *(("MaskedLM", name) for name in MASKED),
    *(("Seq2SeqLM", name) for name in SEQUENCES),
    *(("ImageClassification", name) for name in IMAGES),
]


def make(auto, name):
    extra = {**CAUSAL, **MASKED, **SEQUENCES, **IMAGES}[name]
    config = config_of(name, **(extra if name in IMAGES else {**_TEXT, **extra}))
    return getattr(transformers, f"AutoModelFor{auto}").from_config(config)


@pytest.mark.parametrize(("auto", "name"), ARCHITECTURES)
def test_an_architecture_trains_to_the_same_bits(auto, name):
    if name in IMAGES:
        assert_same_training(lambda: make(auto, name), loss_of_images, share=0.6)
    else:
        assert_same_training(lambda: make(auto, name), loss_of_tokens)


# They look at values: which tokens go where, whether there is global attention.
_DEPEND_ON_VALUES = ("Longformer", "LED", "SwitchTransformers")


@pytest.mark.parametrize(("auto", "name"), ARCHITECTURES)
def test_a_step_on_fake_tensors_has_the_memory_of_a_real_one(auto, name):
    loss_of = loss_of_images if name in IMAGES else loss_of_tokens

    def recipe():
        model = make(auto, name)

        def step(model, optimizer):
            loss_of(model, 0, "cpu").backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, model, torch.optim.AdamW(model.parameters(), fused=True)

    real = trace_recipe(recipe, fake=False).peak_nbytes()
    if name in _DEPEND_ON_VALUES:
        with pytest.raises(hetero.PlanError, match="trace a real step"):
            trace_recipe(recipe)
    else:
        # Of a mask that hides nothing a real step makes none.
        assert real <= trace_recipe(recipe).peak_nbytes() <= 1.04 * real


@pytest.mark.parametrize("share", [0.7, 3.0])
@pytest.mark.parametrize(
    ("auto", "name"), [("CausalLM", "Llama"), ("CausalLM", "Mamba"), ("Seq2SeqLM", "T5")]
)
def test_tokens_that_are_generated_in_between(auto, name, share):
    ways = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"do_sample": False, "num_beams": 2},
    ]

    def generate(model, step, target):
        given = tokens(step, target)
        seen = []
        for way in ways:
            torch.manual_seed(step)
            seen.append(
                model.generate(
                    input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=6, **way
                )
            )
        return seen

    assert_same_training(lambda: make(auto, name), loss_of_tokens, share=share, after=generate)
