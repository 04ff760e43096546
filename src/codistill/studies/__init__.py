"""Studies: methods × cohorts × seeds → runs → a table with n and ±. Importing this package needs no torch."""
