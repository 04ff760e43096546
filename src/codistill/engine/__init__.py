"""The engine: what trains a cohort and keeps the folder of a run. Importing the package itself imports no torch."""
