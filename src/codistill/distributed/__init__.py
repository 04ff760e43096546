"""One training in several processes: each holds some of the networks, and they exchange predictions, not gradients."""
