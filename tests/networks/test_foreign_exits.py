"""Exits of a module of one's own, and what is said of models and exits that cannot be used."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from codistill.cohort import Cohort
from codistill.networks.adapters.architecture import OwnArchitecture
from codistill.networks.families import architecture
from support import zoo

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def layer(in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, 1)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


class Net(nn.Module):
    """A user's module: three resolutions, functions between the modules, and a dropout by hand."""

    def __init__(self, classes: int = 5, in_channels: int = 3) -> None:
        super().__init__()
        self.stem = layer(in_channels, 8)
        self.first = nn.Sequential(layer(8, 16, 2), layer(16, 16))
        self.second = nn.Sequential(layer(16, 32, 2), layer(32, 32))
        self.third = nn.Sequential(layer(32, 64, 2), layer(64, 64))
        self.drop_rate = 0.5
        self.out = nn.Linear(64, classes)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.third(self.second(self.first(self.stem(x))))
        x = torch.nn.functional.dropout(x.mean(dim=(2, 3)), self.drop_rate, self.training)
        logits: Tensor = self.out(x) * scale
        return logits


def test_stages_of_ones_own_module_are_found() -> None:
    network = OwnArchitecture(Net())
    assert [(place.name, place.path, place.channels, place.stride) for place in network.exits] == [
        ("c2", "second", 32, 4),
        ("c3", "first", 16, 2),
        ("c4", "stem", 8, 1),
    ]
    assert network.image_size is None


def test_exits_are_modules_that_one_names_in_any_order() -> None:
    cohort = Cohort({"mine": Net(), "b": "resnet-8"}, 5, exits={"mine": ["stem", "first", "second.0"], "b": None})
    assert [classifier.name for classifier in cohort.outline.classifiers][:4] == [
        "mine/final", "mine/c2", "mine/c3", "mine/c4",
    ]  # fmt: skip
    backbone = cohort.members["mine"].backbone
    assert [place.path for place in backbone.exits] == ["second.0", "first", "stem"]
    seen: dict[str, Tensor] = {}
    for path in ("second.0", "first", "stem"):
        hook = lambda module, args, output, path=path: seen.update({path: output})  # noqa: E731
        backbone.classifier.get_submodule(path).register_forward_hook(hook)
    features = backbone.features(IMAGES)
    assert list(features) == ["c2", "c3", "c4", "final"]
    assert all(features[place.name] is seen[place.path] for place in backbone.exits)
    assert {tuple(logits.shape) for logits in cohort(IMAGES).values()} == {(4, 5)}


def test_a_module_is_copied_with_its_weights_and_its_heads_begin_anew() -> None:
    mine = Net()
    with torch.no_grad():
        for weight in mine.parameters():
            weight.fill_(1.5)
    cohort = Cohort({"mine": mine.eval().requires_grad_(False)}, 5)
    assert all(weight.requires_grad for weight in cohort.members["mine"].heads.parameters())
    assert all(module.training for module in cohort.modules())
    assert all(weight.eq(1.5).all() for weight in cohort.strip("mine").parameters())
    for head in cohort.members["mine"].heads.values():
        convolutions = [weight for weight in head.parameters() if weight.ndim == 4]
        assert convolutions
        assert not any(weight.eq(1.5).any() for weight in convolutions)
    with torch.no_grad():
        next(cohort.parameters()).zero_()
    assert all(weight.eq(1.5).all() for weight in mine.parameters())


def test_dropout_by_hand_in_a_head_follows_the_mode() -> None:
    head = OwnArchitecture(Net()).head("c2", "paper", 5)
    features = torch.randn(4, 32, 8, 8)
    assert head.train()(features).ne(head(features)).any()
    assert head.eval()(features).equal(head(features))


