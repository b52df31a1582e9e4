"""The parts of the planner; ``core/planner.py`` is its face and says what it decides."""
