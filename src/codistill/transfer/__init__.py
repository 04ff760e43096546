"""Who teaches whom: the graph (a value), the methods (functions to graphs) and the objective (a graph as a loss)."""
