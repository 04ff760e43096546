"""On a GPU the recorded step is the same training as the plain one, never waits for the device, and resumes exactly."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import nn

from codistill.data.load import load
from codistill.engine import trainer
from codistill.engine.fast.capture import CapturedStep
from codistill.engine.runtime import prepare
from codistill.engine.schedule import Position, TrainingSchedule
from codistill.engine.state import Training, prepare_training
from codistill.engine.step import PlainStep
from codistill.engine.trainer import choose_step
from codistill.recipes.schema import Recipe
from codistill.recipes.sections import AdamW, Augment, Runtime
from codistill.runs.weights import tensors_of_network
from support.tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Torch warns of its own parts: the compiler's imports, and the tool that counts waits.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

NO_DROPOUT = {"a": "wrn-10-1", "b": "resnet-8"}
RAMP = {"share": 0.9, "initial_share": 0.0, "initial_scale": 1.0, "begin": 0.1, "end": 0.8}
DENSE = {"a": "densenet-10-12", "b": "densenet-10-12"}
"""Whose layers share one feature map."""


def on_gpu(**runtime: object) -> Runtime:
    return Runtime(**{"device": "cuda", "precision": "fp32", "kernels": "torch", **runtime})


def started(recipe: Recipe) -> Training:
    machine = prepare(recipe.runtime)
    return prepare_training(recipe, load(recipe.data, seed=recipe.seed), machine)


def take_steps(training: Training, steps: int) -> type:
    step = choose_step(training)
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    for now in range(steps):
        position = Position(*divmod(now, schedule.steps_per_epoch))
        context = schedule.context(position)
        training.objective.set_progress(context.progress)
        step(trainer.draw_epoch(training, position.epoch).step(position.step), context)
    return type(step)


@pytest.mark.parametrize(
    ("networks", "kernels", "transfer"),
    [(NO_DROPOUT, "torch", {}), (NO_DROPOUT, "torch", RAMP), (NO_DROPOUT, "triton", {}), (DENSE, "triton", {})],
    ids=str,
)
def test_recorded_and_plain_steps_agree_over_50_steps(
    networks: dict[str, str], kernels: str, transfer: dict[str, float]
) -> None:
    """float32, deterministic kernels: recording changes not a bit. Streams and graphs reorder no sum."""
    recipe = tiny_recipe(networks=networks, length={"epochs": 20}, transfer=transfer)
    plain = started(recipe.replace(runtime=on_gpu(kernels=kernels, capture=False, deterministic=True).model_dump()))
    recorded = started(recipe.replace(runtime=on_gpu(kernels=kernels, deterministic=True).model_dump()))
    assert take_steps(plain, 50) is PlainStep
    assert take_steps(recorded, 50) is CapturedStep
    worst = max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3))
        for ours, theirs in zip(recorded.tensors().values(), plain.tensors().values(), strict=True)
        if ours.is_floating_point()
    )
    print(f"largest relative difference of a tensor after 50 steps: {worst:.2e}")
    assert worst <= 1e-6


def test_an_epoch_does_not_wait_for_the_device() -> None:
    training = started(tiny_recipe(runtime=on_gpu(precision="bf16").model_dump(), transfer=RAMP))
    step = choose_step(training)
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    plan = trainer.draw_epoch(training, 0)
    for index in range(schedule.steps_per_epoch):  # record both batch sizes
        step(plan.step(index), schedule.context(Position(0, index)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(schedule.steps_per_epoch):
            context = schedule.context(Position(0, index))
            trainer.set_learning_rate(training.optimizers.values(), training.recipe, context)
            training.objective.set_progress(context.progress)
            step(plan.step(index), context)
        with pytest.raises(RuntimeError, match="synchronizing"):
            training.tally.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_stopped_and_continued_is_bit_identical(kernels: str, tmp_path: Path) -> None:
    """Dropout, augmentation and the short batch included; deterministic kernels."""
    recipe = tiny_recipe(runtime=on_gpu(precision="bf16", kernels=kernels, deterministic=True).model_dump())

    def run(out: Path, stop_at: int) -> None:
        asked = iter(range(1, 100))
        for _ in trainer.train(recipe, out, stop=lambda: next(asked) == stop_at):
            pass

    run(tmp_path / "whole", stop_at=99)
    run(tmp_path / "halves", stop_at=5)
    run(tmp_path / "halves", stop_at=99)

    def checksums(out: Path) -> list[str]:
        files = [*sorted((out / "weights").iterdir()), out / "journal.jsonl"]
        return [sha256(file.read_bytes()).hexdigest() for file in files]

    assert checksums(tmp_path / "halves") == checksums(tmp_path / "whole")
    assert len(checksums(tmp_path / "whole")) == 3


def test_adamw_with_soft_labels_is_recorded() -> None:
    optimizer = AdamW(lr=0.001, weight_decay=0.05).model_dump()
    changes = {"networks": NO_DROPOUT, "augment": Augment(pad=2, mixup=0.4).model_dump(), "label_smoothing": 0.1}
    recipe = tiny_recipe(optimizer=optimizer, length={"epochs": 4}, **changes)
    plain = started(recipe.replace(runtime=on_gpu(capture=False, deterministic=True).model_dump()))
    recorded = started(recipe.replace(runtime=on_gpu(deterministic=True).model_dump()))
    assert take_steps(plain, 10) is PlainStep
    assert take_steps(recorded, 10) is CapturedStep
    for ours, theirs in zip(recorded.cohort.parameters(), plain.cohort.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("where", ["weight", "mean"])
def test_a_sick_network_is_left_out_of_a_recorded_step(precision: str, optimizer: str, where: str) -> None:
    """As on the plain path (tests/faults): nothing of it changes, its peer learns on; NaN pixels stop both."""
    changes = {"optimizer": AdamW(lr=0.001, weight_decay=0.05).model_dump()} if optimizer == "adamw" else {}
    runtime = on_gpu(precision=precision, deterministic=True).model_dump()
    training = started(tiny_recipe(networks=NO_DROPOUT, runtime=runtime, **changes))
    assert take_steps(training, 2) is CapturedStep
    step, plan = choose_step(training), trainer.draw_epoch(training, 0)
    step(plan.step(0), TrainingSchedule.of(training.recipe, 70).context(Position()))  # recorded while all are well
    sick = training.cohort.members["a"].backbone.get_parameter("stages.stem.weight") if where == "weight" else None
    target = training.data.mean if sick is None else sick
    with torch.no_grad():
        target[(0,) * target.ndim] = float("nan")
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    step(plan.step(1), TrainingSchedule.of(training.recipe, 70).context(Position(0, 1)))
    assert training.health.skipped() == {"a": 1, "b": int(sick is None)}
    for network in ("a", "b"):
        changed = [
            name
            for name, tensor in tensors_of_network(network, training.tensors()).items()
            if not same(tensor, before[name])
        ]
        assert bool(changed) == (network == "b" and sick is not None), changed[:3]
    assert training.tally.sums.isfinite().all()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaN equals NaN."""
    return torch.equal(left.nan_to_num(nan=1e30), right.nan_to_num(nan=1e30))


