"""Meshwright plans, trains and checks large language models on any mesh of devices."""

__version__ = "0.1.0"
