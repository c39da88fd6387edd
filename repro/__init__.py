"""Reproduction kit for the dataset "Ray Data GPU Idle Profiles (B200)"."""

__version__ = "0.1.0"
