"""Stretto: train and run self-orchestrating language models."""

__version__ = "0.1.0"
