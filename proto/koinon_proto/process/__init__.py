"""What every process of ours needs: logs, clocks, memory, signals, private files."""
