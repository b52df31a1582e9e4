"""The replicated state: commands, the table, nodes, moves, loads, elections. Pure."""
