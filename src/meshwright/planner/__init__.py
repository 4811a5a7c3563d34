"""What a layout costs before it runs: pure functions of a `RunSpec`, without torch."""
