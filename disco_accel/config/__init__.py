"""What a user can set: ``disco_config`` and its keys, and the keys of DeepSpeed's that plans replace."""
