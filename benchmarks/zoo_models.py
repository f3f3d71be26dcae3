"""What `benchmarks.zoo` trains: models of other libraries, as they come, small and with random weights.

Owns which, and the loss of each. A library is handed in by who has imported it: none of them is needed here.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LIBRARIES", "Loss", "Model"]

Loss = Callable[[nn.Module, int, torch.device], Tensor]
"""Of a model, on the batch with a number."""


@dataclass(frozen=True, slots=True)
class Model:
    """Of a library."""

    name: str
    build: Callable[[], nn.Module]
    loss: Loss


_TIMM = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_atto",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "resnet18",
    "regnetx_002",
    "mixer_s32_224",
    "gmlp_s16_224",
    "coat_tiny",
    "pit_ti_224",
    "levit_128s",
    "xcit_nano_12_p16_224",
    "eva02_tiny_patch14_224",
    "maxvit_rmlp_pico_rw_256",
    "edgenext_xx_small",
    "fastvit_t8",
    "repvgg_a0",
    "ghostnet_050",
    "hrnet_w18_small",
    "inception_v3",
    "nfnet_l0",
    "resnest14d",
    "skresnet18",
    "volo_d1_224",
    "cait_xxs24_224",
    "convit_tiny",
    "twins_pcpvt_small",
    "poolformer_s12",
    "mobilevit_xxs",
    "tiny_vit_5m_224",
    "davit_tiny",
    "nest_tiny",
    "visformer_tiny",
    "vgg11",
    "densenet121",
    "dla34",
    "dpn48b",
    "selecsls42",
    "hiera_tiny_224",
)
_TORCHVISION = (
    "squeezenet1_1",
    "googlenet",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "resnext50_32x4d",
    "regnet_y_400mf",
    "efficientnet_v2_s",
    "swin_v2_t",
    "convnext_tiny",
)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _of_images(side: int, *, times: int | None = None) -> Loss:
    """``times``: frames of a film."""
    shape = (2, 3, side, side) if times is None else (1, 3, times, side, side)

    def loss(module: nn.Module, seed: int, device: torch.device) -> Tensor:
        out: Any = module(_random(seed, *shape).to(device))
        out = out["out"] if isinstance(out, dict) else getattr(out, "logits", out)
        out = out[0] if isinstance(out, list | tuple) else out
        return out.float().square().mean()  # type: ignore[no-any-return]

    return loss


def _timm(timm: Any) -> Iterator[Model]:
    for name in _TIMM:
        side = 96 if name == "inception_v3" else 64
        yield Model(name, partial(_sized, timm, name), _of_images(side))


def _sized(timm: Any, name: str) -> nn.Module:
    try:
        return timm.create_model(name, num_classes=10, img_size=64)  # type: ignore[no-any-return]
    except TypeError:  # of any size
        return timm.create_model(name, num_classes=10)  # type: ignore[no-any-return]


def _torchvision(torchvision: Any) -> Iterator[Model]:
    models = torchvision.models
    for name in _TORCHVISION:
        yield Model(name, partial(getattr(models, name), num_classes=10), _of_images(64))
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        make = getattr(models.segmentation, name)
        yield Model(name, partial(make, weights_backbone=None, num_classes=3), _of_images(64))
    yield Model("r3d_18", partial(models.video.r3d_18, num_classes=5), _of_images(32, times=4))


def _segmentation(smp: Any) -> Iterator[Model]:
    for name in ("Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus", "Linknet", "MAnet", "Segformer"):
        make = partial(getattr(smp, name), "resnet18", encoder_weights=None, classes=2)
        yield Model(name, make, _of_images(64))


def _diffusers(diffusers: Any) -> Iterator[Model]:
    unet = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 8,
    }
    down = ("CrossAttnDownBlock2D", "DownBlock2D")
    conditioned = {**unet, "cross_attention_dim": 32, "down_block_types": down}

    def conditional() -> Any:
        return diffusers.UNet2DConditionModel(
            **conditioned, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")
        )

    def checkpointed() -> Any:
        module = conditional()
        module.enable_gradient_checkpointing()
        return module

    def noise_of(module: Any, seed: int, device: torch.device) -> Tensor:
        return _of_sample(module, device, **_noise(seed))

    yield Model("UNet2DConditionModel", conditional, noise_of)
    yield Model("the same, checkpointed", checkpointed, noise_of)
    yield Model(
        "UNet2DModel",
        lambda: diffusers.UNet2DModel(
            **unet,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        lambda module, seed, device: _of_sample(
            module, device, sample=_random(seed, 2, 3, 16, 16), timestep=torch.tensor(seed % 10)
        ),
    )
    yield Model(
        "ControlNetModel",
        lambda: diffusers.ControlNetModel(
            **{k: v for k, v in conditioned.items() if k != "sample_size"},
            conditioning_embedding_out_channels=(8, 16),
        ),
        _of_control,
    )
    yield Model(
        "AutoencoderKL",
        lambda: diffusers.AutoencoderKL(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
        ),
        lambda module, seed, device: _of_sample(module, device, sample=_random(seed, 1, 3, 32, 32)),
    )
    yield Model(
        "SD3Transformer2DModel",
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
        ),
        lambda module, seed, device: _of_sample(
            module,
            device,
            hidden_states=_random(seed, 2, 4, 8, 8),
            encoder_hidden_states=_random(seed + 1, 2, 5, 32),
            pooled_projections=_random(seed + 2, 2, 64),
            timestep=torch.tensor([3.0, 5.0]),
        ),
    )
    yield Model(
        "FluxTransformer2DModel",
        lambda: diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        ),
        lambda module, seed, device: _of_sample(
            module,
            device,
            hidden_states=_random(seed, 1, 16, 4),
            encoder_hidden_states=_random(seed + 1, 1, 5, 32),
            pooled_projections=_random(seed + 2, 1, 32),
            timestep=torch.tensor([0.5]),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(5, 3),
        ),
    )


def _noise(seed: int) -> dict[str, Tensor]:
    """What a UNet and its control are given."""
    return {
        "sample": _random(seed, 2, 4, 16, 16),
        "timestep": torch.tensor([seed % 10, 5]),
        "encoder_hidden_states": _random(seed + 1, 2, 7, 32),
    }


def _of_sample(module: Any, device: torch.device, **given: Tensor) -> Tensor:
    sample: Tensor = module(**{name: value.to(device) for name, value in given.items()}).sample
    return sample.square().mean()


def _of_control(module: Any, seed: int, device: torch.device) -> Tensor:
    given = {**_noise(seed), "controlnet_cond": _random(seed + 2, 2, 3, 32, 32)}
    samples = module(**{name: value.to(device) for name, value in given.items()}).down_block_res_samples
    return torch.stack([sample.square().mean() for sample in samples]).sum()


def _peft(peft: Any) -> Iterator[Model]:
    import transformers

    some = {"target_modules": ["q_proj", "v_proj"]}
    causal = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    configs = {
        "LoRA": peft.LoraConfig(r=4, **some),
        "LoRA of all linear layers, with dropout": peft.LoraConfig(
            r=4, target_modules="all-linear", lora_dropout=0.1
        ),
        "DoRA": peft.LoraConfig(r=4, use_dora=True, **some),
        "rsLoRA, with a trained head": peft.LoraConfig(
            r=4, use_rslora=True, modules_to_save=["lm_head"], **some
        ),
        "AdaLoRA": peft.AdaLoraConfig(total_step=20, init_r=6, target_r=4, **some),
        "LoHa": peft.LoHaConfig(r=4, **some),
        "OFT": peft.OFTConfig(oft_block_size=8, **some),
        "BOFT": peft.BOFTConfig(boft_block_size=4, **some),
        "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
        "RandLoRA": peft.RandLoraConfig(r=4, **some),
        "HRA": peft.HRAConfig(r=4, **some),
        "FourierFT": peft.FourierFTConfig(n_frequency=20, **some),
        "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "LN tuning": peft.LNTuningConfig(),
        "prefix tuning": peft.PrefixTuningConfig(**causal),
        "prompt tuning": peft.PromptTuningConfig(**causal),
        "P-tuning": peft.PromptEncoderConfig(encoder_hidden_size=16, **causal),
    }

    def build(config: Any) -> Any:
        llama = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            pad_token_id=0,
        )
        return peft.get_peft_model(transformers.LlamaForCausalLM(llama), copy.deepcopy(config))

    def loss(module: Any, seed: int, device: torch.device) -> Tensor:
        tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed)).to(device)
        return module(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    for name, config in configs.items():
        yield Model(name, partial(build, config), loss)


class _Graph(nn.Module):
    """Two convolutions over the same edges."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(16, 32), make(32, 16)
        edges = torch.randint(0, 40, (2, 160), generator=torch.Generator().manual_seed(0))
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, self.edges).relu(), self.edges)
        return out


