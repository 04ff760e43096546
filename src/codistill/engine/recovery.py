"""Rolling networks that are not finite back to the end of the epoch before.

``Health`` leaves a network out of single updates, within the step. ``Recovery`` acts at the end of every epoch: when a
network is rolled back, and to which state, follows from the position in the training alone, not from clocks, saves or
signals. Until then a network with NaN weights is left out, and its peers train on.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from codistill.engine.health import largest_l1_norm
from codistill.engine.state import Training, copy_matching
from codistill.errors import RunError
from codistill.log import log
from codistill.runs.weights import good_copies

if TYPE_CHECKING:
    from codistill.engine.runtime import Machine


class Recovery:
    """A training with a copy of each learning network's state at the last epoch's end, or of the initial one.

    ``tensors`` is what a checkpoint saves in the middle of an epoch: the state and the copies. At the end of an epoch
    they are equal, and the state alone is saved. The copies are on the device, where making them takes no time.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        learning = training.recipe.graph.learning_networks
        self.learning = [name for name in training.health.here if name in learning]
        self.good = {key: tensor.clone() for key, tensor in self._current().items()}

    @property
    def machine(self) -> "Machine":
        return self.training.machine

    @property
    def starts(self) -> Mapping[str, Any]:
        return self.training.starts

    def tensors(self) -> dict[str, Tensor]:
        """The training's state and the copies, by their names in a checkpoint."""
        return {**self.training.tensors(), **self.good}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        copy_matching(self.tensors(), saved)

    def shipped(self) -> dict[str, nn.Module]:
        return self.training.shipped()

    def end_epoch(self) -> None:
        """Apply the recipe's policy to the networks that were left out in this epoch, then copy every network's state.

        NaN weights always roll back, because skipping updates does not heal them. Logs what it does. Waits for the
        device. Done twice, it does nothing the second time: a run that is stopped in an evaluation repeats it.
        """
        health, policy = self.training.health, self.training.recipe.on_nonfinite
        skipped, handled = health.skipped(), health.handled()
        newly = {name: count - handled[name] for name, count in skipped.items() if count > handled[name]}
        non_finite = self._non_finite()
        for name, updates in newly.items():
            if policy != "freeze" or not handled[name]:  # a frozen network is left out of all later updates
                reason = "its logits or its gradient were not finite"
                log.warning(
                    "network %r was left out of %d updates: %s (on_nonfinite=%s)", name, updates, reason, policy
                )
        if policy == "stop" and (newly or non_finite):
            raise RunError(
                f"network {[*newly, *non_finite][0]!r} is not finite (its logits, gradient or weights), and "
                "on_nonfinite=stop; what was saved before is intact. Try on_nonfinite=skip, or a lower optimizer.lr, "
                "in another folder with --out"
            )
        for name in self.learning:
            if name in non_finite or (name in newly and policy == "rollback"):
                self._roll_back(name)
        health.handled_N.copy_(health.skipped_N)
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        torch._foreach_copy_(list(self.good.values()), list(self._current().values()))

    def _current(self) -> dict[str, Tensor]:
        """The tensors to copy, by the names of their copies."""
        return good_copies(self.learning, self.training.tensors())

    def _non_finite(self) -> list[str]:
        """The networks with weights that are not finite, the same list in all processes that hold shards of them."""
        if not self.learning:
            return []
        tensors = self.training.tensors()
        finite = torch.stack([self._is_finite(name, tensors) for name in self.learning])
        flags = self.training.peers.all(finite).tolist()
        return [name for name, is_finite in zip(self.learning, flags, strict=True) if not is_finite]

    def _is_finite(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        floats = [tensor for tensor in good_copies([name], tensors).values() if tensor.is_floating_point()]
        return largest_l1_norm(floats).isfinite()

    @torch.no_grad()
    def _roll_back(self, name: str) -> None:
        for key, tensor in good_copies([name], self.training.tensors()).items():
            tensor.copy_(self.good[key])
        log.warning("network %r is rolled back to its state at the end of the epoch before", name)
