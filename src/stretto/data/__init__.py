"""Data for training: prompts, answers, annotations. Imports no torch."""