def test_dropout_differs_from_step_to_step() -> None:
    training = started(
        tiny_recipe(networks={"a": "wrn-10-1-dropout-0.3", "b": "resnet-8"}, runtime=on_gpu().model_dump())
    )
    step, plan = choose_step(training), trainer.draw_epoch(training, 0)
    schedule = TrainingSchedule.of(training.recipe, len(training.data.splits["train"]))
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    sums = []
    for index in (0, 0, 3):
        training.restore(before)
        step(plan.step(0), schedule.context(Position(0, index)))
        sums.append(training.tally.sums.clone())
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("nesterov", [True, False])
def test_fused_sgd_is_torchs(nesterov: bool) -> None:
    """From the same bfloat16 gradients: weights and momentum as torch's own SGD in float32, copies as its cast."""
    from codistill.ops.sgd import FusedSgd

    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 3, 3), (20_000,), (64, 64, 3, 3)]
    starts = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    copies = [nn.Parameter(start.bfloat16()) for start in starts]
    optimizers = [sgd_with_two_groups(weights, nesterov) for weights in (ours, theirs)]
    factor = torch.tensor(1.0, device="cuda")
    fused = FusedSgd(ours, copies, {"a": optimizers[0]}, {"a": factor})
    for step in range(5):
        factor.fill_(0.5 if step == 2 else 1.0)
        for copy, weight in zip(copies, theirs, strict=True):
            copy.grad = torch.randn(copy.shape, generator=generator).to(copy)
            weight.grad = copy.grad.float() * factor
        fused.update()
        optimizers[1].step()
    for weight, copy, other in zip(ours, copies, theirs, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)
        momentum, expected = (o.state[w]["momentum_buffer"] for o, w in zip(optimizers, (weight, other), strict=True))
        torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(copy, weight.bfloat16())


