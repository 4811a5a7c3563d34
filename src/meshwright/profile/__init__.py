"""Measured rates of this machine: products, attention, memory, collectives."""
