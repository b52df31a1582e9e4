"""The parts of the planner; ``planner.py`` has its interface and its algorithm."""
