"""Evaluation: tasks, runs that measure quality and speed together, comparisons and plots."""
