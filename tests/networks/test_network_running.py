"""Networks at work: compiled, in half precision, in another memory format, with dropout, and how they start."""

import re

import pytest
import torch
from torch import nn

from codistill.cohort import Cohort, Member
from codistill.networks.backbone import Architecture
from codistill.networks.families import EXAMPLES, FAMILIES, RESERVED, architecture
from codistill.networks.resnet import PreActivationResNet

# One small network of every family that runs on 32×32 images; names begin at depth 164 where depth 11 has its blocks.
SMALL: dict[str, str | Architecture] = {
    "resnet-8": "resnet-8",
    "bottleneck-11": PreActivationResNet(11),
    "wrn-10-1": "wrn-10-1",
    "wrn-10-1-dropout-0.3": "wrn-10-1-dropout-0.3",
    "densenet-10-4": "densenet-10-4",
    "mobilenet": "mobilenet",
}
IMAGENET = ("resnet-18", "resnet-50", "mobilenetv2")


def member(network: str | Architecture, **options: object) -> Member:
    built = Cohort({"a": network}, 10, **options).members["a"]  # type: ignore[arg-type]
    assert isinstance(built, Member)
    return built


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_small_networks_and_imagenets_are_all_families() -> None:
    built = [network if isinstance(network, Architecture) else architecture(network) for network in SMALL.values()]
    ours = {family.load() for family in FAMILIES if family.examples}
    assert {type(network) for network in [*built, *map(architecture, IMAGENET)]} == ours


@pytest.mark.parametrize("name", [*SMALL, *IMAGENET])
def test_members_compile_as_one_graph(name: str) -> None:
    """As they train: batch statistics, dropout and the paper's heads included. Depth changes nothing in this."""
    network = member(SMALL.get(name, name)).train()
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    compiled = torch.compile(network, fullgraph=True, backend="eager")(images)
    torch.manual_seed(0)
    plain = network(images)
    assert list(compiled) == list(plain)
    assert len(plain) == 3
    assert all(torch.equal(compiled[exit_name], plain[exit_name]) for exit_name in plain)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_known_network_builds_and_runs_on_meta(name: str) -> None:
    with torch.device("meta"):
        logits = member(name).train()(torch.empty(2, 3, 64, 64))
    exits = ("stage3", "stage2") if name in IMAGENET else ("stage2", "stage1")
    assert {exit_name: tuple(z.shape) for exit_name, z in logits.items()} == dict.fromkeys(("final", *exits), (2, 10))


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_networks_run_in_half_precision(name: str) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = member(name).train()(torch.randn(2, 3, 64, 64))
    assert {z.dtype for z in logits.values()} == {torch.bfloat16}
    assert all(z.isfinite().all() for z in logits.values())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
def test_a_member_compiles_with_the_default_backend() -> None:
    network = member("wrn-10-1", heads="narrow", exits=("stage2",)).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        compiled = torch.compile(network, fullgraph=True)(images)
        plain = network(images)
    for exit_name in ("final", "stage2"):
        torch.testing.assert_close(compiled[exit_name], plain[exit_name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_half_precision_runs_forward_and_backward(name: str) -> None:
    network = member(SMALL[name]).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = network(torch.randn(2, 3, 32, 32))
    assert {z.dtype for z in logits.values()} == {torch.bfloat16}
    sum(z.float().square().sum() for z in logits.values()).backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_gives_the_same_logits(name: str) -> None:
    network = member(SMALL[name]).double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = network(images)
    actual = network.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    for exit_name, logits in expected.items():
        torch.testing.assert_close(actual[exit_name], logits, rtol=1e-9, atol=1e-9)


def test_dropout_sits_in_every_block_of_network_and_heads_and_only_acts_in_training() -> None:
    network = member("wrn-16-1-dropout-0.3", exits=("stage2", "stage1", "stem"))
    dropouts = [layer for layer in network.modules() if isinstance(layer, nn.Dropout)]
    # Two blocks a stage: 3 × 2 in the network, then C2: 2, C3: 2 + 1, C4: 2 + 1 + 1.
    assert [layer.p for layer in dropouts] == [0.3] * (6 + 2 + 3 + 4)
    images = torch.randn(2, 3, 16, 16)
    network.eval()
    assert torch.equal(network(images)["final"], network(images)["final"])
    network.train()
    assert not torch.equal(network(images)["final"], network(images)["final"])
    assert not any(isinstance(layer, nn.Dropout) for layer in member("wrn-16-1").modules())


@pytest.mark.parametrize("name", [*SMALL, "resnet-18"])
def test_weights_start_from_hes_normal_distribution(name: str) -> None:
    network = member(SMALL.get(name, name), exits=())
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    standard = torch.cat(
        [
            (layer.weight * (layer.out_channels // layer.groups * layer.kernel_size[0] ** 2 / 2) ** 0.5).flatten()
            for layer in convolutions
        ]
    )
    assert all(layer.bias is None for layer in convolutions)
    assert standard.mean().abs() < 5 / standard.numel() ** 0.5
    assert (standard.std() - 1).abs() < 5 / standard.numel() ** 0.5
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert all((layer.weight == 1).all() and (layer.bias == 0).all() for layer in norms)
    (linear,) = (layer for layer in network.modules() if isinstance(layer, nn.Linear))
    assert linear.weight.abs().max() <= linear.in_features**-0.5  # torch's uniform distribution


def test_names_that_torch_would_refuse_are_refused_before_anything_is_built() -> None:
    taken = {name for name in dir(nn.ModuleDict()) if re.fullmatch("[A-Za-z0-9-][A-Za-z0-9_-]*", name)}
    assert len(taken) > 50
    for name in taken | set(RESERVED):
        with pytest.raises(ValueError, match=f"{name}.*means something else"):
            Cohort({name: "resnet-8"}, num_classes=10)
