"""Other versions of PyTorch, of Hugging Face's libraries and of DeepSpeed."""
