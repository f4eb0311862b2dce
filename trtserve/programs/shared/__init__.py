"""Modules that several models use."""
