"""One readable decoder, its loss, and initial weights that no layout can change. No collectives here."""

from meshwright.model.decoder import Decoder

__all__ = ["Decoder"]
