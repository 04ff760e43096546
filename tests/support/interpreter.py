"""The Triton kernels on the CPU, in Triton's interpreter: prints how far each is from torch in float64.

    TRITON_INTERPRET=1 PYTHONPATH=…/triton:tests python -m support.interpreter

It shows that kernels and their gradients compute what they should; not how fast, nor that they compile.
"""

import copy
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from codistill.data.augmentation import augment
from codistill.data.batches import plan_epoch
from codistill.networks.families import architecture
from codistill.networks.layers import Conv2d
from codistill.ops import conv_small, conv_winograd, dispatch, grid
from codistill.ops.augment import crop_flip_normalise
from codistill.ops.conv_winograd import WinogradConv2d
from codistill.recipes.sections import Augment

NETWORKS = ("wrn-10-1", "wrn-16-2", "resnet-8", "resnet-20", "densenet-10-12")


def as_on_a_gpu() -> None:
    """Let the kernels run on tensors of the CPU; four programs share each reduction."""
    capable = dispatch.is_supported

    class Seen:
        """The tensor as the rule sees it: on a GPU."""

        is_cuda = True

        def __init__(self, tensor: Tensor) -> None:
            self.dtype, self.is_contiguous = tensor.dtype, tensor.is_contiguous

    dispatch.is_supported = lambda x_BCHW, layer: capable(Seen(x_BCHW), layer)  # type: ignore[arg-type]
    for module in (grid, conv_small, conv_winograd):
        module.sm_count = lambda device: 4  # type: ignore[attr-defined]
    torch.cuda.synchronize = lambda device=None: None


def furthest(found: Iterable[Tensor], truth: Iterable[Tensor]) -> float:
    """The largest relative length of a difference."""
    pairs = zip(found, truth, strict=True)
    return max((torch.dist(a.double(), b) / b.norm().clamp(min=1e-6)).item() for a, b in pairs if a.is_floating_point())


def everything(run: nn.Module, forward: Callable[[Tensor], list[Tensor]], x: Tensor) -> list[Tensor]:
    """Outputs, all gradients and running statistics."""
    x = x.clone().requires_grad_()
    outputs = forward(x)
    # Sums of squares, so that the gradient of every output differs.
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    gradients = [tensor.grad for tensor in (x, *run.parameters()) if tensor.grad is not None]
    return [*outputs, *gradients, *run.buffers()]


def of_network(name: str) -> float:
    """A network with its heads: values, gradients, running statistics."""
    torch.manual_seed(0)
    design = architecture(name)
    parts = {"network": design.backbone(10)} | {exit.name: design.head(exit.name, "paper", 10) for exit in design.exits}
    ours: nn.ModuleDict = nn.ModuleDict(parts).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = copy.deepcopy(ours).double()
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)

    def outputs(modules: Any, images: Tensor) -> list[Tensor]:
        features = modules["network"].features(images)
        return [features["final"], *(modules[exit.name](features[exit.name]) for exit in design.exits)]

    truth = everything(exact, partial(outputs, exact), x.double())
    with dispatch.use_kernels():
        return furthest(everything(ours, partial(outputs, ours), x), truth)


def of_winograd() -> float:
    """A convolution by Winograd's method. From float32, since the interpreter's bfloat16 is not a GPU's."""
    torch.manual_seed(0)
    ours: Conv2d = Conv2d(32, 48, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = copy.deepcopy(ours).double()
    x = torch.randn(3, 32, 8, 12).to(memory_format=torch.channels_last)
    truth = everything(exact, lambda images: [exact(images)], x.double())

    def forward(images: Tensor) -> list[Tensor]:
        return [WinogradConv2d.apply(images, ours.weight, None)]

    return furthest(everything(ours, forward, x), truth)


def of_augmentation() -> float:
    """A crop, a flip and the normalisation, for both kinds of padding."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (7, 3, 11, 9), generator=generator, dtype=torch.uint8)
    mean, std = torch.rand(3, generator=generator), torch.rand(3, generator=generator) + 0.1
    errors = []
    for settings in (Augment(), Augment(padding="reflect"), Augment(pad=2, crop=6), Augment(pad=0)):
        draws = plan_epoch(7, 0, 1, batch_size=7, settings=settings, image_size=(11, 9)).step(0)
        found = crop_flip_normalise(
            pixels, mean, std, draws.crops, draws.flips, size=settings.crop_size((11, 9)), pad=settings.pad,
            reflects=settings.padding == "reflect",
        )  # fmt: skip
        errors.append(furthest([found], [augment(pixels, draws, settings, mean, std).double()]))
    return max(errors)


CHECKS: dict[str, Callable[[], float]] = {
    **{name: partial(of_network, name) for name in NETWORKS},
    "winograd": of_winograd,
    "augmentation": of_augmentation,
}


def main() -> None:
    as_on_a_gpu()
    torch.set_num_threads(1)
    print(json.dumps({name: check() for name, check in CHECKS.items()}))


if __name__ == "__main__":
    main()
