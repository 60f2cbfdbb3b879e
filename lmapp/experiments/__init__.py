"""Runs after the fact, read from their files only: `history` of a run, `compare` of several, `draw` for pictures."""
