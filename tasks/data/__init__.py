"""Data sets: what is bundled, and what is read from a user's own files."""
