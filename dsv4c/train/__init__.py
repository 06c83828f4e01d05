"""Training: data, step, loop, optimizer, checkpoints, log."""
