"""DSpark speculative decoding: guess ahead cheaply, check in one pass, change nothing."""

__version__ = "0.1.0"
