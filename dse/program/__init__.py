"""Needs of any program: text for terminals, URLs, ties between processes, a cache folder, lazy imports."""
