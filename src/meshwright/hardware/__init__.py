"""Clusters and devices: what is known of them, measured or from data sheets."""