def test_the_size_of_the_batch_may_be_read_at_the_beginning() -> None:
    class Reshapes(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            batch, images = x.shape[0], x.size(0)
            x = self.third(self.second(self.first(self.stem(x))))
            logits: Tensor = self.out(x.mean(dim=(2, 3)).reshape(batch, -1)).reshape(images, -1)
            return logits

    heads = Cohort({"mine": Reshapes()}, 5).members["mine"].heads
    assert heads["c2"](torch.randn(7, 32, 8, 8)).shape == (7, 5)


def test_where_timm_lists_the_inside_of_a_block_the_block_before_is_the_exit() -> None:
    network = architecture("timm:legacy_xception")
    assert [feature["module"] for feature in zoo.timm.create_model("legacy_xception").feature_info][-2:] == [
        "block12.rep.0",
        "act4",
    ]
    assert [place.path for place in network.exits[:2]] == ["block11", "block2"]
    inside = architecture("timm:legacy_xception@block12.rep.0")
    assert inside.describe_head("c2", "paper") == "generic: convolutions 728 → 728"


def test_a_network_is_studied_with_images_of_its_own_size() -> None:
    assert architecture("timm:flexivit_small").image_size == 240


def test_no_heads_where_none_are_wanted() -> None:
    cohort = Cohort({"mine": Net()}, 5, exits=())
    assert list(cohort(IMAGES)) == ["mine/final"]
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    assert list(Cohort({"mine": flat}, 5, exits=())(IMAGES)) == ["mine/final"]  # a teacher needs no stages


class Branching(Net):
    """Decides by what it sees, which nothing can follow."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.second(self.first(self.stem(x)))
        if x.mean() > 1e9:
            x = x * 2
        logits: Tensor = self.out(self.third(x).mean(dim=(2, 3)))
        return logits


class LongWay(Net):
    """Uses an early feature at its end."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        early = self.first(self.stem(x))
        logits: Tensor = self.out(self.third(self.second(early)).mean(dim=(2, 3)) + early.mean())
        return logits


class InPlace(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.second(self.first(self.stem(x)).relu_())
        logits: Tensor = self.out(self.third(x).mean(dim=(2, 3)))
        return logits


class Pair(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x), None


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (Net(), {"exits": ("frist",)}, "network 'mine': it has no module 'frist' that runs; did you mean 'first'?"),
        (Net(), {"exits": ("out",)}, "the output of 'out', batch×5, has no spatial or token axis; name an earlier"),
        (Net(), {"exits": "first"}, "write ('first',)"),
        (Net(), {"num_classes": 7}, "network 'mine' outputs 5 classes, but the data have 7"),
        (Net(), {"in_channels": 1}, "network 'mine' takes images of 3 channels, but the data have 1"),
        (Pair(), {}, "in training mode it does not return one row of logits per image"),
        (nn.Linear(7, 5), {}, "its forward fails for images of 3 channels, tried without values on the meta device"),
        (Branching(), {"heads": "apfc"}, "tried without values on the meta device (32×32: Tensor.item() cannot be"),
        (Net(), {"exits": {"mnie": ()}}, "unknown network in exits 'mnie'; did you mean 'mine'?"),
        (Net(), {"exits": {}}, "exits have no entry for 'mine'; add 'mine': None for the default ones, () for none"),
        (InPlace(), {"exits": ("first",)}, "what follows 'first' writes into its output; name the module that does"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(module: nn.Module, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        Cohort({"mine": module}, **{"num_classes": 5, **options})
    assert said in str(error.value)


def test_generic_heads_take_the_place_of_those_that_cannot_be_cut_out(caplog: pytest.LogCaptureFixture) -> None:
    class Unfollowed(Branching):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x = self.second(self.first(self.stem(x)))
            for _ in range(int(x.shape[0] > 2)):  # the size of a batch is not known while it is followed
                x = x * 2
            logits: Tensor = self.out(self.third(x).mean(dim=(2, 3)))
            return logits

    caplog.set_level("INFO", logger="codistill")
    cohort = Cohort({"mine": Unfollowed(), "far": LongWay()}, 5, exits={"mine": None, "far": ["second"]})
    assert cohort.head_descriptions == {
        "mine/c2": "generic: convolutions 64 → 64",  # the last stage has 4×4 pixels, and these 8×8
        "mine/c3": "generic: convolutions 32 → 64",
        "far/c2": "generic: convolutions 64 → 64",
    }
    assert {tuple(logits.shape) for logits in cohort(IMAGES).values()} == {(4, 5)}
    heads = cohort.members["mine"].heads
    strides = {
        name: [one.stride for one in head.modules() if isinstance(one, nn.Conv2d)] for name, head in heads.items()
    }
    assert strides == {"c2": [(2, 2), (1, 1)], "c3": [(2, 2), (2, 2)]}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0].startswith("network 'mine': a generic head at c2, because its forward cannot be traced (")
    assert said[2] == "network 'far': a generic head at c2, because what follows also uses earlier results"
    assert len(Cohort({"mine": Unfollowed()}, 5, heads="apfc")(IMAGES)) == 3


def test_without_stages_only_the_classifier_itself_learns_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="codistill")
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    assert list(Cohort({"mine": flat}, 5)(IMAGES)) == ["mine/final"]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "network 'mine': no stages found to attach heads at, so only its own classifier"
    )
    with pytest.raises(ValueError, match="network 'mine': it has no module 'c2' that runs"):
        Cohort({"mine": flat}, 5, exits=["c2"])


def test_a_name_may_ask_for_no_heads() -> None:
    cohort = Cohort({"a": "timm:resnet10t@final", "b": "resnet-8"}, 5)
    assert [classifier.name for classifier in cohort.outline.classifiers if classifier.network == "a"] == ["a/final"]


def test_exits_of_modules_that_return_several_tensors_are_the_first_of_them() -> None:
    class Pairs(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.layers(both[0]), both[1]

    class Several(Net):
        def __init__(self) -> None:
            super().__init__()
            for name in ("first", "second", "third"):
                setattr(self, name, Pairs(getattr(self, name)))

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            both = self.third(self.second(self.first((self.stem(x), x))))
            logits: Tensor = self.out(both[0].mean(dim=(2, 3)))
            return logits

    cohort = Cohort({"mine": Several()}, 5)
    backbone = cohort.members["mine"].backbone
    assert [place.path for place in backbone.exits] == ["second", "first", "stem"]
    assert [features.shape[1] for features in backbone.features(IMAGES).values()] == [32, 16, 8, 5]
    assert cohort.head_descriptions["mine/c2"] == "generic: convolutions 64 → 64"


def test_an_image_size_that_a_network_does_not_take_is_refused_with_one_that_it_takes() -> None:
    whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    fours = nn.Sequential(layer(3, 4), nn.PixelUnshuffle(4), layer(64, 8), whole)
    assert Cohort({"a": fours}, 5, image_size=(36, 40)).members
    with pytest.raises(ValueError, match=r"network 'a' takes images of 32×32, and not of 30×30; .*data\.image_size=32"):
        Cohort({"a": fours}, 5, image_size=(30, 30))


def test_a_forward_that_says_its_widths_has_heads_of_them() -> None:
    """``view(-1, …)`` takes channels twice as wide for a batch twice as large, and complains of nothing."""

    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 5), nn.Conv2d(4, 8, 5)
            self.pool, self.out = nn.MaxPool2d(2), nn.Linear(8 * 5 * 5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.second(self.pool(self.first(x)).relu()).relu())
            logits: Tensor = self.out(x.view(-1, 8 * 5 * 5))
            return logits

    cohort = Cohort({"mine": Flattening()}, 5)
    assert {name: tuple(logits.shape) for name, logits in cohort(IMAGES).items()} == dict.fromkeys(
        ("mine/final", "mine/c2"), (4, 5)
    )


def test_a_module_that_runs_twice_is_no_exit() -> None:
    class Twice(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x = self.second[1](self.second(self.first(self.stem(x))))
            logits: Tensor = self.out(self.third(x).mean(dim=(2, 3)))
            return logits

    with pytest.raises(ValueError, match=r"its module 'second\.1' runs 2 times; name the module around it"):
        Cohort({"mine": Twice()}, 5, exits=("second.1",))

    class Shared(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x = self.again(self.first(self.again(self.stem(x))))  # type: ignore[operator]
            logits: Tensor = self.out(self.third(self.second(x)).mean(dim=(2, 3)))
            return logits

    shared = Shared()
    shared.first, shared.again, shared.second = layer(8, 8, 2), layer(8, 8), layer(8, 32, 2)  # type: ignore[assignment]
    assert [place.path for place in OwnArchitecture(shared).exits] == ["second", "first", "stem"]
    assert len(Cohort({"mine": shared}, 5)(IMAGES)) == 3


def test_torchs_own_transformer_is_cut_into_thirds() -> None:
    """Its encoder gives its layers switches beside the tokens."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.out = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 5)
            block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(dim=1))
            return logits

    assert [place.path for place in OwnArchitecture(Tokens()).exits] == ["encoder.layers.3", "encoder.layers.1"]
    assert len(Cohort({"mine": Tokens()}, 5, heads="apfc")(IMAGES)) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_wrapped_module_is_not_taken_apart() -> None:
    for wrapped, wrapper in ((nn.DataParallel(Net()), "DataParallel"), (torch.compile(Net()), "OptimizedModule")):
        with pytest.raises(ValueError, match=f"network 'mine': it is wrapped in {wrapper}; give the module inside"):
            Cohort({"mine": wrapped}, 5)  # type: ignore[dict-item]


def test_networks_have_names() -> None:
    with pytest.raises(ValueError, match=r"networks have names: write \{'a': …, 'b': …\} and not a list"):
        Cohort([Net(), Net()], 5)  # type: ignore[arg-type]


def test_one_module_is_not_two_networks() -> None:
    mine = Net()
    with pytest.raises(ValueError, match="one module is given as two networks"):
        Cohort({"a": mine, "b": mine}, 5)
    assert len(Cohort({"a": Net(), "b": Net()}, 5).members) == 2


def test_networks_that_take_different_images_do_not_go_together() -> None:
    vit, swin = "timm:vit_tiny_patch16_224", "timm:swin_tiny_patch4_window7_224"
    with pytest.raises(ValueError, match=r"different sizes: 'a' only 224×224, 'b' only 64×64; give the same size"):
        Cohort({"a": vit, "b": f"{swin}:img_size=64,window_size=2"}, 5)
    with pytest.raises(
        ValueError, match=r"network 'a' takes images of 224×224, and not of 32×32; resize them with data"
    ):
        Cohort({"a": vit}, 5, image_size=(32, 32))
    with torch.device("meta"):
        assert len(Cohort({"a": f"{vit}:img_size=64", "b": f"{swin}:img_size=64,window_size=2"}, 5).members) == 2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("timm:resnet19", {}, "timm has no network 'resnet19'; did you mean 'resnet18'? timm.list_models()"),
        ("torchvision:resnet51", {}, "torchvision has no classifier 'resnet51'; did you mean 'resnet50'? Allowed: a"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "torchvision has no classifier 'fasterrcnn_resnet50_fpn'"),
        ("timm:resnet18:patch_size=4", {}, "timm cannot build resnet18 with patch_size=4: "),
        ("torchvision:resnet18", {"in_channels": 1}, "resnet18 takes images of 3 channels, but the data have 1"),
        ("timm:resnet18@layer9", {}, "timm:resnet18: it has no module 'layer9' that runs; did you mean 'layer"),
        ("timm:resnet18", {"exits": ("stage2",)}, "unknown exit of network 'a' 'stage2'; Allowed: c2, c3, c4, c5"),
        ("timm:resnet18", {"exits": ("layer2",)}, "modules are named behind @, as in timm:resnet18@layer2"),
    ],
)  # fmt: skip
def test_what_a_library_does_not_have(name: str, options: dict[str, Any], said: str) -> None:
    assert zoo.timm
    with pytest.raises(ValueError) as error:
        Cohort({"a": name}, 5, **options)
    assert said in str(error.value)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_is_named_with_what_to_type(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=rf"{library}:… needs {library}, .*type: pip install '\.\[zoo\]'"):
        architecture(f"{library}:resnet18").backbone(5)
