"""The parts of the planner; ``planner.py`` is its face and says what it decides."""
