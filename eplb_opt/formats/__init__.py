"""Readers of the files that engines and people record traffic in, one file per family."""
