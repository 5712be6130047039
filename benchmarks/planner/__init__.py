"""Both planners side by side on captured steps."""
