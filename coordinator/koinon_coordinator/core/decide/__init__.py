"""What the leader decides before it proposes, from the state and the sessions. Pure."""
