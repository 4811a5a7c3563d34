"""Bytes that a step sends."""
