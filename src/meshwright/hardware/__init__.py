"""Clusters and devices, with figures of datasheets or measurements."""
