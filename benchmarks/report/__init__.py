"""The tables of docs/benchmarks.md and the README's."""
