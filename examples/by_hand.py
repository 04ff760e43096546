"""DCM for two small networks in plain PyTorch: the readable truth that the library is compared with.

Dense cross-layer mutual-distillation (Yao & Sun, ECCV 2020), Algorithm 1. Each network has its own classifier and two
auxiliary ones at hidden stages. All of them learn from the labels and from all classifiers of the other network.

    python examples/by_hand.py
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


def classify(channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class SmallNet(nn.Module):
    """Three stages. The auxiliary classifiers down-sample as often as the stages that they skip."""

    def __init__(self, width: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.stage1 = conv(3, width, stride=1)
        self.stage2 = conv(width, 2 * width, stride=2)
        self.stage3 = conv(2 * width, 4 * width, stride=2)
        self.final = classify(4 * width, num_classes)
        self.head1 = nn.Sequential(
            conv(width, 2 * width, stride=2), conv(2 * width, 4 * width, stride=2), classify(4 * width, num_classes)
        )
        self.head2 = nn.Sequential(conv(2 * width, 8 * width, stride=2), classify(8 * width, num_classes))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        after1 = self.stage1(images)
        after2 = self.stage2(after1)
        after3 = self.stage3(after2)
        return {"final": self.final(after3), "stage2": self.head2(after2), "stage1": self.head1(after1)}


def learn_from_labels(logits: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Deep supervision: the network's own classifier and the auxiliary ones learn from the labels."""
    return sum((F.cross_entropy(z, labels) for z in logits.values()), torch.zeros(()))


def learn_from_peer(learner: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
    """Every classifier of one network imitates every classifier of the other: same stages and different ones."""
    total = torch.zeros(())
    for learner_logits in learner.values():
        for source_logits in source.values():
            log_probs = F.log_softmax(learner_logits, dim=1)
            target = F.log_softmax(source_logits.detach(), dim=1)  # a source gets no gradient
            # Sum over classes, mean over images. reduction="mean" would divide by the number of classes too.
            total = total + F.kl_div(log_probs, target, reduction="batchmean", log_target=True)
    return total


def dcm_loss(logits_a: dict[str, Tensor], logits_b: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The losses of both networks. They share no gradient, so one backward pass over their sum serves both."""
    loss_a = learn_from_labels(logits_a, labels) + learn_from_peer(logits_a, source=logits_b)
    loss_b = learn_from_labels(logits_b, labels) + learn_from_peer(logits_b, source=logits_a)
    return loss_a + loss_b


def train(
    nets: tuple[nn.Module, nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
) -> list[float]:
    """Both networks predict, both learn, at the same step. Returns the loss of each step."""
    net_a, net_b = nets
    parameters = [*net_a.parameters(), *net_b.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    losses = []
    for images, labels in batches:
        loss = dcm_loss(net_a(images), net_b(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made_up_batches(steps: int, batch_size: int = 32, num_classes: int = 10) -> Iterable[tuple[Tensor, Tensor]]:
    """Images of a class share a pattern, buried in noise."""
    patterns = torch.randn(num_classes, 3, 16, 16)
    for _ in range(steps):
        labels = torch.randint(num_classes, (batch_size,))
        yield patterns[labels] + 2 * torch.randn(batch_size, 3, 16, 16), labels


if __name__ == "__main__":
    torch.manual_seed(0)
    history = train((SmallNet(), SmallNet()), made_up_batches(steps=40))
    for step in range(0, len(history), 10):
        print(f"step {step:2d}  loss {history[step]:.3f}")
    print(f"step {len(history) - 1:2d}  loss {history[-1]:.3f}")
