"""The leader's decisions before it proposes, from the state and the sessions. Pure."""
