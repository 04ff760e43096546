"""Cohorts: what they return, how they start, what is stripped from them, and what they refuse."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from codistill.cohort import Cohort, Member
from codistill.networks.backbone import Architecture, Backbone, Exit
from codistill.networks.families import architecture
from codistill.randomness import derive

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def weights(cohort: Cohort, prefix: str) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in cohort.state_dict().items() if name.startswith(prefix)}
    assert found
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_cohort_names_every_classifier_in_the_outlines_order() -> None:
    cohort = Cohort({"a": "wrn-10-1", "b": "resnet-8"}, num_classes=5).eval()
    logits = cohort(IMAGES)
    assert list(logits) == ["a/final", "a/stage2", "a/stage1", "b/final", "b/stage2", "b/stage1"]
    assert list(logits) == [classifier.name for classifier in cohort.outline.classifiers]
    assert [classifier.stage for classifier in cohort.outline.classifiers] == [1, 2, 3] * 2
    assert {tuple(z.shape) for z in logits.values()} == {(3, 5)}


def test_the_trunk_runs_once() -> None:
    cohort = Cohort({"a": "resnet-8"}, 5)
    runs = []
    for stage in cohort.members["a"].backbone.stages.values():
        stage.register_forward_hook(lambda *_: runs.append(1))
    cohort(IMAGES)
    assert len(runs) == 4


@pytest.mark.parametrize(
    ("exits", "expected"),
    [
        (None, ["a/final", "a/stage2", "a/stage1", "b/final", "b/stage2", "b/stage1"]),
        (("stage1",), ["a/final", "a/stage1", "b/final", "b/stage1"]),
        ((), ["a/final", "b/final"]),
        (
            {"a": ("stem", "stage1", "stage2"), "b": ()},
            ["a/final", "a/stage2", "a/stage1", "a/stem", "b/final"],
        ),
    ],
)
def test_heads_hang_at_the_exits_asked_for(exits: object, expected: list[str]) -> None:
    cohort = Cohort({"a": "wrn-10-1", "b": "mobilenet"}, 4, exits=exits)  # type: ignore[arg-type]
    assert [classifier.name for classifier in cohort.outline.classifiers] == expected
    built = [f"{name}/{exit_name}" for name, member in cohort.members.items() for exit_name in member.heads]
    assert built == [name for name in expected if not name.endswith("/final")]


def test_a_network_starts_from_its_seed_and_name_alone() -> None:
    first = Cohort({"a": "wrn-10-1", "b": "wrn-10-1"}, 5, seed=3)
    reference = weights(first, "members.a.backbone")
    variants = [
        Cohort({"b": "mobilenet", "a": "wrn-10-1"}, 5, seed=3),
        Cohort({"a": "wrn-10-1"}, 5, seed=3, exits=()),
        Cohort({"a": "wrn-10-1"}, 5, seed=3, exits=("stem",), heads="apfc"),
    ]
    assert all(same(reference, weights(variant, "members.a.backbone")) for variant in variants)
    other_seed = Cohort({"a": "wrn-10-1"}, 5, seed=4, exits=())
    assert not same(reference, weights(other_seed, "members.a.backbone"))
    twin = {name.replace("members.b", "members.a"): w for name, w in weights(first, "members.b.backbone").items()}
    convolutions = [name for name in reference if reference[name].ndim == 4]
    assert len(convolutions) == 9  # a stem, three blocks of two, and two projections
    assert not any(torch.equal(reference[name], twin[name]) for name in convolutions)


def test_a_head_starts_from_its_seed_and_address_alone() -> None:
    both = Cohort({"a": "wrn-10-1"}, 5, seed=3)
    alone = Cohort({"a": "wrn-10-1"}, 5, seed=3, exits=("stage1",))
    assert same(weights(both, "members.a.heads.stage1"), weights(alone, "members.a.heads.stage1"))


def test_a_network_can_be_had_without_a_cohort_from_the_derived_seed() -> None:
    cohort = Cohort({"a": "resnet-8"}, 5, seed=9, exits=())
    with torch.random.fork_rng():
        torch.manual_seed(derive(9, "init", "a"))
        alone = architecture("resnet-8").backbone(5)
    assert same(alone.state_dict(), cohort.strip("a").state_dict())


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    Cohort({"a": "resnet-8"}, 5, batchnorm_init="uniform")
    assert torch.equal(torch.rand(4), expected)


def test_batchnorm_can_start_uniform_as_in_the_authors_code() -> None:
    plain = Cohort({"a": "resnet-8"}, 5)
    uniform = Cohort({"a": "resnet-8"}, 5, batchnorm_init="uniform")
    for part in ("backbone", "heads"):
        norms = [m for m in getattr(uniform.members["a"], part).modules() if isinstance(m, nn.BatchNorm2d)]
        drawn = torch.cat([norm.weight for norm in norms])
        assert ((drawn >= 0) & (drawn < 1)).all()
        assert 0.4 < drawn.mean() < 0.6
        assert drawn.unique().numel() > drawn.numel() * 0.99
    convolutions = [name for name, w in plain.state_dict().items() if w.ndim == 4]
    assert len(convolutions) > 10
    assert all(torch.equal(plain.state_dict()[name], uniform.state_dict()[name]) for name in convolutions)


def test_stripping_gives_the_network_alone_and_its_very_logits() -> None:
    cohort = Cohort({"a": "wrn-10-1", "b": "densenet-10-4"}, 5)
    cohort(IMAGES)["a/stage2"].sum().backward()  # moves running statistics, leaves gradients
    cohort.eval()
    for name, network in (("a", "wrn-10-1"), ("b", "densenet-10-4")):
        plain = cohort.strip(name)
        expected = cohort(IMAGES)[f"{name}/final"]
        assert torch.equal(plain(IMAGES), expected)
        fresh = architecture(network).backbone(5).eval()
        assert plain.state_dict().keys() == fresh.state_dict().keys()
        fresh.load_state_dict(plain.state_dict(), strict=True)
        assert torch.equal(fresh(IMAGES), expected)
        assert not any("head" in key for key in plain.state_dict())
        assert all(parameter.grad is None for parameter in plain.parameters())


def test_what_is_stripped_is_a_copy() -> None:
    cohort = Cohort({"a": "resnet-8"}, 5)
    plain = cohort.strip("a")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert all(w.abs().sum() > 0 for w in weights(cohort, "members.a").values() if w.ndim == 4)
    with pytest.raises(ValueError, match="unknown network 'b'; Allowed: a"):
        cohort.strip("b")


def test_every_head_says_what_it_is_made_of() -> None:
    assert Cohort({"a": "wrn-28-4", "b": Tiny(6)}, 5, exits={"a": ("stage1",), "b": None}).head_descriptions == {
        "a/stage1": "4 × 128, 2 × 256",
        "b/early": "of kind paper",
    }
    assert (
        Cohort({"a": "wrn-10-1"}, 5, heads="apfc").head_descriptions["a/stage2"].startswith("averages over a 4×4 grid")
    )
    assert Cohort({"a": "wrn-10-1"}, 5, heads="narrow").head_descriptions["a/stage2"] == "1 × 64"


def test_everything_builds_on_meta() -> None:
    with torch.device("meta"):
        cohort = Cohort({"a": "wrn-28-10", "b": "resnet-50"}, 100, batchnorm_init="uniform")
        logits = cohort(torch.empty(2, 3, 32, 32))
    assert all(parameter.is_meta for parameter in cohort.parameters())
    assert {tuple(z.shape) for z in logits.values()} == {(2, 100)}
    assert len(logits) == 6


@dataclass(frozen=True)
class Tiny(Architecture):
    """A network of one's own."""

    channels: int

    @property
    def exits(self) -> tuple[Exit, ...]:
        return (Exit("early", 2, self.channels, 2),)

    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        stages = {"early": nn.Conv2d(in_channels, self.channels, 3, stride=2, padding=1)}
        return Backbone(stages, self.head("early", "paper", num_classes), self.exits)

    def head(self, exit_name: str, kind: str, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.channels, num_classes))


