"""Other people's trackers, as options: never on by default, never a reason to fail a run. Imports none of them."""
