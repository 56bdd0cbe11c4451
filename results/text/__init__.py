"""Results as text: ratios, names of recipes, the table of the trade-off, and frames as files."""
