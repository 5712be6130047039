"""Task graphs and memory graphs: data, rules and files."""
