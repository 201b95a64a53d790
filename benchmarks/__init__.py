"""Measurements against torch in the same run: ``python -m benchmarks NAME``, ``torchrun -m benchmarks train``."""
