"""Naiad: an inference server that takes over from Triton Inference Server."""

__version__ = "0.1.0"
