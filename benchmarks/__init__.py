"""Naiad and Triton side by side: the same model, the same two cores, the same load. Run with `make bench`."""
