"""Scripts of clients of Redis: a bounded part of Lua, and its calls of commands."""
