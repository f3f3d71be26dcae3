"""Convolutional networks in plain torch, as recipes for tracing and planning.

VGG11/13/16/19 and ResNet18/34/50/101 for CIFAR-10 images (3 x 32 x 32, the networks of the SmartPool paper:
VGG with batch normalisation and one hidden layer, ResNet with a 3 x 3 stem), and AlexNet for ImageNet images
(3 x 224 x 224). Every recipe returns ``(step, model, optimizer, images, labels)``:

    hetero trace examples/cnn.py:vgg16
    python examples/cnn.py                    # all of them, traced without memory
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VGG_LAYERS: dict[str, list[int | str]] = {
    "vgg11": [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"],
    "vgg13": [64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"],
    "vgg16": [*(64, 64, "M", 128, 128, "M"), *(256, 256, 256, "M"), *(512, 512, 512, "M") * 2],
    "vgg19": [*(64, 64, "M", 128, 128, "M"), *(256, 256, 256, 256, "M"), *(512, 512, 512, 512, "M") * 2],
}
RESNET_BLOCKS: dict[str, tuple[str, list[int]]] = {
    "resnet18": ("basic", [2, 2, 2, 2]),
    "resnet34": ("basic", [3, 4, 6, 3]),
    "resnet50": ("bottleneck", [3, 4, 6, 3]),
    "resnet101": ("bottleneck", [3, 4, 23, 3]),
}


def vgg(name: str, classes: int = 10) -> nn.Module:
    """A VGG for 32 x 32 images (Simonyan and Zisserman 2014, with batch normalisation)."""
    layers: list[nn.Module] = []
    width = 3
    for layer in VGG_LAYERS[name]:
        if isinstance(layer, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(width, layer, 3, padding=1), nn.BatchNorm2d(layer), nn.ReLU(inplace=True)]
            width = layer
    head = [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(512, classes)]
    return nn.Sequential(*layers, *head)


class Block(nn.Module):
    """A residual block, basic or bottleneck (He et al. 2015)."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            convolutions = [
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
                nn.Conv2d(width, outputs, 1, bias=False),
            ]
        else:
            convolutions = [
                nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
            ]
        layers: list[nn.Module] = []
        for convolution in convolutions:
            layers += [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return functional.relu(out + self.shortcut(x), inplace=True)


def resnet(name: str, classes: int = 10) -> nn.Module:
    """A ResNet for 32 x 32 images: the ImageNet stages behind a 3 x 3 stem without pooling."""
    kind, stages = RESNET_BLOCKS[name]
    expansion = 4 if kind == "bottleneck" else 1
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
    ]
    inputs = 64
    for stage, blocks in enumerate(stages):
        width = 64 * 2**stage
        for index in range(blocks):
            stride = 2 if stage and not index else 1
            layers.append(Block(inputs, width, stride, bottleneck=kind == "bottleneck"))
            inputs = expansion * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def alexnet(classes: int = 1000) -> nn.Module:
    """AlexNet in one tower (Krizhevsky 2014) for 224 x 224 images."""
    relu = partial(nn.ReLU, inplace=True)
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, padding=2), relu(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), relu(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), relu()),
        *(nn.Conv2d(384, 256, 3, padding=1), relu()),
        *(nn.Conv2d(256, 256, 3, padding=1), relu(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), relu()),
        *(nn.Dropout(), nn.Linear(4096, 4096), relu(), nn.Linear(4096, classes)),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """One iteration of a plain training loop."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def recipe(name: str, batch: int = 100) -> tuple[Any, ...]:
    """``(step, model, optimizer, images, labels)`` of the network called ``name``."""
    model = vgg(name) if name in VGG_LAYERS else resnet(name) if name in RESNET_BLOCKS else alexnet()
    side = 224 if name == "alexnet" else 32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.zeros(batch, 3, side, side)
    labels = torch.zeros(batch, dtype=torch.long)
    return train_step, model, optimizer, images, labels


NETWORKS = (*VGG_LAYERS, *RESNET_BLOCKS, "alexnet")
vgg11, vgg13, vgg16, vgg19 = (partial(recipe, name) for name in VGG_LAYERS)
resnet18, resnet34, resnet50, resnet101 = (partial(recipe, name) for name in RESNET_BLOCKS)


def main() -> None:
    from hetero.pool.greedy import smartpool
    from hetero.trace import trace_recipe
    from hetero.units import format_bytes

    for name in NETWORKS:
        trace = trace_recipe(partial(recipe, name))
        peak = trace.peak_nbytes()
        ratio = smartpool(trace.to_problem()).footprint / peak
        sizes = f"{trace.span:5d} operators, {len(trace.storages):5d} storages, peak {format_bytes(peak):>9}"
        print(f"{name:<10}{sizes}, SmartPool {ratio:.4f} x peak")


if __name__ == "__main__":
    main()
