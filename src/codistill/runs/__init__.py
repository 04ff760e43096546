"""The files of a run, read and written. No module of the package imports torch at its top."""
