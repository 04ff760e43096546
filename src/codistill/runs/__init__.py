"""What a run keeps on the disk. Importing the package imports no torch."""
