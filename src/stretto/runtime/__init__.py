"""The runtime: one pool, one scheduler, one sampler, for every dialect."""
