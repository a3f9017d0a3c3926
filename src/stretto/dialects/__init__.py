"""Dialects: how tokens become moves. One file each; `get_dialect` finds one by name."""
