"""Results as text: how ratios are written, what recipes are called, the table of the trade-off, frames as files."""
