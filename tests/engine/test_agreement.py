"""How alike networks answer, compared with numpy and with what `codistill evaluate` prints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from codistill.data.augmentation import normalise
from codistill.data.load import load
from codistill.engine.evaluate import Agreement, agreement
from codistill.export.formats import read_weights
from codistill.recipes.sections import Length
from support.cli import call
from support.runs import train
from support.tiny import tiny_recipe


def test_every_pair_is_compared_once() -> None:
    generator = np.random.default_rng(0)
    predicted, labels = generator.integers(0, 3, (3, 40)), generator.integers(0, 3, 40)
    pairs = agreement(["a", "b", "c"], torch.from_numpy(predicted), torch.from_numpy(labels))
    assert [pair.networks for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    for pair, (one, other) in zip(pairs, [(0, 1), (0, 2), (1, 2)], strict=True):
        assert pair.same == pytest.approx(100 * np.mean(predicted[one] == predicted[other]))
        none_right = (predicted[one] != labels) & (predicted[other] != labels)
        assert pair.both_wrong == pytest.approx(100 * np.mean(none_right))
    assert agreement(["a"], torch.zeros(1, 4), torch.zeros(4)) == []


def test_evaluate_says_it_of_the_networks_of_a_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(ema=0.0, length=Length(epochs=1).model_dump())
    run = train(recipe, tmp_path / "run")
    data, predicted = load(recipe.data, seed=recipe.seed), []
    for name in recipe.networks:
        identity, weights = read_weights(run / "weights" / f"{name}.safetensors")
        assert isinstance(data.test.pixels, torch.Tensor)
        images = normalise(data.test.pixels, torch.tensor(identity.mean), torch.tensor(identity.std))
        with torch.no_grad():
            predicted.append(identity.build(weights)(images).argmax(dim=1))
    (expected,) = agreement(["a", "b"], torch.stack(predicted), data.test.labels)
    (pair,) = json.loads(call("evaluate", str(run), "--json").stdout)["agreement"]
    assert Agreement(tuple(pair["networks"]), pair["same"], pair["both_wrong"]) == expected
    assert 0 < expected.same < 100
    (line,) = [line for line in call("evaluate", str(run)).stdout.splitlines() if "a & b" in line]
    assert f"{expected.same:.2f}" in line
    assert f"{expected.both_wrong:.2f}" in line
