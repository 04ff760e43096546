"""Leaving networks that are not finite out of an update, so that their peers train on undisturbed.

``Health`` decides it within the step, on the device: the host never waits for the answer, and a captured step replays
it. ``Recovery`` acts on what was left out at the end of every epoch. Axes: N networks, M classifiers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from codistill.cohort import Cohort
from codistill.networks.layers import BatchNorm2d
from codistill.recipes.schema import Recipe


class Health:
    """A mask over the networks: which of them take part in the current update.

    A step calls ``begin_update``, ``finite_mask``, ``decide_update`` and ``finish_update``, in this order; with
    accumulation, an update has several batches. A skipped update changes nothing of its network: neither weights nor
    momentum, running statistics or average. Large values are finite: only NaN and infinities count.
    """

    def __init__(self, cohort: Cohort, classifiers: Sequence[str], recipe: Recipe, device: torch.device) -> None:
        owners = [classifier.partition("/")[0] for classifier in classifiers]
        self.names = tuple(dict.fromkeys([*owners, *cohort.members]))
        self.here = tuple(cohort.members)
        """The networks whose weights this process has; of the others it receives logits at most."""
        self.freezes_skipped = recipe.on_nonfinite == "freeze"
        all_learning = recipe.graph.learning_networks
        row = {name: index for index, name in enumerate(self.names)}
        size = len(self.names)
        self._network_M = torch.tensor([row[owner] for owner in owners], device=device)
        self._elsewhere_NM = self._network_M != torch.arange(size, device=device)[:, None]
        clip_norms = {name: clip for name in all_learning if (clip := recipe.optimizer.clip_norm_for(name))}
        clips = [clip_norms.get(name, torch.inf) for name in self.names]
        self._clips_N = torch.tensor(clips, dtype=torch.float32, device=device) if clip_norms else None
        learning = [name for name in self.here if name in all_learning]
        self._statistics = Statistics({row[name]: cohort.members[name] for name in learning}, device)

        self.participates_N = torch.ones(size, dtype=torch.bool, device=device)
        """Networks with finite logits in every batch of this update; after ``decide_update``, its participants."""
        self.frozen_N = torch.zeros_like(self.participates_N)
        self.skipped_N = torch.zeros(size, dtype=torch.int64, device=device)
        self.handled_N = torch.zeros_like(self.skipped_N)
        """The skipped updates up to the last epoch's end, which ``Recovery`` has acted on."""
        self.factors_N = torch.ones(size, dtype=torch.float32, device=device)
        """The factor that clips each network's gradient in this update; 0 for a network that is left out."""
        self._skips_N = torch.zeros_like(self.factors_N)
        self._zero = self._skips_N.new_zeros(())
        self._divisors_N = torch.ones(size, dtype=torch.float32, device=device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state that a checkpoint saves, by network."""
        for name in self.here:
            index = self.names.index(name)
            yield f"{name}/skipped", self.skipped_N[index]
            yield f"{name}/handled", self.handled_N[index]
            yield f"{name}/frozen", self.frozen_N[index]

    def guard(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Give every optimizer the device flags ``found_inf`` and ``grad_scale``, as torch's GradScaler does."""
        for name, optimizer in optimizers.items():
            index = self.names.index(name)
            flags = {"found_inf": self._skips_N[index]}
            if self._clips_N is not None:
                flags["grad_scale"] = self._divisors_N[index]
            vars(optimizer).update(flags)

    def factor(self, name: str) -> Tensor:
        return self.factors_N[self.names.index(name)]

    def participates(self, name: str) -> Tensor:
        """Whether the network takes part in the update, as a flag on the device."""
        return self.participates_N[self.names.index(name)]

    def skipped(self) -> dict[str, int]:
        """Count the updates that each network of this process has been left out of. Waits for the device."""
        return self._by_name(self.skipped_N)

    def handled(self) -> dict[str, int]:
        """Count the skipped updates that ``Recovery`` has acted on. Waits for the device."""
        return self._by_name(self.handled_N)

    def _by_name(self, counts_N: Tensor) -> dict[str, int]:
        counts = dict(zip(self.names, counts_N.tolist(), strict=True))
        return {name: counts[name] for name in self.here}

    @torch.no_grad()
    def begin_update(self) -> None:
        """Keep the running statistics before the first batch: its forward pass changes them before the decision."""
        self.participates_N.fill_(True)
        self._statistics.keep()

    @torch.no_grad()
    def finite_mask(self, logits: Sequence[Tensor], all_of: Callable[[Tensor], Tensor] = lambda flags: flags) -> Tensor:
        """The mask by classifier, in the objective's order: False for a whole network if one logit is not finite.

        ``all_of`` is the logical AND over the processes that share the batch; this one may have no image of it.
        """
        logits_MBC = torch.stack(list(logits))
        finite_M = logits_MBC.abs().amax(dim=(1, 2)).isfinite() if logits_MBC.numel() else self._network_M >= 0
        finite_N = all_of((finite_M | self._elsewhere_NM).all(dim=1))
        self.participates_N &= finite_N
        return finite_N[self._network_M]

    @torch.no_grad()
    def decide_update(
        self,
        gradients: Mapping[str, Sequence[Tensor]],
        whole_norms: Callable[[Tensor, float], Tensor] = lambda norms_N, order: norms_N,
    ) -> None:
        """Decide from the gradients which networks take part in the update, and the factor that clips each.

        ``whole_norms`` turns norms of local shards into norms of whole gradients, where the weights are sharded.
        """
        sizes_N = whole_norms(self._each(largest_l1_norm, gradients), 1.0)
        self.participates_N &= sizes_N.isfinite() & ~self.frozen_N
        factors_N = self.participates_N.float()
        if self._clips_N is not None:
            lengths_N = whole_norms(self._each(l2_norm, gradients), 2.0)
            clipped_N = torch.where(lengths_N > self._clips_N, self._clips_N / lengths_N, 1.0)
            factors_N = torch.where(self.participates_N, clipped_N, 0.0)
            # A norm beyond float32 clips the gradient to zero, which is not an update either.
            self.participates_N &= factors_N > 0
            self._divisors_N.copy_(torch.where(self.participates_N, 1 / factors_N, 1.0))
        self.factors_N.copy_(factors_N)
        self._skips_N.copy_(~self.participates_N)

    def _each(self, measure: Callable[[Sequence[Tensor]], Tensor], gradients: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """A norm by network; a frozen teacher has no gradient."""
        return torch.stack([measure(gradients[name]) if gradients.get(name) else self._zero for name in self.names])

    @torch.no_grad()
    def finish_update(self) -> None:
        """Restore the running statistics of the networks that were left out, and count them."""
        self._statistics.restore_unless(self.participates_N)
        self.skipped_N += ~self.participates_N
        if self.freezes_skipped:
            self.frozen_N |= ~self.participates_N


class Statistics:
    """The running statistics of the networks that learn, kept and restored together: few kernels for many buffers."""

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

    def restore_unless(self, participates_N: Tensor) -> None:
        for before, buffers, owners in zip(self.before, self.buffers, self.owners, strict=True):
            chosen = torch.where(participates_N[owners], _flat(buffers), before)
            parts = torch.split_with_sizes(chosen, [buffer.numel() for buffer in buffers])
            torch._foreach_copy_([buffer.view(-1) for buffer in buffers], parts)


def _flat(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.view(-1) for buffer in buffers])


def _changing_buffers(member: nn.Module) -> Iterable[Tensor]:
    for module in member.modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                # networks.layers.BatchNorm2d does not count batches.
                if not (isinstance(module, BatchNorm2d) and name == "num_batches_tracked"):
                    yield buffer


def largest_l1_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The largest L1 norm of the tensors: not finite if an element is not, or if the sum overflows.

    The largest element would be the exact test, but takes a CPU ten times as long.
    """
    return torch.stack(_norms(tensors, 1.0)).amax()


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all tensors as one vector."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(_norms(tensors, 2.0)))
    return norm


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # One kernel launch per dtype, and bfloat16 in float32: rounded norms would clip half a per cent too much.
    return [
        norm
        for dtype, group in by_dtype.items()
        for norm in torch._foreach_norm(group, order, torch.promote_types(dtype, torch.float32))
    ]
