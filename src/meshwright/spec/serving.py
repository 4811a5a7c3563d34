"""Sizes by which a model is served, which decoders keep to and plans count by."""

from __future__ import annotations

PAGE_TOKENS, RESERVED_PAGES = 16, 2
"""Tokens of a page of keys and values, and pages of no sequence."""
MOST_PROMPT_TOKENS = 2048
"""Tokens of prompts that one forward reads at most."""
