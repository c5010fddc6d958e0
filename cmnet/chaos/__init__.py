"""Faults: plans of what breaks when."""
