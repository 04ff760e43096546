"""The zoo of docs/zoo.md: what was found of its networks holds; they learn, leave and are loaded by their library."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from codistill.cohort import Cohort
from support.stress import STRESS
from support.zoo_check import CLASSES, PARTNER, check_on_meta, plain, take_steps

MEASURED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "measured" / "zoo.json").read_text(encoding="utf-8")
)
NETWORKS: dict[str, dict[str, Any]] = MEASURED["networks"]
LARGEST = 100_000_000  # parameters

# Fast to train, and as different as possible; with the side of their images.
TRAINED = {
    **dict.fromkeys(("timm:starnet_s050", "timm:dla46x_c", "timm:ese_vovnet19b_slim_dw", "timm:repghostnet_050"), 32),
    **dict.fromkeys(("timm:cs3darknet_focus_s", "timm:mambaout_femto", "timm:poolformerv2_s12", "timm:rexnet_100"), 32),
    **dict.fromkeys(("timm:pvt_v2_b0", "timm:xcit_nano_12_p8_224"), 32),
    **dict.fromkeys(("timm:mobilevit_xxs", "timm:edgenext_xx_small", "timm:fastvit_t8", "timm:swiftformer_xs"), 64),
    **dict.fromkeys(("timm:efficientvim_m1", "timm:hrnet_w18_small", "timm:mvitv2_tiny"), 64),
    "torchvision:googlenet": 64,
    "torchvision:mnasnet0_5": 64,  # smaller ones overflow in the library's own evaluation mode
    "torchvision:mobilenet_v3_small": 32,
}


def test_every_network_of_the_zoo_can_be_used() -> None:
    assert [name for name, found in NETWORKS.items() if "error" in found] == []
    assert sum(name.startswith("timm:") for name in NETWORKS) > 90
    assert sum(name.startswith("torchvision:") for name in NETWORKS) == 80
    assert [name for name, found in NETWORKS.items() if set(found["heads"]) != {"c2", "c3"}] == []
    assert len(TRAINED) == 20


@pytest.mark.parametrize("name", list(NETWORKS) if STRESS else list(NETWORKS)[::25])
def test_what_was_found_holds(name: str) -> None:
    found = check_on_meta(name)
    assert json.loads(json.dumps(vars(found))) == NETWORKS[name]


@pytest.mark.parametrize(
    "name", [name for name, found in NETWORKS.items() if found["parameters"] < LARGEST] if STRESS else TRAINED
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_each_learns_and_leaves_as_the_librarys_own(name: str) -> None:
    side = TRAINED.get(name, NETWORKS[name]["image_size"])
    cohort = Cohort({"a": name, "b": PARTNER}, CLASSES, seed=1, image_size=(side, side))
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(4, 3, side, side, generator=generator), torch.tensor([0, 1, 2, 3])
    assert all(torch.tensor(take_steps(cohort, images, labels, steps=1)).isfinite())
    stripped, reference = cohort.strip("a").eval(), plain(name).eval()
    reference.load_state_dict(stripped.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(reference(images), cohort.eval()(images)["a/final"])
