"""The cluster in containers, and all that is done to it there: `make compose-test`."""
