"""Routing on the GPU."""
