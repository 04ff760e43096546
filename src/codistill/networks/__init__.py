"""Networks cut into named stages, and auxiliary classifiers for them. Importing the package imports no torch."""
