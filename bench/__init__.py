"""Measurements: ratios, both sides on the same work in one process, medians of interleaved repetitions.

``python -m dsv4c bench NAME``; results can be appended to a JSONL file.
"""
