"""Third-party networks as architectures and backbones: from a library by name, or a module of the user's own."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from codistill.errors import SAME_BUILD, did_you_mean, install_hint, unknown
from codistill.log import log
from codistill.networks.adapters.exits import Stages, Survey, channels, find_stages, first_tensor, stride, survey, takes
from codistill.networks.adapters.head_design import HeadDesign, LaterStages, design_head, reinitialise
from codistill.networks.adapters.naming import SIZES, c_numbers
from codistill.networks.adapters.own import OWN
from codistill.networks.backbone import Architecture, Backbone, Exit, ignore, run_recomputed, wrong_size
from codistill.networks.tables import HEAD_KINDS

TORCHVISION_SIZE = 224  # nearly all of torchvision's networks are made for it
OWN_SIZES = (32, 28, 64, 96, 128, 224, 299, 384, 512)  # image sizes tried in turn: a module does not declare its own
LARGE = 299  # a few of the libraries' networks need images of at least this size
WITH_OWN_HEADS = ("googlenet", "inception_v3")  # torchvision's return a tuple in training if they have them
ANY_CLASSES = 10  # for the survey, where the number does not matter
PREFIX = "classifier."
WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")  # by name: torch.compile's has no public one


@dataclass(frozen=True)
class Findings:
    """What is known about a network before it is built: the network on the meta device, its calls, its stages."""

    network: nn.Module
    survey: Survey
    stages: Stages

    @classmethod
    def of(cls, network: nn.Module, in_channels: int, sizes: Iterable[int], paths: Iterable[str] | None) -> "Findings":
        seen = survey(network, in_channels, sizes)
        match seen.whole.output:
            case (_,):
                return cls(network, seen, find_stages(network, seen, paths))
        raise ValueError(
            "in training mode it does not return one row of logits per image, so it cannot be trained here"
        )


class Tap:
    """A forward hook that keeps its module's output while it is open.

    It is an object so that a copy of the network has its own taps. torch.compile traces hooks and what they keep into
    one graph.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.kept: Tensor | None = None

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if self.is_open:
            self.kept = first_tensor(output)

    def drain(self) -> Tensor:
        """Returns the output and forgets it: a reference would keep a whole step's memory alive."""
        kept, self.kept, self.is_open = self.kept, None, False
        assert kept is not None
        return kept


