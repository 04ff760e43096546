"""Architectures of networks that others wrote: from a library by name, or a module that somebody has."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from codistill.errors import unknown
from codistill.networks.adapters import heads, stages
from codistill.networks.adapters.backbone import ForeignBackbone
from codistill.networks.adapters.library import LIBRARIES, built
from codistill.networks.adapters.naming import SIZES, c_numbers
from codistill.networks.adapters.survey import Survey, channels, stride, survey
from codistill.networks.backbone import Architecture, Backbone, Exit
from codistill.networks.heads import HEAD_KINDS

OWN_SIZES = (32, 28, 64, 96, 128, 224, 299, 384, 512)  # tried in turn: a module does not say which images it takes
LARGE = 299  # a few of the libraries' networks take no less
ANY_CLASSES = 10  # a survey needs some number
WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")  # by name: torch.compile's has no public one


@dataclass(frozen=True)
class Findings:
    """What is known of a network before it is built: itself on the meta device, its calls, its stages."""

    network: nn.Module
    survey: Survey
    stages: stages.Stages

    @classmethod
    def of(cls, network: nn.Module, in_channels: int, sizes: Iterable[int], paths: Iterable[str] | None) -> "Findings":
        seen = survey(network, in_channels, sizes)
        match seen.whole.output:
            case (_,):
                return cls(network, seen, stages.find(network, seen, paths))
        raise ValueError("in training it does not give one row of logits per image, so nothing can be learned from it")

    @property
    def exits(self) -> tuple[Exit, ...]:
        found = []
        for (name, number), place in zip(c_numbers(len(self.stages.exits)).items(), self.stages.exits, strict=True):
            assert place.output is not None
            size = self.survey.image_size
            found.append(Exit(name, number, channels(place.output), stride(size, place.output), place.path))
        return tuple(found)


class ForeignArchitecture(Architecture):
    """Studied on the meta device; heads are cut out of new networks of the same kind."""

    paths: tuple[str, ...] | None
    """The modules whose outputs are the exits; None: where the stages end."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What errors call the network."""

    @abstractmethod
    def findings(self) -> Findings: ...

    @abstractmethod
    def fresh(self, num_classes: int, in_channels: int) -> nn.Module:
        """The network that is to learn."""

    def material(self, num_classes: int) -> nn.Module:
        """A network to cut heads out of, with weights that nobody has used."""
        return self.fresh(num_classes, self._findings.survey.in_channels)

    @property
    def exits(self) -> tuple[Exit, ...]:
        return self._findings.exits

    @property
    def default_exits(self) -> tuple[str, ...]:
        if not self.exits:
            raise ValueError(
                f"{self.label}: no stages are found to hang heads at; name modules, for a module of your own as in "
                "exits=['block1', 'block2'], in a name as in timm:resnet18@layer2,layer3, "
                "or have no heads with exits=()"
            )
        return tuple(place.name for place in self.exits) if self.paths else super().default_exits

    @property
    def image_size(self) -> int | None:
        seen = self._findings.survey
        return None if seen.any_size else seen.image_size

    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        return ForeignBackbone(self.fresh(num_classes, in_channels), self.exits, self.image_size)

    def head(self, exit_name: str, kind: str, num_classes: int) -> nn.Module:
        design = self._design(exit_name, kind)
        return design.build(self.material(num_classes), num_classes)

    def describe_head(self, exit_name: str, kind: str) -> str:
        return str(self._design(exit_name, kind))

    @cached_property
    def _findings(self) -> Findings:
        try:
            with torch.random.fork_rng(devices=[]):  # a library may draw weights, and nobody asked for random numbers
                return self.findings()
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None

    @cached_property
    def _designs(self) -> dict[tuple[str, str], heads.HeadDesign]:
        return {}

    def _design(self, exit_name: str, kind: str) -> heads.HeadDesign:
        places = {place.name: call for place, call in zip(self.exits, self._findings.stages.exits, strict=True)}
        if exit_name not in places:
            raise unknown(f"exit of {self.label}", exit_name, places)
        if kind not in HEAD_KINDS:
            raise unknown("kind of head", kind, HEAD_KINDS)
        if (exit_name, kind) not in self._designs:
            known = self._findings
            try:
                with torch.random.fork_rng(devices=[]):
                    found = heads.design(known.network, known.survey, known.stages, places[exit_name], kind)
            except ValueError as error:
                raise ValueError(f"{self.label}: no head of kind {kind} at {exit_name}: {error}") from None
            self._designs[exit_name, kind] = found
        return self._designs[exit_name, kind]


@dataclass(frozen=True)
class LibraryArchitecture(ForeignArchitecture):
    """``LibraryArchitecture("timm", "resnet18")``, which is what the name ``timm:resnet18`` stands for."""

    library: str
    model: str
    options: Mapping[str, int | float]
    paths: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return f"{self.library}:{self.model}"

    def findings(self) -> Findings:
        with torch.device("meta"):
            network = built(self.library, self.model, ANY_CLASSES, 3, self.options)
        size = int(self.options.get(SIZES[self.library]) or LIBRARIES[self.library].image_size(network))
        return Findings.of(network, 3, (size, LARGE), self.paths)

    def fresh(self, num_classes: int, in_channels: int) -> nn.Module:
        return built(self.library, self.model, num_classes, in_channels, self.options)


@dataclass(frozen=True)
class OwnArchitecture(ForeignArchitecture):
    """A module of one's own. It is copied, weights and all; its heads begin anew, and it stays as it is."""

    module: nn.Module
    paths: tuple[str, ...] | None = None
    label: str = "the module"

    def findings(self) -> Findings:
        if (wrapper := type(self.module).__name__) in WRAPPERS:
            raise ValueError(f"it is wrapped in {wrapper}; give the module inside, and wrap the cohort")
        convolutions = [layer for layer in self.module.modules() if isinstance(layer, nn.Conv2d)]
        in_channels = convolutions[0].in_channels if convolutions else 3
        return Findings.of(deepcopy(self.module).to("meta"), in_channels, OWN_SIZES, self.paths)

    def fresh(self, num_classes: int, in_channels: int) -> nn.Module:
        seen = self._findings.survey
        if seen.whole.output != (num_classes,):
            gives = (seen.whole.output or (0,))[0]
            raise ValueError(f"{self.label} tells {gives} classes apart, and here there are {num_classes}")
        if seen.in_channels != in_channels:
            raise ValueError(f"{self.label} takes images of {seen.in_channels} channels, and these have {in_channels}")
        return deepcopy(self.module).train()

    def material(self, num_classes: int) -> nn.Module:
        network = super().material(num_classes).requires_grad_(True)
        heads.reinitialise(network)
        return network
