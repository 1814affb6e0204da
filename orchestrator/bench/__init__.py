"""Measurements: always ratios within one run, interleaved, medians."""