class AdaptedBackbone(Backbone):
    """A third-party network as a backbone: its own code runs, and hooks take the features at its exits.

    Its state dict has the network's own keys.
    """

    def __init__(self, network: nn.Module, exits: Iterable[Exit], image_size: int | None) -> None:
        super().__init__({}, network, exits)
        self.image_size = image_size
        """The side of the images if the network takes only one size, else None."""
        self.taps = {exit.name: Tap() for exit in self.exits}
        self.handles = [
            network.get_submodule(exit.path).register_forward_hook(self.taps[exit.name]) for exit in self.exits
        ]
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        self._check_size(images_BCHW)
        logits: Tensor = self.classifier(images_BCHW)
        return logits

    def features(self, images_BCHW: Tensor, on_exit: Callable[[str], None] = ignore) -> dict[str, Tensor]:
        self._check_size(images_BCHW)
        if self.recomputes and self.training:
            features = run_recomputed(self._tapped, images_BCHW, self.classifier)
        else:
            features = self._tapped(images_BCHW)
        for exit_name in self.taps:
            on_exit(exit_name)
        return features

    def release(self) -> nn.Module:
        for handle in self.handles:
            handle.remove()
        return self.classifier

    def _tapped(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        for tap in self.taps.values():
            tap.is_open = True
        logits = self.classifier(images_BCHW)
        return {**{name: tap.drain() for name, tap in self.taps.items()}, "final": logits}

    def _check_size(self, images_BCHW: Tensor) -> None:
        height, width = images_BCHW.shape[-2:]
        if self.image_size is not None and not height == width == self.image_size:
            raise wrong_size("the network", self.image_size, (height, width))


class AdaptedArchitecture(Architecture):
    """Surveyed on the meta device; heads are cut out of new networks of the same kind."""

    paths: tuple[str, ...] | None
    """The modules whose outputs are the exits; None for the ends of the stages."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The network's name in errors."""

    @abstractmethod
    def findings(self) -> Findings:
        """Surveys the network on the meta device."""

    @abstractmethod
    def fresh(self, num_classes: int, in_channels: int) -> nn.Module:
        """The network that will be trained."""

    def material(self, num_classes: int) -> nn.Module:
        """A network to cut heads out of, with weights of its own."""
        return self.fresh(num_classes, self._findings.survey.in_channels)

    @cached_property
    def exits(self) -> tuple[Exit, ...]:
        calls, size = self._findings.stages.exits, self._findings.survey.image_size
        found = []
        for (name, number), call in zip(c_numbers(len(calls)).items(), calls, strict=True):
            assert call.output is not None
            found.append(Exit(name, number, channels(call.output), stride(size, call.output), call.path))
        return tuple(found)

    @property
    def default_exits(self) -> tuple[str, ...]:
        if not self.exits and self.paths is None:
            log.info(
                "%s: no stages found to attach heads at, so only its own classifier learns; to have heads, name "
                "modules: exits=['block1', 'block2'] for a module of your own, timm:resnet18@layer2,layer3 in a name",
                self.label,
            )
        return tuple(exit.name for exit in self.exits) if self.paths else super().default_exits

    @property
    def made_for(self) -> int:
        """The side of the images that the network was surveyed with: the library's own, if it takes several."""
        return self._findings.survey.image_size

    @property
    def image_size(self) -> int | None:
        return None if self._findings.survey.any_size else self.made_for

    def fitting_side(self, image_size: tuple[int, int]) -> int | None:
        known = self._findings
        fits = known.survey.any_size and takes(known.network, known.survey.in_channels, *image_size)
        return None if fits or image_size == (self.made_for, self.made_for) else self.made_for

    def backbone(self, num_classes: int, in_channels: int = 3) -> Backbone:
        return AdaptedBackbone(self.fresh(num_classes, in_channels), self.exits, self.image_size)

    def head(self, exit_name: str, kind: str, num_classes: int) -> nn.Module:
        design = self._design(exit_name, kind)
        if isinstance(design, LaterStages):
            return design.build(self.material(num_classes))
        if design.why and torch.get_default_device().type != "meta":  # where costs are counted
            log.info("%s: a generic head at %s, because %s", self.label, exit_name, design.why)
        return design.build(num_classes)

    def describe_head(self, exit_name: str, kind: str) -> str:
        return str(self._design(exit_name, kind))

    @cached_property
    def _findings(self) -> Findings:
        try:
            with torch.random.fork_rng(devices=[]):  # a library may draw weights; leave the caller's RNG alone
                return self.findings()
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None

    @cached_property
    def _designs(self) -> dict[tuple[str, str], HeadDesign]:
        return {}

    def _design(self, exit_name: str, kind: str) -> HeadDesign:
        calls = {exit.name: call for exit, call in zip(self.exits, self._findings.stages.exits, strict=True)}
        if exit_name not in calls:
            raise unknown(f"exit of {self.label}", exit_name, calls)
        if kind not in HEAD_KINDS:
            raise unknown("kind of head", kind, HEAD_KINDS)
        if (exit_name, kind) not in self._designs:
            known = self._findings
            try:
                with torch.random.fork_rng(devices=[]):
                    found = design_head(known.network, known.survey, known.stages, calls[exit_name], kind)
            except ValueError as error:
                raise ValueError(f"{self.label}: no head of kind {kind} at {exit_name}: {error}") from None
            self._designs[exit_name, kind] = found
        return self._designs[exit_name, kind]


@dataclass(frozen=True)
class LibraryArchitecture(AdaptedArchitecture):
    """``LibraryArchitecture("timm", "resnet18")``, which is what the name ``timm:resnet18`` stands for."""

    library: str
    model: str
    options: Mapping[str, int | float]
    paths: tuple[str, ...] | None = None
    tag: str = ""

    @property
    def label(self) -> str:
        return f"{self.library}:{self.model}"

    @property
    def configuration(self) -> str:
        """The model by the name under which the library has its settings, which may depend on the weights."""
        return f"{self.model}.{self.tag}" if self.tag else self.model

    def findings(self) -> Findings:
        with torch.device("meta"):
            network = build_network(self.library, self.configuration, ANY_CLASSES, 3, self.options)
        made_for = network.pretrained_cfg["input_size"][-1] if self.library == "timm" else TORCHVISION_SIZE  # type: ignore[index]
        size = int(self.options.get(SIZES[self.library]) or made_for)
        return Findings.of(network, 3, (size, LARGE), self.paths)

    def fresh(self, num_classes: int, in_channels: int) -> nn.Module:
        return build_network(self.library, self.configuration, num_classes, in_channels, self.options)


@dataclass(frozen=True)
class OwnArchitecture(AdaptedArchitecture):
    """A user's module. The copy that is trained starts from its weights, heads from new ones; it is not changed."""

    module: nn.Module
    paths: tuple[str, ...] | None = None
    label: str = "the module"

    @property
    def described(self) -> str:
        """Its name in recipes without its exits: ``own:package.Class:FINGERPRINT``."""
        kind = type(self.module)
        shapes = [[name, list(tensor.shape)] for name, tensor in self.module.state_dict().items()]
        fingerprint = sha256(json.dumps(shapes).encode()).hexdigest()[:10]
        name = re.sub(r"<\w+>\.?|[^\w.]", "", f"{kind.__module__}.{kind.__qualname__}", flags=re.ASCII)
        return f"{OWN}:{name[-200:]}:{fingerprint}"

    @property
    def name(self) -> str:
        """Its name in recipes."""
        return "@".join([self.described, *([",".join(exit.path for exit in self.exits)] if self.exits else [])])

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
            raise ValueError(f"{self.label} outputs {gives} classes, but the data have {num_classes}")
        if seen.in_channels != in_channels:
            raise ValueError(
                f"{self.label} takes images of {seen.in_channels} channels, but the data have {in_channels}"
            )
        return deepcopy(self.module).to(torch.get_default_device()).train()

    def material(self, num_classes: int) -> nn.Module:
        network = super().material(num_classes).requires_grad_(True)
        reinitialise(network)
        return network


def build_network(
    library: str, model: str, num_classes: int, in_channels: int, options: Mapping[str, float]
) -> nn.Module:
    """The library's network, freshly initialised, on the default device; weights are never downloaded."""
    build = _build_timm if library == "timm" else _build_torchvision
    try:
        try:
            return build(model, num_classes, in_channels, options)
        except NotImplementedError:
            if torch.get_default_device().type != "meta":
                raise
            # torchvision's RegNets compute their widths in tensors, which have no values on the meta device.
            with torch.device("cpu"):
                return build(model, num_classes, in_channels, options).to("meta")
    except ValueError:
        raise
    # Constructors raise TypeError for an unknown setting, AssertionError for a bad value, and others.
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ValueError(f"{library} cannot build {model} with {given or 'its defaults'}: {error}") from None


def _build_timm(model: str, num_classes: int, in_channels: int, options: Mapping[str, float]) -> nn.Module:
    with imported("timm"):
        import timm
    plain, _, tag = model.partition(".")
    if not timm.is_model(plain):
        hint = did_you_mean(plain, timm.list_models()) or ";"
        raise ValueError(f"timm has no network {plain!r}{hint} timm.list_models() names them all")
    if tag and tag not in (tags := [name.partition(".")[2] for name in timm.list_pretrained(f"{plain}.*")]):
        raise unknown(f"pretrained weights of timm:{plain}", tag, tags)
    settings: dict[str, Any] = {**options, "num_classes": num_classes, "in_chans": in_channels}
    return timm.create_model(model, pretrained=False, **settings)


def _build_torchvision(model: str, num_classes: int, in_channels: int, options: Mapping[str, float]) -> nn.Module:
    with imported("torchvision"):
        from torchvision import models  # type: ignore[import-untyped]
    model, _, tag = model.partition(".")
    if model not in (known := models.list_models(module=models)):
        hint = did_you_mean(model, known) or ";"
        raise ValueError(f"torchvision has no classifier {model!r}{hint} Allowed: {', '.join(known)}")
    if in_channels != 3:
        raise ValueError(
            f"torchvision:{model} takes images of 3 channels, but the data have {in_channels}; "
            f"timm's networks take any number"
        )
    settings: dict[str, Any] = {**options, "num_classes": num_classes}
    if model in WITH_OWN_HEADS:
        # Their weights are TensorFlow's: they take images that are normalised as its own.
        settings |= {"aux_logits": False, "init_weights": True, "transform_input": bool(tag)}
    network: nn.Module = models.get_model(model, weights=None, **settings)
    return network


@contextmanager
def imported(library: str) -> Iterator[None]:
    """Tell what to install if importing the library inside fails."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{library}:… needs {error.name}, which is missing; {install_hint('zoo')}") from None
    except RuntimeError as error:
        raise ValueError(
            f"{library} is installed, but not for this torch {torch.__version__} ({error}); {SAME_BUILD}"
        ) from None


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    _rename(state, prefix + PREFIX, prefix)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    _rename(state, prefix, prefix + PREFIX)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Renames in two steps, since a new key may be another's old one."""
    renamed = {new + key.removeprefix(old): state.pop(key) for key in list(state) if key.startswith(old)}
    state.update(renamed)
