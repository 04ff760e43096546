"""What cuDNN tries algorithms for: most of the work, forward and backward, and nothing before that is known."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from codistill.networks import kernels
from codistill.networks.layers import Conv2d
from codistill.networks.trials import Trials, without_trials


@pytest.fixture(autouse=True)
def benchmark() -> Iterator[None]:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    yield
    assert torch.backends.cudnn.benchmark, "somebody left it as it was inside"
    torch.backends.cudnn.benchmark = before


def a_network() -> nn.Sequential:
    """The second convolution has 50 of 52 parts of the work, the others one each."""
    torch.manual_seed(0)
    return nn.Sequential(Conv2d(8, 16, 1), Conv2d(16, 16, 5), Conv2d(16, 8, 1)).double()


def tried(monkeypatch: pytest.MonkeyPatch, trials: Trials, images: int = 2) -> list[bool]:
    """Whether it would be, call by call: three forward, then weight and input of the last, and so on to the first."""
    seen: list[bool] = []

    def noted(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            seen.append(torch.backends.cudnn.benchmark)
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, kernels.trying(trials):
        patch.setattr(kernels, "F", SimpleNamespace(conv2d=noted(nn.functional.conv2d)))
        patch.setattr(kernels, "convolution_gradients", noted(kernels.convolution_gradients))
        x = torch.randn(images, 8, 6, 6, dtype=torch.float64, requires_grad=True)
        a_network()(x).sum().backward()
    return seen


def test_nothing_before_it_is_settled_then_most_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials()
    assert tried(monkeypatch, trials) == [False] * 9
    trials.settle()
    assert tried(monkeypatch, trials) == [False, True, False, False, False, True, True, False, False]


def test_what_a_short_batch_settled_is_for_full_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials()
    tried(monkeypatch, trials, images=1)
    trials.settle()
    assert sum(tried(monkeypatch, trials, images=3)) == 3


def test_not_where_nothing_is_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials()
    tried(monkeypatch, trials)
    trials.settle()
    with without_trials():
        assert tried(monkeypatch, trials) == [False] * 9


def test_as_many_as_make_up_94_percent() -> None:
    trials = Trials()
    for shape, work in {"a": 50, "b": 30, "c": 10, "d": 6, "e": 4}.items():
        trials.count((shape,), work)
    trials.settle()
    assert trials.worth == {("a",), ("b",), ("c",), ("d",)}
    trials.count(("e",), 1000)
    trials.settle()
    assert ("e",) not in trials.worth, "once settled it stays: a recorded step has its algorithms"


def test_the_same_convolution() -> None:
    def results(trials: Trials | None) -> list[Tensor]:
        network = a_network()
        x = torch.randn(2, 8, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with kernels.trying(trials):
            out = network(x)
        out.square().sum().backward()
        return [out, x.grad, *(weight.grad for weight in network.parameters())]

    torch.testing.assert_close(results(Trials()), results(None))
