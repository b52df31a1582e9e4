"""A primary: carries commit groups to followers, and gives them pages of its copies."""
