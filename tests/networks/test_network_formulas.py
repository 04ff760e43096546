"""Every family against its paper's formulas, written down flat: the same parameters must give the same logits.

The flat forms take a network's parameters one by one in their order, so they also fix that order.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from codistill.networks.backbone import Architecture
from codistill.networks.families import architecture
from codistill.networks.resnet import PreActivationResNet


class Layers:
    """The layers of a network in training mode, each taking the parameters that come next."""

    def __init__(self, parameters: Iterator[Tensor]) -> None:
        self.next = lambda: next(parameters)

    def conv(self, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        weight = self.next()
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)

    def norm(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.next(), self.next(), training=True, eps=1e-5)

    def norm_relu(self, x: Tensor) -> Tensor:
        return self.norm(x).clamp(min=0)

    def conv_norm_relu(self, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        return self.norm_relu(self.conv(x, stride, groups))

    def conv_norm_relu6(self, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        return self.norm(self.conv(x, stride, groups)).clamp(min=0, max=6)

    def classify(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) @ self.next().T + self.next()


def cifar_resnet_8(layers: Layers, images: Tensor) -> Tensor:
    x = layers.conv_norm_relu(images)
    for stride in (1, 2, 2):
        branch = layers.norm(layers.conv(layers.conv_norm_relu(x, stride)))
        shortcut = torch.zeros_like(branch)
        shortcut[:, : x.shape[1]] = x[:, :, ::stride, ::stride]
        x = (branch + shortcut).clamp(min=0)
    return layers.classify(x)


def bottleneck_resnet_11(layers: Layers, images: Tensor) -> Tensor:
    x = layers.conv(images)
    for stride in (1, 2, 2):
        a = layers.norm_relu(x)
        x = layers.conv(layers.norm_relu(layers.conv(layers.norm_relu(layers.conv(a)), stride))) + layers.conv(
            a, stride
        )
    return layers.classify(layers.norm_relu(x))


def wide_resnet_16_2(layers: Layers, images: Tensor) -> Tensor:
    x = layers.conv(images)
    for stride in (1, 2, 2):
        a = layers.norm_relu(x)
        x = layers.conv(layers.norm_relu(layers.conv(a, stride))) + layers.conv(a, stride)
        x = x + layers.conv(layers.norm_relu(layers.conv(layers.norm_relu(x))))
    return layers.classify(layers.norm_relu(x))


def densenet_10_4(layers: Layers, images: Tensor) -> Tensor:
    x = layers.conv(images)
    for stage in (1, 2, 3):
        if stage > 1:
            x = F.avg_pool2d(layers.conv(layers.norm_relu(x)), 2)
        for _ in range(2):
            x = torch.cat([x, layers.conv(layers.norm_relu(x))], dim=1)
    return layers.classify(layers.norm_relu(x))


def mobilenet(layers: Layers, images: Tensor) -> Tensor:
    x = layers.conv_norm_relu(images)
    for stride in (1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1):
        x = layers.conv_norm_relu(layers.conv_norm_relu(x, stride, groups=x.shape[1]))
    return layers.classify(x)


def imagenet_stem(layers: Layers, images: Tensor) -> Tensor:
    return F.max_pool2d(layers.conv_norm_relu(images, stride=2), 3, stride=2, padding=1)


def resnet_18(layers: Layers, images: Tensor) -> Tensor:
    x = imagenet_stem(layers, images)
    for stage in (1, 2, 3, 4):
        for block in (1, 2):
            stride = 2 if stage > 1 and block == 1 else 1
            branch = layers.norm(layers.conv(layers.conv_norm_relu(x, stride)))
            x = (branch + (layers.norm(layers.conv(x, stride)) if stride == 2 else x)).clamp(min=0)
    return layers.classify(x)


def resnet_50(layers: Layers, images: Tensor) -> Tensor:
    x = imagenet_stem(layers, images)
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            branch = layers.norm(layers.conv(layers.conv_norm_relu(layers.conv_norm_relu(x), stride)))
            x = (branch + (layers.norm(layers.conv(x, stride)) if block == 0 else x)).clamp(min=0)
    return layers.classify(x)


def mobilenet_v2(layers: Layers, images: Tensor) -> Tensor:
    x = layers.conv_norm_relu6(images, stride=2)
    for factor, blocks, first_stride in ((1, 1, 1), (6, 2, 2), (6, 3, 2), (6, 4, 2), (6, 3, 1), (6, 3, 2), (6, 1, 1)):
        for block in range(blocks):
            wide = layers.conv_norm_relu6(x) if factor > 1 else x
            filtered = layers.conv_norm_relu6(wide, first_stride if block == 0 else 1, groups=wide.shape[1])
            narrow = layers.norm(layers.conv(filtered))
            x = x + narrow if block > 0 else narrow
    return layers.classify(layers.conv_norm_relu6(x))


@pytest.mark.parametrize(
    ("network", "formula", "size"),
    [
        (architecture("resnet-8"), cifar_resnet_8, 16),
        (PreActivationResNet(11), bottleneck_resnet_11, 16),
        (architecture("wrn-16-2"), wide_resnet_16_2, 16),
        (architecture("densenet-10-4"), densenet_10_4, 16),
        (architecture("mobilenet"), mobilenet, 8),
        (architecture("resnet-18"), resnet_18, 64),
        (architecture("resnet-50"), resnet_50, 64),
        (architecture("mobilenetv2"), mobilenet_v2, 64),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_networks_compute_their_papers_formulas(
    network: Architecture, formula: Callable[[Layers, Tensor], Tensor], size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    backbone = network.backbone(num_classes=5).double().train()
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.ndim == 1:  # norms that start from 1 and 0 would hide a swap
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
        images = torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64)
        parameters = iter(list(backbone.parameters()))
        expected = formula(Layers(parameters), images)
        torch.testing.assert_close(backbone(images), expected, rtol=1e-8, atol=1e-8)
    assert next(parameters, None) is None
