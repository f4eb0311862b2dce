"""Packages that stand in for NVIDIA's where it cannot be installed; tests copy them into the folder of a model."""
