"""From a model and a batch to a TaskGraph; see ``step.capture_step``."""
