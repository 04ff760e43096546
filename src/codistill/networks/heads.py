"""From feature maps to logits: the classifier of a network, and the kinds of auxiliary classifier."""

from torch import Tensor, nn
from torch.nn import functional as F

from codistill.networks.layers import norm_relu

HEAD_KINDS = ("paper", "narrow", "apfc")
"""The paper's design of the network's own blocks; the same at half the width; pooling and one linear layer."""

APFC_GRID = 4


def classifier(channels: int, num_classes: int, *, preactivated: bool = False) -> nn.Sequential:
    """Global average pooling and one linear layer; BN and ReLU first if the blocks are pre-activated."""
    activation = [norm_relu(channels)] if preactivated else []
    return nn.Sequential(*activation, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def apfc(channels: int, num_classes: int) -> nn.Sequential:
    """Average-pool to 4×4, then one linear layer."""
    return nn.Sequential(GridPool(APFC_GRID), nn.Flatten(), nn.Linear(channels * APFC_GRID**2, num_classes))


def describe_apfc() -> str:
    """What an APFC head is made of, for listings."""
    return f"averages over a {APFC_GRID}×{APFC_GRID} grid and one linear layer"


class GridPool(nn.Module):
    """Average pooling to a square grid of ``cells`` × ``cells``, for feature maps of any size."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x_BCHW: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        if height % self.cells == 0 and width % self.cells == 0:
            # The same values; adaptive pooling has no deterministic backward pass on CUDA.
            return F.avg_pool2d(x_BCHW, (height // self.cells, width // self.cells))
        return F.adaptive_avg_pool2d(x_BCHW, self.cells)
