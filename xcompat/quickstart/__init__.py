"""Complete runs with one command, on rendered characters or on scientific claims."""
