"""Trains one cohort in several processes, which exchange predictions instead of gradients."""
