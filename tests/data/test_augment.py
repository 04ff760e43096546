"""Plans and augmentation against plain numpy loops."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codistill.data.augmentation import augment, centre_crop, mix_labels, normalise
from codistill.data.batches import Draws, EpochPlan, plan_epoch
from codistill.data.randaugment import OPERATIONS
from codistill.recipes.sections import Augment

PLAIN = Augment(pad=0, flip=False)
EVERYTHING = Augment(randaugment=9, cutout=4, cutmix=1.0)
PIXELS = torch.randint(0, 256, (70, 3, 12, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.arange(70) % 7
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
UNIT = (torch.zeros(3), torch.ones(3) / 255)  # leaves pixels as they are, but for float32


def plan(settings: Augment, *, batch_size: int = 32, epoch: int = 0, seed: int = 1) -> EpochPlan:
    return plan_epoch(70, epoch, seed, batch_size=batch_size, settings=settings, image_size=(12, 9))


def whole_batch(settings: Augment) -> Draws:
    return plan(settings, batch_size=70).step(0)


def batch_of(draws: Draws) -> Tensor:
    return PIXELS[draws.indices]


def test_every_image_comes_once_in_an_epoch_with_a_short_last_batch() -> None:
    planned = plan(EVERYTHING)
    batches = [planned.step(step).indices for step in range(len(planned))]
    assert [len(batch) for batch in batches] == [32, 32, 6]
    assert torch.cat(batches).sort().values.tolist() == list(range(70))
    with pytest.raises(IndexError, match="step 3 of an epoch of 3 steps"):
        planned.step(3)


def flat(planned: EpochPlan) -> dict[str, Tensor]:
    return {field: drawn for field, drawn in planned.draws._asdict().items() if drawn is not None}


def test_a_plan_depends_on_seed_and_epoch_alone() -> None:
    later = flat(plan(EVERYTHING, epoch=7))
    assert len(later) == 9
    for epoch in (0, 3):
        plan(EVERYTHING, epoch=epoch)
    torch.manual_seed(99)
    np.random.seed(99)
    again = flat(plan(EVERYTHING, epoch=7))
    assert all(torch.equal(later[field], again[field]) for field in later)
    for other in (plan(EVERYTHING, epoch=8), plan(EVERYTHING, epoch=7, seed=2)):
        assert not any(torch.equal(drawn, flat(other)[field]) for field, drawn in later.items())


def test_purposes_share_no_randomness() -> None:
    drawn = plan(EVERYTHING).draws
    assert drawn.flips is not None
    assert drawn.strengths is not None
    assert not torch.equal(drawn.flips, drawn.strengths.flatten()[:70] < 0), "both are coins: from one seed, the same"


def test_an_images_draws_do_not_depend_on_the_batches_nor_on_other_settings() -> None:
    one, other = flat(plan(EVERYTHING, batch_size=32)), flat(plan(EVERYTHING, batch_size=5))
    alone = {
        "crops": flat(plan(Augment(flip=False)))["crops"],
        "flips": flat(plan(Augment(pad=0)))["flips"],
        "indices": flat(plan(PLAIN))["indices"],
        "operations": flat(plan(Augment(randaugment=9)))["operations"],
        "holes": flat(plan(Augment(cutout=4)))["holes"],
    }
    for field, drawn in alone.items():
        assert torch.equal(one[field], other[field])
        assert torch.equal(one[field], drawn)


def test_draws_have_the_distributions_they_should() -> None:
    settings = Augment(pad=4, randaugment=15, mixup=0.4)
    drawn = plan_epoch(90_000, 0, 0, batch_size=10, settings=settings, image_size=(32, 32)).draws
    assert drawn.crops is not None
    for axis in (0, 1):
        assert_uniform(drawn.crops[:, axis], 9)
    assert drawn.flips is not None
    assert_uniform(drawn.flips.long(), 2)
    assert drawn.operations is not None
    assert drawn.strengths is not None
    assert_uniform(drawn.operations.flatten(), len(OPERATIONS))
    assert drawn.strengths.unique().tolist() == [-0.5, 0.5]
    assert_uniform((drawn.strengths > 0).long().flatten(), 2)
    assert drawn.partners is not None
    assert (drawn.partners.view(9000, 10).sort(1).values == torch.arange(10)).all()
    assert_uniform(drawn.partners.view(9000, 10)[:, 0], 10)
    assert drawn.own_share is not None
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)); 9,000 draws.
    assert abs(drawn.own_share.mean() - 0.5) < 0.02
    assert abs(drawn.own_share.var() - 1 / (4 * 1.8)) < 0.01


def assert_uniform(values: Tensor, kinds: int) -> None:
    """Six standard deviations of a binomial count around the expected one."""
    counts = values.bincount().double()
    expected = len(values) / kinds
    assert len(counts) == kinds
    assert (counts - expected).abs().max() < 6 * (expected * (1 - 1 / kinds)) ** 0.5


@pytest.mark.parametrize(("pad", "crop"), [(0, 7), (2, 7), (2, 9), (0, 9)])
def test_crops_of_another_size_equal_a_plain_loop(pad: int, crop: int) -> None:
    settings = Augment(pad=pad, crop=crop)
    draws = whole_batch(settings)
    assert draws.crops is not None
    assert draws.flips is not None
    truth = np.empty((70, 3, crop, crop), dtype=np.uint8)
    for number, image in enumerate(batch_of(draws).numpy()):
        top, left = draws.crops[number].tolist()
        window = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))[:, top : top + crop, left : left + crop]
        truth[number] = window[:, :, ::-1] if draws.flips[number] else window
    np.testing.assert_array_equal(augment(batch_of(draws), draws, settings, *UNIT).round().numpy(), truth)
    places = [12 + 2 * pad - crop, 9 + 2 * pad - crop]
    assert draws.crops.amax(0).tolist() == places, "every place must be reachable, the last ones too"


def test_at_test_the_crop_is_the_centre() -> None:
    np.testing.assert_array_equal(centre_crop(PIXELS, Augment(crop=7)), PIXELS[:, :, 2:9, 1:8])
    np.testing.assert_array_equal(centre_crop(PIXELS, PLAIN), PIXELS)


@pytest.mark.parametrize("crop", [10, 14])
def test_a_crop_that_only_padding_has_is_refused_in_training_and_at_test(crop: int) -> None:
    settings = Augment(pad=3, crop=crop)
    with pytest.raises(ValueError, match=f"crop={crop} is larger than images of 12×9; lower it"):
        whole_batch(settings)
    with pytest.raises(ValueError, match=f"crop={crop} is larger than images of 12×9; lower it"):
        centre_crop(PIXELS, settings)


def test_a_crop_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"crop\n.*greater than or equal to 1"):
        Augment(crop=0)


@pytest.mark.parametrize(
    ("pad", "padding"), [(0, "zero"), *((pad, padding) for pad in (1, 4, 8) for padding in ("zero", "reflect"))]
)
@pytest.mark.parametrize("flip", [True, False])
def test_pad_crop_flip_equals_a_plain_loop(padding: str, pad: int, flip: bool) -> None:
    settings = Augment(pad=pad, padding=padding, flip=flip)  # type: ignore[arg-type]
    draws = whole_batch(settings)
    pixels = batch_of(draws).numpy()
    truth = np.empty_like(pixels)
    for number, image in enumerate(pixels):
        margins = ((0, 0), (pad, pad), (pad, pad))
        padded = np.pad(image, margins, mode="constant" if padding == "zero" else "reflect")
        top, left = draws.crops[number].tolist() if draws.crops is not None else (0, 0)
        truth[number] = padded[:, top : top + 12, left : left + 9]
        if draws.flips is not None and draws.flips[number]:
            truth[number] = truth[number][:, :, ::-1]
    assert (pixels == truth).all() == (pad == 0 and not flip), "something must have moved"
    np.testing.assert_array_equal(augment(batch_of(draws), draws, settings, *UNIT).round().numpy(), truth)
    as_floats = augment(batch_of(draws).float() / 255, draws, settings, torch.zeros(3), torch.ones(3))
    np.testing.assert_allclose(as_floats.numpy() * 255, truth, atol=1e-4)


def test_zero_padding_may_be_wider_than_the_image_and_reflection_may_not() -> None:
    draws = whole_batch(Augment(pad=20, flip=False))
    assert draws.crops is not None
    top, left = draws.crops[0].tolist()
    padded = np.pad(batch_of(draws)[0].numpy(), ((0, 0), (20, 20), (20, 20)))[:, top : top + 12, left : left + 9]
    found = augment(batch_of(draws), draws, Augment(pad=20, flip=False), *UNIT)[0]
    np.testing.assert_array_equal(found.round().numpy(), padded)
    reflect = Augment(pad=9, padding="reflect")
    with pytest.raises(ValueError, match="pad=9 with padding=reflect needs images larger than 9 pixels, not 12×9"):
        reflect.crop_size((12, 9))


def test_padding_is_black_and_not_the_mean() -> None:
    settings = Augment(pad=4, flip=False)
    draws = whole_batch(settings)._replace(crops=torch.zeros(70, 2, dtype=torch.int64))
    corner = augment(batch_of(draws), draws, settings, MEAN, STD)[:, :, 0, 0]
    assert torch.allclose(corner, (-MEAN / STD).expand(70, 3))


def test_normalise_equals_numpy() -> None:
    truth = (PIXELS.numpy() / 255 - np.array([0.5, 0.4, 0.3])[:, None, None]) / np.array([0.2, 0.25, 0.3])[
        :, None, None
    ]
    np.testing.assert_allclose(normalise(PIXELS, MEAN, STD).numpy(), truth, atol=2e-6)
    np.testing.assert_allclose(normalise(PIXELS.float() / 255, MEAN, STD).numpy(), truth, atol=2e-6)
    assert normalise(PIXELS, MEAN, STD).dtype == torch.float32


@pytest.mark.parametrize("side", [1, 4, 5, 9])
def test_cutout_equals_a_plain_loop(side: int) -> None:
    settings = Augment(pad=0, flip=False, cutout=side)
    draws = whole_batch(settings)
    assert draws.holes is not None
    truth = normalise(batch_of(draws), MEAN, STD).numpy()
    for image, (row, column) in zip(truth, draws.holes.tolist(), strict=True):
        top, left = row - side // 2, column - side // 2
        image[:, max(top, 0) : top + side, max(left, 0) : left + side] = 0
    np.testing.assert_array_equal(augment(batch_of(draws), draws, settings, MEAN, STD).numpy(), truth)
    assert [len(axis.unique()) for axis in draws.holes.T] == [12, 9], "centres are anywhere in the image"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_equals_numpy(smoothing: float) -> None:
    draws = whole_batch(PLAIN.model_copy(update={"mixup": 0.7}))
    share, partners = float(draws.own_share), draws.partners.numpy()  # type: ignore[arg-type]
    assert 0.01 < share < 0.99
    pixels = batch_of(draws).numpy().astype(np.float64)
    found = augment(batch_of(draws), draws, PLAIN, *UNIT)
    np.testing.assert_allclose(found.numpy(), share * pixels + (1 - share) * pixels[partners], atol=1e-3)
    one_hot = np.eye(7)[LABELS[draws.indices].numpy()]
    truth = (share * one_hot + (1 - share) * one_hot[partners]) * (1 - smoothing) + smoothing / 7
    np.testing.assert_allclose(mix_labels(LABELS[draws.indices], draws, 7, smoothing).numpy(), truth, atol=1e-6)


def test_cutmix_equals_numpy() -> None:
    settings = PLAIN.model_copy(update={"cutmix": 1.0})
    planned = plan(settings, batch_size=2)
    seen = []
    for step in range(len(planned)):
        draws = planned.step(step)
        top, bottom, left, right = draws.boxes.tolist()
        truth = batch_of(draws).numpy().copy()
        truth[:, :, top:bottom, left:right] = batch_of(draws).numpy()[draws.partners.numpy()][
            :, :, top:bottom, left:right
        ]
        np.testing.assert_array_equal(augment(batch_of(draws), draws, settings, *UNIT).round().numpy(), truth)
        share = 1 - (bottom - top) * (right - left) / 108
        one_hot = np.eye(7)[LABELS[draws.indices].numpy()]
        labels = share * one_hot + (1 - share) * one_hot[draws.partners.numpy()]
        np.testing.assert_allclose(mix_labels(LABELS[draws.indices], draws, 7).numpy(), labels, atol=1e-6)
        assert 0 <= top <= bottom <= 12
        assert 0 <= left <= right <= 9
        seen.append(share)
    assert len(seen) == 35
    assert min(seen) < 0.5 < max(seen)


def test_labels_stay_hard_unless_mixed_or_smoothed() -> None:
    assert mix_labels(LABELS, whole_batch(PLAIN), 7) is LABELS
    smooth = mix_labels(LABELS, whole_batch(PLAIN), 7, 0.14)
    np.testing.assert_allclose(smooth.numpy(), np.eye(7)[LABELS.numpy()] * 0.86 + 0.02, atol=1e-6)


def test_batches_are_augmented_alike_however_the_epoch_is_cut() -> None:
    settings = Augment(randaugment=9)

    def epoch(batch_size: int) -> Tensor:
        planned = plan(settings, batch_size=batch_size)
        steps = [planned.step(step) for step in range(len(planned))]
        return torch.cat([augment(batch_of(draws), draws, settings, MEAN, STD) for draws in steps])

    assert torch.equal(epoch(70), epoch(32))


@pytest.mark.parametrize("settings", [EVERYTHING, Augment(padding="reflect", mixup=0.5)])
def test_augmentation_is_one_graph_for_a_compiler(settings: Augment) -> None:
    draws = plan(settings).step(0)
    compiled = torch.compile(augment, fullgraph=True, backend="eager")
    found = compiled(batch_of(draws), draws, settings, MEAN, STD)
    assert torch.equal(found, augment(batch_of(draws), draws, settings, MEAN, STD))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("settings", [EVERYTHING, Augment(padding="reflect", mixup=0.5)])
def test_a_gpu_draws_and_does_the_same_without_waiting(settings: Augment) -> None:
    planned = plan(settings)
    on_gpu, pixels, labels = planned.to("cuda"), PIXELS.cuda(), LABELS.cuda()
    mean, std = MEAN.cuda(), STD.cuda()
    for step in range(len(planned)):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            draws = on_gpu.step(step)
            images = augment(pixels[draws.indices], draws, settings, mean, std)
            soft = mix_labels(labels[draws.indices], draws, 7)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = planned.step(step)
        truth = augment(batch_of(expected), expected, settings, MEAN, STD)
        assert ((images.cpu() - truth).abs() > 1e-4).float().mean() < 0.01, "resampling may break a tie otherwise"
        assert torch.allclose(soft.cpu(), mix_labels(LABELS[expected.indices], expected, 7), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"padding": "edge"}, "padding\n.*'zero' or 'reflect'"),
        ({"pad": -1}, "pad\n.*greater than or equal to 0"),
        ({"mixup": -0.1}, "mixup\n.*greater than or equal to 0"),
        ({"cutmix": float("nan")}, "cutmix\n.*finite number"),
        ({"randaugment": 31}, "randaugment\n.*less than or equal to 30"),
        ({"mixup": 1.0, "cutmix": 1.0}, "both on; set one of them to 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Augment(**settings)


@pytest.mark.parametrize(("images", "batch_size"), [(0, 4), (4, 0)])
def test_an_epoch_of_nothing_is_refused(images: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        plan_epoch(images, 0, 0, batch_size=batch_size, settings=PLAIN, image_size=(8, 8))
