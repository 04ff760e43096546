"""Who is well in a step: a network that is not finite neither teaches nor learns, and its peers go on without it.

Everything stays on the device, where the step reads it: nobody waits for an answer, and a recorded step replays it.
Axes: N networks, M classifiers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from codistill.cohort import Cohort
from codistill.log import log
from codistill.networks.layers import BatchNorm2d
from codistill.runs.checkpoint import Snapshot, snapshot
from codistill.runs.files import RunError

if TYPE_CHECKING:
    from codistill.engine.state import Training


@dataclass(frozen=True)
class Limits:
    """``frozen`` networks only teach, ``clip_norms`` bound the gradients, ``freezes`` whoever was sick once."""

    frozen: frozenset[str]
    clip_norms: Mapping[str, float]
    freezes: bool


class Health:
    """A step calls ``begin``, ``trusted``, ``weigh`` and ``conclude``, in this order; several batches make an update.

    A skipped update leaves everything of its network as it was: weights, momentum, running statistics, average.
    Large is not sick: only NaN and infinities are.
    """

    def __init__(self, cohort: Cohort, classifiers: Sequence[str], limits: Limits, device: torch.device) -> None:
        owners = [classifier.partition("/")[0] for classifier in classifiers]
        self.names = tuple(dict.fromkeys([*owners, *cohort.members]))
        self.here = tuple(cohort.members)
        """Whose weights this process has; of others it knows their logits at most."""
        self.freezes = limits.freezes
        row = {name: index for index, name in enumerate(self.names)}
        size = len(self.names)
        self._network_M = torch.tensor([row[owner] for owner in owners], device=device)
        self._elsewhere_NM = self._network_M != torch.arange(size, device=device)[:, None]
        clips = [limits.clip_norms.get(name, torch.inf) for name in self.names]
        self._clips_N = torch.tensor(clips, dtype=torch.float32, device=device) if limits.clip_norms else None
        learning = [name for name in self.here if name not in limits.frozen]
        self._statistics = Statistics({row[name]: cohort.members[name] for name in learning}, device)

        self.well_N = torch.ones(size, dtype=torch.bool, device=device)
        """Whose logits were finite in every batch of this update; at its end, who takes part in it."""
        self.frozen_N = torch.zeros_like(self.well_N)
        self.skipped_N = torch.zeros(size, dtype=torch.int64, device=device)
        self.factors_N = torch.ones(size, dtype=torch.float32, device=device)
        """What this update multiplies gradients by, to clip them; 0 where it leaves a network out."""
        self._skips_N = torch.zeros_like(self.factors_N)
        self._zero = self._skips_N.new_zeros(())
        self._divisors_N = torch.ones(size, dtype=torch.float32, device=device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What must survive a step, network by network."""
        for name in self.here:
            index = self.names.index(name)
            yield f"{name}/skipped", self.skipped_N[index]
            yield f"{name}/frozen", self.frozen_N[index]

    def guard(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Let every optimizer read whether to skip and by what to divide, as torch's scaler for float16 does."""
        for name, optimizer in optimizers.items():
            index = self.names.index(name)
            switches = {"found_inf": self._skips_N[index]}
            if self._clips_N is not None:
                switches["grad_scale"] = self._divisors_N[index]
            vars(optimizer).update(switches)

    def factor(self, name: str) -> Tensor:
        return self.factors_N[self.names.index(name)]

    def learned(self, name: str) -> Tensor:
        """Whether the network took part in the update just made."""
        return self.well_N[self.names.index(name)]

    def skipped(self) -> dict[str, int]:
        """Updates without each network here since the beginning. Waits for the device."""
        counts = dict(zip(self.names, self.skipped_N.tolist(), strict=True))
        return {name: counts[name] for name in self.here}

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first batch of an update: its forward pass changes running statistics before anybody knows."""
        self.well_N.fill_(True)
        self._statistics.keep()

    @torch.no_grad()
    def trusted(self, logits: Sequence[Tensor], agreed: Callable[[Tensor], Tensor] = lambda flags: flags) -> Tensor:
        """By classifier, in the objective's order: False for all of a network where one logit is not finite.

        ``agreed`` asks those who have the batch's other images; there may be none here.
        """
        logits_MBC = torch.stack(list(logits))
        finite_M = logits_MBC.abs().amax(dim=(1, 2)).isfinite() if logits_MBC.numel() else self._network_M >= 0
        well_N = agreed((finite_M | self._elsewhere_NM).all(dim=1))
        self.well_N &= well_N
        return well_N[self._network_M]

    @torch.no_grad()
    def weigh(
        self,
        gradients: Mapping[str, Sequence[Tensor]],
        of_whole: Callable[[Tensor, float], Tensor] = lambda norms_N, order: norms_N,
    ) -> None:
        """When all gradients are there: who takes part in the update, and with which factor.

        ``of_whole`` takes norms to those of whole gradients, where others have pieces of them.
        """
        sizes_N = of_whole(self._each(size_of, gradients), 1.0)
        self.well_N &= sizes_N.isfinite() & ~self.frozen_N
        factors_N = self.well_N.float()
        if self._clips_N is not None:
            lengths_N = of_whole(self._each(length_of, gradients), 2.0)
            clipped_N = torch.where(lengths_N > self._clips_N, self._clips_N / lengths_N, 1.0)
            factors_N = torch.where(self.well_N, clipped_N, 0.0)
            # A length beyond float32 clips to nothing, which is no update either.
            self.well_N &= factors_N > 0
            self._divisors_N.copy_(torch.where(self.well_N, 1 / factors_N, 1.0))
        self.factors_N.copy_(factors_N)
        self._skips_N.copy_(~self.well_N)

    def _each(self, measure: Callable[[Sequence[Tensor]], Tensor], gradients: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """By network; who only teaches has no gradient."""
        return torch.stack([measure(gradients[name]) if gradients.get(name) else self._zero for name in self.names])

    @torch.no_grad()
    def conclude(self) -> None:
        """After the update: undo what the forward pass did to networks that are left out, and count them."""
        self._statistics.put_back_unless(self.well_N)
        self.skipped_N += ~self.well_N
        if self.freezes:
            self.frozen_N |= ~self.well_N


class Statistics:
    """The running statistics of the networks that learn, copied together: few kernels for hundreds of buffers."""

    def __init__(self, members: Mapping[int, nn.Module], device: torch.device) -> None:
        by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for network, member in members.items():
            for buffer in _changing_buffers(member):
                by_dtype.setdefault(buffer.dtype, []).append((network, buffer))
        self.buffers = [[buffer for _, buffer in group] for group in by_dtype.values()]
        self.owners = [
            torch.tensor([network for network, buffer in group for _ in range(buffer.numel())], device=device)
            for group in by_dtype.values()
        ]
        self.before = [_flat(buffers) for buffers in self.buffers]

    def keep(self) -> None:
        for before, buffers in zip(self.before, self.buffers, strict=True):
            torch.cat([buffer.view(-1) for buffer in buffers], out=before)

    def put_back_unless(self, well_N: Tensor) -> None:
        for before, buffers, owners in zip(self.before, self.buffers, self.owners, strict=True):
            chosen = torch.where(well_N[owners], _flat(buffers), before)
            parts = torch.split_with_sizes(chosen, [buffer.numel() for buffer in buffers])
            torch._foreach_copy_([buffer.view(-1) for buffer in buffers], parts)


def _flat(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.view(-1) for buffer in buffers])


def _changing_buffers(member: nn.Module) -> Iterable[Tensor]:
    for module in member.modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                if not (isinstance(module, BatchNorm2d) and name == "num_batches_tracked"):  # ours do not count
                    yield buffer


def size_of(tensors: Sequence[Tensor]) -> Tensor:
    """The largest sum of magnitudes: not finite where an element is not, or where it is about to be.

    The largest element would say it for all numbers, but takes a CPU ten times as long.
    """
    return torch.stack(_norms(tensors, 1.0)).amax()


def length_of(tensors: Sequence[Tensor]) -> Tensor:
    """Of all tensors as one vector."""
    length: Tensor = torch.linalg.vector_norm(torch.stack(_norms(tensors, 2.0)))
    return length


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # Each type in kernels of its own, and bfloat16 in float32: rounded norms would clip half a per cent too much.
    return [
        norm
        for dtype, group in by_dtype.items()
        for norm in torch._foreach_norm(group, order, torch.promote_types(dtype, torch.float32))
    ]


class Recovery:
    """Keeps the state that was last saved, or begun with, to roll single networks back to.

    That copy and not a checkpoint's file: it is in memory for the save as it is, it cannot be damaged, and there is one
    before the first save. It holds what the newest checkpoint holds, so a continued run rolls back to the same.
    Not the state before the step, either: keeping that would cost every step more than the update itself.
    """

    def __init__(self, training: "Training") -> None:
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
