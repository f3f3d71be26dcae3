"""Measurements of hetero: ``python -m benchmarks [NAME ...]``, each on the machine's accelerator or a virtual one.

Each benchmark writes one JSON file under ``results/``; ``python -m benchmarks.tables`` makes the README's tables
from those files.
"""