def test_fused_sgd_touches_nothing_of_a_network_that_is_left_out() -> None:
    """Whose gradients are NaN, whose factor is 0; the other one is updated as ever."""
    from codistill.ops.sgd import FusedSgd

    starts = [torch.randn(20_000, generator=torch.Generator().manual_seed(seed)).cuda() for seed in (0, 1)]
    weights = [nn.Parameter(start.clone()) for start in starts]
    copies = [nn.Parameter(start.bfloat16()) for start in starts]
    optimizers = {name: sgd_with_two_groups([weight], True) for name, weight in zip("ab", weights, strict=True)}
    factors = torch.tensor([0.0, 1.0], device="cuda")
    fused = FusedSgd(weights, copies, optimizers, dict(zip("ab", factors, strict=True)))
    for copy, value in zip(copies, (float("nan"), 1.0), strict=True):
        copy.grad = torch.full_like(copy, value)
    fused.update()
    assert torch.equal(weights[0], starts[0])
    assert torch.equal(copies[0], starts[0].bfloat16())
    assert not optimizers["a"].state[weights[0]]["momentum_buffer"].any()
    assert not torch.equal(weights[1], starts[1])
    assert torch.equal(copies[1], weights[1].bfloat16())


@pytest.mark.parametrize("part", ["gradient", "momentum"])
def test_fused_sgd_refuses_what_lies_otherwise_in_memory(part: str) -> None:
    """It reads memory without strides: a gradient with channels first would be another weight's."""
    from codistill.ops.sgd import FusedSgd

    weight = nn.Parameter(torch.randn(8, 4, 3, 3, device="cuda").to(memory_format=torch.channels_last))
    copy = nn.Parameter(weight.detach().bfloat16())
    optimizer = sgd_with_two_groups([weight], True)
    if part == "momentum":
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(8, 4, 3, 3, device="cuda")

    def update() -> None:
        fused = FusedSgd([weight], [copy], {"a": optimizer}, {"a": torch.tensor(1.0, device="cuda")})
        copy.grad = torch.zeros(8, 4, 3, 3, device="cuda", dtype=torch.bfloat16)
        fused.update()

    with pytest.raises(ValueError, match=r"\[8, 4, 3, 3\] has strides"):
        update()


def sgd_with_two_groups(weights: list[nn.Parameter], nesterov: bool) -> torch.optim.SGD:
    groups = [
        {"params": weights[:1], "lr": torch.tensor(0.1, device="cuda"), "weight_decay": 0.01},
        {"params": weights[1:], "lr": torch.tensor(0.3, device="cuda"), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=nesterov, fused=True)
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def test_bfloat16_is_autocasts_and_sees_restored_weights() -> None:
    """Padded channels sum in another order, so only roughly; weights that are put back are computed with, exactly."""
    recipe = tiny_recipe(networks=NO_DROPOUT)
    plain = started(recipe.replace(runtime=on_gpu(precision="bf16", capture=False, deterministic=True).model_dump()))
    recorded = started(recipe.replace(runtime=on_gpu(precision="bf16", deterministic=True).model_dump()))
    before = {name: tensor.clone() for name, tensor in recorded.tensors().items()}
    schedule = TrainingSchedule.of(recipe, len(plain.data.splits["train"]))
    draws, turn = trainer.draw_epoch(plain, 0).step(0), schedule.context(Position())
    choose_step(plain)(draws, turn)
    step = choose_step(recorded)
    step(draws, turn)
    after = {name: tensor.clone() for name, tensor in recorded.tensors().items()}
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(after[name], tensor, rtol=2e-2, atol=5e-3, msg=name)
    recorded.restore(before)
    step(draws, turn)
    for name, tensor in recorded.tensors().items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("capture", [True, False])
def test_the_gpus_random_numbers_are_put_back(tmp_path: Path, capture: bool) -> None:
    """Every step seeds the device; the random state of the program around it does not change."""
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    for _ in trainer.train(tiny_recipe(runtime=on_gpu(capture=capture).model_dump()), tmp_path / "run"):
        assert not torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(torch.cuda.get_rng_state(), before)
