"""Putting the model through ``torch.compile``."""
