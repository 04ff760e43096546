"""A method of your own in three lines: classifiers learn only from those nearer to the output, in other networks.

The paper's source mentions such a "top-down" variant of DCM; how it was defined is not printed, so this is our reading.

    python examples/own_method.py
"""

from codistill import Outline, TransferGraph


def top_down(outline: Outline) -> TransferGraph:
    classifiers = outline.classifiers
    edges = [(i, j) for i in classifiers for j in classifiers if i.network != j.network and i.stage < j.stage]
    return TransferGraph(outline, labels=dict.fromkeys(classifiers, 1.0), transfers=edges)


if __name__ == "__main__":
    cohort = Outline({name: {"final": 1, "stage2": 2, "stage1": 3} for name in ("a", "b")})  # or Cohort(…).outline
    print(top_down(cohort).matrix())
