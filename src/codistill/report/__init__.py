"""One page to look at: runs and studies as charts, tables and pictures, at rest or live. Imports no torch."""
