"""timm and torchvision for tests: import this before either of them.

Beside a torch without CUDA, a torchvision that was built for CUDA cannot load its compiled operators, and then fails to
import for want of them. Networks use none, so it is enough that they are declared. This text is also run as a script,
in processes that have no codistill.
"""

import torch

OPERATORS = (
    *("nms", "qnms", "qroi_align", "deform_conv2d", "_deform_conv2d_backward"),
    *(prefix + name + suffix for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
      for prefix, suffix in (("", ""), ("_", "_backward"))),
)  # fmt: skip

try:
    import torchvision  # type: ignore[import-untyped]
except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
        raise
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(f"{operator}(Tensor x) -> Tensor")
    import torchvision

import timm  # noqa: E402

__all__ = ["timm", "torchvision"]
