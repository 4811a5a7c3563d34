"""Validation of predictions against published and measured runs."""
