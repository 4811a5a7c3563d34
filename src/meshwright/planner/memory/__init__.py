"""Bytes of a rank."""
