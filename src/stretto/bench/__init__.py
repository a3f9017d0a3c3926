"""Measurements of the runtime itself: what a fork gains, and what one pass costs.

Timings are compared in interleaved pairs of one process, in alternating order, after a warm-up.
"""
