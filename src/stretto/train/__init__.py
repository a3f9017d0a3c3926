"""Training of self-orchestrating models."""
