"""What several benchmarks share: model shapes, pairs of models, comparisons, the head of a file of results."""
