"""Task graphs and memory graphs: what they are, what makes them meaningful, how they are written to files."""
