"""Exports plain networks from runs for other programs, and classifies images with them. Imports no torch by itself."""
