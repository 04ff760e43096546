"""Export a network of a run: take it out, write it, prove it, and only then let the files take their places."""

from dataclasses import dataclass
from pathlib import Path

from codistill.export import bundle, formats
from codistill.export.card import model_card
from codistill.export.plain import Shipped, take_out
from codistill.export.proofs import Proof, prove
from codistill.runs.files import write_atomically, write_json


@dataclass(frozen=True)
class Exported:
    shipped: Shipped
    model: Path
    proof: Proof


def export(
    run: str | Path,
    network: str,
    format: str,  # noqa: A002
    out: str | Path,
    *,
    best: bool = False,
    force: bool = False,
) -> Exported:
    """Write ``network`` of the run to the folder ``out`` as safetensors, pt2 or onnx, with labels and a model card.

    With ``best`` it is the network of the epoch with the lowest validation error, where the run has kept it.

    The folder must be new, empty or an earlier export, which is replaced; with ``force`` it may hold other files, which
    stay. Whatever goes wrong, nothing half done is left there.
    """
    form, out = formats.get(format), Path(out)
    bundle.refuse_foreign(out, force=force)
    shipped = take_out(Path(run), network, best=best)
    with bundle.staged(out, force=force) as stage:
        form.write(stage / form.file, shipped.network, shipped.identity, shipped.input_shape)
        proof = prove(shipped, form, stage / form.file)
        write_json(stage / bundle.LABELS, shipped.identity.class_names)
        write_json(stage / bundle.PREPROCESSING, preprocessing(shipped).model_dump(mode="json"))
        write_atomically(stage / bundle.CARD, model_card(shipped, form, proof))
    return Exported(shipped, out / form.file, proof)


def preprocessing(shipped: Shipped) -> bundle.Preprocessing:
    channels, height, width = shipped.input_shape
    return bundle.Preprocessing(
        channels="L" if channels == 1 else "RGB" if channels == 3 else None,
        resize=shipped.history.image_size,
        fit=shipped.history.recipe.data.resize,
        centre_crop=(height, width),
        mean=shipped.identity.mean,
        std=shipped.identity.std,
    )
