"""The commands by topic. Arguments in, tables and exit codes out; what a command does is done by the rooms it calls."""
