"""Optional experiment trackers: off by default, never the reason that a run fails. Imports none of their libraries."""
