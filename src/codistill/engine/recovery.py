"""What becomes of networks that were sick: decided where the device is waited for anyway, at saves and evaluations."""

from collections.abc import Collection

import torch

from codistill.engine.health import size_of
from codistill.engine.training import Training
from codistill.log import log
from codistill.runs.checkpoint import Snapshot, snapshot
from codistill.runs.files import RunError


class Recovery:
    """Keeps the state that was last saved, or begun with, to roll single networks back to.

    That copy and not a checkpoint's file: it is in memory for the save as it is, it cannot be damaged, and there is one
    before the first save. It holds what the newest checkpoint holds, so a continued run rolls back to the same.
    Not the state before the step, either: keeping that would cost every step more than the update itself.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.handled = training.health.skipped()
        self.remember(snapshot(training.tensors()))

    def remember(self, taken: Snapshot) -> None:
        self.good = taken.tensors

    def look(self) -> None:
        """Report who was left out since the last look, and do what the recipe says; NaN weights always go back.

        Skipping does not heal those. Called before every save, so that no checkpoint holds any.
        """
        skipped, policy = self.training.health.skipped(), self.training.recipe.sick
        newly = {name: count - self.handled[name] for name, count in skipped.items() if count > self.handled[name]}
        unsound = self._unsound(skipped)
        for name, updates in newly.items():
            if policy != "freeze" or not self.handled[name]:  # a frozen one is left out of all that follow
                reason = "its logits or its gradient were not finite"
                log.warning("network %r was left out of %d updates: %s (sick=%s)", name, updates, reason, policy)
        if policy == "stop" and (newly or unsound):
            raise RunError(
                f"network {[*newly, *unsound][0]!r} is not finite (its logits, gradient or weights), and sick=stop; "
                "what was saved before is intact. Try sick=skip, or a lower optimizer.lr, in another folder with --out"
            )
        for name in dict.fromkeys([*unsound, *(newly if policy == "rollback" else ())]):
            self._roll_back(name)
        self.handled = skipped

    def _unsound(self, names: Collection[str]) -> list[str]:
        """Whoever holds another piece of a network must come to the same."""
        sound = torch.tensor([self._is_sound(name) for name in names], device=self.training.machine.device)
        return [name for name, is_sound in zip(names, self.training.peers.agreed(sound), strict=True) if not is_sound]

    def _is_sound(self, name: str) -> bool:
        floats = [tensor for tensor in self.training.tensors_of(name).values() if tensor.is_floating_point()]
        return bool(size_of(floats).isfinite())

    @torch.no_grad()
    def _roll_back(self, name: str) -> None:
        for key, tensor in self.training.tensors_of(name).items():
            tensor.copy_(self.good[key])
        log.warning("network %r is back at its state of the last save", name)