def _graphs(geometric: Any) -> Iterator[Model]:
    layers = importlib.import_module(f"{geometric.__name__}.nn")
    plain = ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv", "TAGConv", "ARMAConv"]
    makes: dict[str, Callable[[int, int], nn.Module]] = {name: getattr(layers, name) for name in plain}
    makes["ChebConv"] = lambda width, out: layers.ChebConv(width, out, 3)
    makes["GINConv"] = lambda width, out: layers.GINConv(nn.Linear(width, out))
    for name, make in makes.items():
        yield Model(
            name,
            partial(_Graph, make),
            lambda module, seed, device: module(_random(seed, 40, 16).to(device)).square().mean(),
        )


def _volumes(monai: Any) -> Iterator[Model]:
    """Of tensors of that library's own class, which carry what is known of the patient; so do results."""
    nets = importlib.import_module(f"{monai.__name__}.networks.nets")
    losses, data = (importlib.import_module(f"{monai.__name__}.{part}") for part in ("losses", "data"))
    side, kernels, strides = 32, [[3] * 3] * 3, [[1] * 3, [2] * 3, [2] * 3]
    vit = {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
    makes: dict[str, Callable[[], nn.Module]] = {
        "UNet": partial(nets.UNet, 3, 1, 2, (8, 16, 32), (2, 2)),
        "BasicUNet": partial(nets.BasicUNet, 3, 1, 2, features=(8, 8, 16, 16, 16, 8)),
        "AttentionUnet": partial(nets.AttentionUnet, 3, 1, 2, (8, 16, 32), (2, 2)),
        "DynUNet": partial(nets.DynUNet, 3, 1, 2, kernels, strides, strides[1:], filters=(8, 16, 32)),
        "VNet": partial(nets.VNet, 3, 1, 2),
        "SegResNet": partial(nets.SegResNet, 3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)),
        "HighResNet": partial(nets.HighResNet, 3, 1, 2),
        "UNETR": partial(nets.UNETR, 1, 2, (side,) * 3, feature_size=4, **vit),
        "DenseNet121": partial(nets.DenseNet121, spatial_dims=3, in_channels=1, out_channels=2),
        "EfficientNetBN": partial(nets.EfficientNetBN, "efficientnet-b0", False, False, 3, 1, 2),
        "ViT": partial(nets.ViT, 1, (side,) * 3, (8,) * 3, num_layers=4, classification=True, **vit),
    }

    def loss(module: nn.Module, seed: int, device: torch.device) -> Tensor:
        x = data.MetaTensor(_random(seed, 2, 1, side, side, side), meta={"patient": seed}).to(device)
        out: Any = module(x)
        out = out[0] if isinstance(out, list | tuple) else out
        assert out.meta["patient"] == seed
        if out.dim() < x.dim():  # classes
            total = nn.functional.cross_entropy(out, torch.tensor([0, 1], device=device))
        else:
            total = losses.DiceCELoss(to_onehot_y=True, softmax=True)(out, (x > 0).long())
        return total.as_subclass(Tensor)

    for name, make in makes.items():
        yield Model(name, make, loss)


LIBRARIES: dict[str, Callable[[Any], Iterator[Model]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "segmentation_models_pytorch": _segmentation,
    "diffusers": _diffusers,
    "peft": _peft,
    "torch_geometric": _graphs,
    "monai": _volumes,
}
