"""How far kernels of the paper's time were from the roofline, from published figures. Nothing is fitted.

Owns the figures: forward and backward of 16 images of 224 x 224 in Torch with cuDNN 5.1 on a Pascal Titan X (10.97
Tflop/s, 480 GB/s; a GTX 1080 Ti has 11.34 and 484), in ms, from J. Johnson, github.com/jcjohnson/cnn-benchmarks. The
same networks are traced and put on that card's roofline; measured over roofline is the factor. VGG is below 1:
Winograd's convolutions multiply less often than the direct ones that are counted.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from examples import cnn
from hetero.simulate import GTX_1080_TI
from hetero.trace import operator_seconds, trace_recipe

__all__ = ["MEASURED_MS", "slowdown"]

MEASURED_MS = {
    "vgg16": 128.62,
    "vgg19": 147.32,
    "resnet18": 31.54,
    "resnet34": 51.59,
    "resnet50": 103.58,
    "resnet101": 156.44,
}
_TITAN_X_PASCAL = replace(GTX_1080_TI, name="Titan X (Pascal)", flops=10.97e12, memory_bandwidth=480e9)
_BATCH = 16


def slowdown(name: str) -> float:
    """Measured over roofline; of VGG16 for the shorter ones, of which there is no figure."""
    known = name if name in MEASURED_MS else "vgg16"
    trace = trace_recipe(partial(_recipe, known))
    seconds = operator_seconds(trace, _TITAN_X_PASCAL)
    measured_part = sum(
        s for s, operator in zip(seconds, trace.operators, strict=True) if operator.phase != "step"
    )
    return MEASURED_MS[known] / 1e3 / measured_part


def _recipe(name: str) -> tuple[Any, ...]:
    model = _vgg(name) if name in cnn.VGG_LAYERS else _resnet(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.zeros(_BATCH, dtype=torch.long)
    return cnn.train_step, model, optimizer, torch.zeros(_BATCH, 3, 224, 224), labels


def _vgg(name: str) -> nn.Module:
    """As published in 2014: no batch normalisation, two hidden layers."""
    layers: list[nn.Module] = []
    width = 3
    for layer in cnn.VGG_LAYERS[name]:
        if isinstance(layer, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(width, layer, 3, padding=1), nn.ReLU(inplace=True)]
            width = layer
    layers.append(nn.Flatten())
    for inputs in (width * 7 * 7, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


def _resnet(name: str) -> nn.Module:
    """With the stem for ImageNet."""
    _, *rest = cnn.resnet(name, 1000).children()
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), *rest[:2], nn.MaxPool2d(3, 2, 1), *rest[2:]
    )
