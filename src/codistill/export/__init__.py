"""Plain networks out of runs, written for other programs, and tried on images. Importing this imports no torch."""
