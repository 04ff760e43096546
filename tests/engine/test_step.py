"""The ways to run a step give the same numbers: compiled sections, bfloat16 shadow weights, padded channels."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from codistill import Cohort
from codistill.engine.fast.capture import ShadowWeights
from codistill.engine.fast.compiler import compile_network
from codistill.networks.layers import BatchNorm2d, padded_convolution

NETWORKS = {"a": "wrn-10-1-dropout-0.3", "b": "densenet-10-4", "c": "resnet-8", "d": "mobilenet"}


def small_cohort() -> Cohort:
    return Cohort(NETWORKS, num_classes=5, seed=1)


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_sections_compute_what_the_member_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr("codistill.engine.fast.compiler.compile_function", lambda part: compiled.append(part) or part)
    member = small_cohort().members[name]
    torch.manual_seed(3)
    expected = member(images())
    torch.manual_seed(3)
    actual = compile_network(member)(images())
    assert list(actual) == list(expected)
    assert len(actual) == 3
    assert len(compiled) == 3 + 2, "the trunk between its exits, and the heads"
    for exit_name, logits in expected.items():
        assert torch.equal(actual[exit_name], logits)


def test_a_fork_opens_at_the_exit_of_its_head() -> None:
    """Not where the trunk ends: otherwise nothing would overlap."""
    member, events = small_cohort().members["c"], []

    def note(event: str) -> nullcontext[None]:
        events.append(event)
        return nullcontext()

    for part_name, part in [*member.backbone.stages.items(), ("classifier", member.backbone.classifier)]:
        part.register_forward_hook(lambda *_, part_name=part_name: events.append(part_name))
    for head in member.heads.values():
        head.register_forward_hook(lambda *_: events.append("head"))
    member(images(), lambda: note("fork"))
    assert events == ["stem", "stage1", "fork", "stage2", "fork", "stage3", "classifier", "head", "head"]


def test_shadow_weights_give_autocasts_numbers() -> None:
    """Logits and gradients, bit for bit, twice with an update between, which the copy must see."""
    cohort, twin = small_cohort(), small_cohort()
    weights = ShadowWeights(cohort)
    for seed in (0, 1):
        weights.refresh()
        for networks in (weights.cohort, twin):
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                logits = networks(images(seed))
            sum(F.cross_entropy(x.float(), torch.arange(4)) for x in logits.values()).backward()
        weights.move_gradients_to_master()
        parameters = list(zip(cohort.parameters(), twin.parameters(), strict=True))
        assert len(parameters) > 100
        for ours, theirs in parameters:
            assert ours.grad is not None
            assert ours.grad.dtype is torch.float32
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        for networks in (cohort, twin):
            torch.optim.SGD(networks.parameters(), lr=0.1).step()
            networks.zero_grad()
    for name, buffer in cohort.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name


def test_the_shadow_cohort_shares_all_but_its_weights() -> None:
    cohort = small_cohort()
    cohort.members["b"].requires_grad_(False)
    copy = ShadowWeights(cohort).cohort
    for name, parameter in copy.named_parameters():
        original = cohort.get_parameter(name)
        assert (parameter is original) == (parameter.dtype is torch.float32)
        assert parameter.requires_grad == original.requires_grad
        assert parameter.stride() == original.stride()
    assert {p.dtype for p in copy.parameters()} == {torch.float32, torch.bfloat16}
    for name, buffer in copy.named_buffers():
        assert buffer is cohort.get_buffer(name)


@pytest.mark.parametrize(("in_channels", "out_channels", "stride"), [(28, 12, 1), (3, 16, 2), (16, 12, 1), (3, 5, 1)])
def test_padding_channels_changes_nothing(in_channels: int, out_channels: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, in_channels, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out_channels, in_channels, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ours = padded_convolution(x, weight, (stride, stride), (1, 1))
    theirs = F.conv2d(x, weight, None, stride, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    direction = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad((ours * direction).sum(), (x, weight)),
        torch.autograd.grad((theirs * direction).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_batch_normalisation_is_torchs_but_for_the_count() -> None:
    ours, theirs = BatchNorm2d(6), torch.nn.BatchNorm2d(6)
    x = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    for learning in (True, False):
        ours.train(learning)
        theirs.train(learning)
        assert torch.equal(ours(x), theirs(x))
    for name, buffer in theirs.named_buffers():
        if name == "num_batches_tracked":
            assert (int(ours.get_buffer(name)), int(buffer)) == (0, 1)
        else:
            assert torch.equal(ours.get_buffer(name), buffer)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
