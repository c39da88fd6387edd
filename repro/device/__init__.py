"""Devices the GPU stage can run on: a protocol, and one module per device."""
