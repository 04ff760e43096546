"""The training of a cohort, and the run folder it writes. Importing the package itself imports no torch."""
