"""CPU kernels in C++ for passes of few rows: packed linear layers, and a whole pass in one call.

`library` finds or builds them, `pack` lays weights out for them, `linear` is the torch operator
and the layer for any model. The engine that runs whole passes is `engines/fused.py`.
"""
