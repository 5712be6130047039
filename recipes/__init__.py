"""Recipes: complete training programs that read one YAML file."""
