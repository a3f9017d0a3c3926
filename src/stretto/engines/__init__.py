"""Engines: logits for a batch of rows given slots and views, and nothing else."""
