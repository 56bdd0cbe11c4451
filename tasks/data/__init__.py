"""What tasks learn from: bundled data, and files of the user."""
