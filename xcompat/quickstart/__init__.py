"""Complete runs with a single command, on rendered characters or on scientific claims."""
