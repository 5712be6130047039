"""A prepared model from step to step: forward, pending backward, reruns, messages and figures."""
