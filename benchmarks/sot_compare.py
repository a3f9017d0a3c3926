"""Skeleton-of-Thought against sequential decoding of the same weights, over a file of prompts.

    python benchmarks/sot_compare.py --out results/sot

This is `stretto bench e2e --method sot --prompts benchmarks/prompts/twenty.txt`; all its options
can be added.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stretto.cli import main

PROMPTS = Path(__file__).parent / "prompts" / "twenty.txt"
DEV_PROMPTS = [
    "Give me tips for learning to cook.",
    "What are the benefits of walking every day?",
    "How do I prepare for a job interview?",
    "Why is the sky blue?",
    "Explain how a bicycle works.",
    "What should I pack for a beach holiday?",
    "How can a small shop attract more customers?",
    "What is the capital of France?",
    "Describe the life of a honey bee.",
    "How do I take care of a house plant?",
    "What are the causes of the First World War?",
    "Write a short poem about rain.",
]
"""The wordings of method `sot` were chosen on these; no figure is reported on them."""

if __name__ == "__main__":
    fixed = ["bench", "e2e", "--method", "sot", "--prompts", str(PROMPTS)]
    sys.exit(main([*fixed, *sys.argv[1:]]))
