"""``codistill export``: a network of a run as a file for other programs, and what was proved of it."""

from pathlib import Path

from codistill.cli.output import console, two_columns


def export(run: Path, network: str, file_format: str, out: Path, *, best: bool, force: bool) -> None:
    from codistill.export import bundle
    from codistill.export.export import export

    exported = export(run, network, file_format, out, best=best, force=force)
    shipped, proof = exported.shipped, exported.proof
    epochs, done = shipped.history.recipe.length.epochs, shipped.done
    steps = f" and {done.step} steps" if done.step else ""
    taken = f"{done.epoch} of {epochs} epochs{steps} done"
    if best:
        taken = f"epoch {done.epoch} of {epochs}, the best by validation error"
    state = "finished" if shipped.history.finished else "interrupted"
    images = f"{proof.images} test images" if proof.real_images else f"{proof.images} images of noise (no data at hand)"
    heads = " with its trained heads" if proof.heads_kept else " with new heads (no checkpoint is left)"
    close = f"to within {proof.largest_difference:.1e} of the largest" if proof.largest_difference else "bit for bit"
    plain, its = proof.latency_ms["plain"], proof.latency_ms["exported"]
    rows = {
        "run": f"{run}, {state}: {taken}",
        "network": f"{network}, {shipped.identity.network}" + (", moving average" if shipped.history.averaged else ""),
        "logits": f"bit for bit those in the cohort{heads if shipped.heads else ''}, on {images}",
        "graph": f"the plain backbone's, node for node ({proof.nodes} nodes)",
        "file": f"gives the network's logits, {close}",
        "latency": f"plain {plain:.2f} ms, exported {its:.2f} ms, ratio {its / plain:.2f} (one image, this CPU)",
        "written": f"{exported.model}, {bundle.LABELS}, {bundle.PREPROCESSING}, {bundle.CARD}",
    }
    console().print(two_columns(rows))
