"""Reports: runs and studies as one HTML page of charts, tables and pictures, static or live. Imports no torch."""
