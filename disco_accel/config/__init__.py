"""The settings of a user: ``disco_config`` and its keys, and the keys of DeepSpeed's that plans replace."""
