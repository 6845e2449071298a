"""Complete runs with one command: characters with their names, and scientific claims with real text encoders."""
