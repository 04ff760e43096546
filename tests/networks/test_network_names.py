"""Names of networks: what they mean, and what a wrong one gets."""

import subprocess
import sys

import pytest

from codistill.networks.families import EXAMPLES, architecture, describe_families, parse


@pytest.mark.parametrize(
    ("name", "family", "options"),
    [
        ("resnet-8", "CifarResNet", {"depth": 8}),
        ("resnet-110", "CifarResNet", {"depth": 110}),
        ("resnet-158", "CifarResNet", {"depth": 158}),
        ("resnet-164", "PreActivationResNet", {"depth": 164}),
        ("resnet-1001", "PreActivationResNet", {"depth": 1001}),
        ("resnet-18", "ImageNetResNet", {"depth": 18}),
        ("resnet-50", "ImageNetResNet", {"depth": 50}),
        ("wrn-28-10", "WideResNet", {"depth": 28, "width": 10}),
        ("wrn-28-10-dropout-0.3", "WideResNet", {"depth": 28, "width": 10, "dropout": 0.3}),
        ("densenet-40-12", "DenseNet", {"depth": 40, "growth": 12}),
        ("mobilenet", "MobileNet", {}),
        ("mobilenetv2", "MobileNetV2", {}),
    ],
)
def test_a_name_means_a_family_and_its_options(name: str, family: str, options: dict[str, float]) -> None:
    network = parse(name)
    assert (network.name, network.family.load().__name__, network.options) == (name, family, options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet-111", ["depth 111", "6n+2", "9n+2", "110, 116"]),
        ("resnet-51", ["50, 56", "resnet-50 are ImageNet's"]),
        ("resnet-5", ["depth 5", "nearest that fit: 8"]),
        ("resnet-170", ["164, 173"]),
        ("resnet-1991", ["depth", "1 to 1202"]),
        ("resnet-0110", ["'0110'"]),
        ("resnet-١١٠", ["whole number"]),
        ("wrn-29-4", ["depth 29", "6n+4", "28, 34"]),
        ("wrn-1996-64", ["depth", "1 to 202"]),
        ("densenet-1999-256", ["depth", "1 to 400"]),
        ("wrn-28-65", ["width", "1 to 64"]),
        ("wrn-28-x", ["width", "'x'"]),
        ("wrn-28-1000000000", ["width", "1 to 64"]),
        ("wrn-28-10-dropout-1.5", ["wrn-28-10-dropout-0.3"]),
        ("wrn-28-10-dropout-0.0", ["left out"]),
        ("wrn-28-10-dropout", ["wrn-28-10-dropout-0.3"]),
        ("densenet-41-12", ["depth 41", "3n+4", "40, 43"]),
        ("densenet-40-257", ["growth", "1 to 256"]),
        ("wrn-28", ["unknown network 'wrn-28'", "did you mean 'wrn-28-4'", "wrn-DEPTH-WIDTH"]),
        ("WRN-28-4", ["did you mean 'wrn-28-4'"]),
        ("mobilenetv3", ["did you mean 'mobilenetv2'"]),
        ("vgg", ["unknown network 'vgg'", "resnet-DEPTH"]),
        ("", ["unknown network ''"]),
    ],
)
def test_a_wrong_name_is_told_what_to_type(name: str, said: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(name)
    for words in said:
        assert words in str(error.value)


def test_outlines_are_c_numbers_from_the_output() -> None:
    wrn = parse("wrn-28-4")
    assert wrn.default_exits == ("stage2", "stage1")
    assert list(wrn.outline().items()) == [("final", 1), ("stage2", 2), ("stage1", 3)]
    assert list(wrn.outline(("stem", "stage2")).items()) == [("final", 1), ("stage2", 2), ("stem", 4)]
    assert wrn.outline(()) == {"final": 1}
    assert parse("resnet-110").exits == {"stage2": 2, "stage1": 3}
    assert parse("resnet-18").outline() == {"final": 1, "stage3": 2, "stage2": 3}


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        (("stag2",), "unknown exit of wrn-28-4 'stag2'; did you mean 'stage2'? Allowed: stage2, stage1, stem"),
        (("stage2", "stage2"), "exit 'stage2' is named twice"),
        ("stage2", r"write \('stage2',\)"),
    ],
)
def test_wrong_exits_are_refused(exits: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        parse("wrn-28-4").outline(exits)


def test_names_and_architectures_agree_on_exits() -> None:
    assert len(EXAMPLES) == len(set(EXAMPLES)) == 12
    for name in EXAMPLES:
        built = {place.name: place.stage for place in architecture(name).exits}
        assert list(built.items()) == list(parse(name).exits.items())


def test_every_pattern_has_a_known_network() -> None:
    used = {name.split("-")[0] for name in EXAMPLES}
    assert used == {pattern.split("-")[0] for pattern in describe_families() if ":" not in pattern} - {"own"}


def test_names_need_no_torch() -> None:
    script = "import sys, codistill.networks.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