def test_a_network_of_ones_own_takes_part() -> None:
    cohort = Cohort({"mine": Tiny(6), "b": "resnet-8"}, 5, exits={"mine": ("early",), "b": ("stage2",)})
    assert isinstance(cohort.members["mine"], Member)
    assert list(cohort(IMAGES)) == ["mine/final", "mine/early", "b/final", "b/stage2"]
    assert Cohort({"mine": Tiny(6)}, 5).outline.to_dict() == {"mine": {"final": 1, "early": 2}}


class OnMeta(Tiny):
    """Sees to it that its weights never take memory, not even while it is built."""

    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        backbone = super().backbone(num_classes, in_channels)
        assert all(parameter.is_meta for parameter in backbone.parameters())
        return backbone


def test_building_on_meta_takes_no_memory_meanwhile() -> None:
    with torch.device("meta"):
        assert list(Cohort({"a": OnMeta(6)}, 5).members) == ["a"]


GOOD = {"a": "resnet-8"}


@pytest.mark.parametrize(
    ("networks", "options", "said"),
    [
        ({}, {}, "without networks; give at least one"),
        ({"a": "resnet-9"}, {}, "resnet-9: depth 9 does not fit"),
        ({"a": "wrm-28-4"}, {}, "did you mean 'wrn-28-4'"),
        ({"a": 7}, {}, "network 'a' is of type int; give a name such as 'wrn-28-4', an nn.Module or an Architecture"),
        ({"a/b": "resnet-8"}, {}, "network name 'a/b': use letters"),
        ({"a->b": "resnet-8"}, {}, "network name 'a->b': use letters"),
        ({"a.b": "resnet-8"}, {}, "network name 'a.b': use letters"),
        ({"": "resnet-8"}, {}, "network name '': use letters"),
        ({3: "resnet-8"}, {}, "network name 3: use letters"),
        ({"labels": "resnet-8"}, {}, "network name 'labels' means something else"),
        ({"items": "resnet-8"}, {}, "network name 'items' means something else"),
        (GOOD, {"num_classes": 1}, "num_classes is a whole number from 2 up, not 1"),
        (GOOD, {"num_classes": 10.0}, "num_classes is a whole number from 2 up, not 10.0"),
        (GOOD, {"num_classes": True}, "num_classes is a whole number from 2 up, not True"),
        (GOOD, {"in_channels": 0}, "in_channels is a whole number from 1 up, not 0"),
        (GOOD, {"seed": -1}, "seed is a whole number from 0 up, not -1"),
        (GOOD, {"heads": "papr"}, "unknown kind of head 'papr'; did you mean 'paper'"),
        (GOOD, {"batchnorm_init": "one"}, "unknown batchnorm_init 'one'; did you mean 'ones'"),
        (GOOD, {"exits": ("stem",)}, "unknown exit of network 'a' 'stem'"),
        (GOOD, {"exits": ("final",)}, "unknown exit of network 'a' 'final'"),
        (GOOD, {"exits": "stage2"}, "write ('stage2',)"),
        (GOOD, {"exits": ("stage2", "stage2")}, "'stage2' is named twice"),
        (GOOD, {"exits": {"b": ()}}, "unknown network in exits 'b'; Allowed: a"),
        ({**GOOD, "b": "resnet-8"}, {"exits": {"a": ()}}, "exits have no entry for 'b'; add 'b': None for the default"),
    ],
)
def test_what_cannot_be_a_cohort_is_refused(networks: dict[str, str], options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as error:
        Cohort(networks, **{"num_classes": 5, **options})  # type: ignore[arg-type]
    assert said in str(error.value)
