"""A follower: streams from primaries, catch-up, and what it applies, drops and purges."""
