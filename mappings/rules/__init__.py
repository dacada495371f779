"""Rules: a source name, a target name and a layout, and the arithmetic of their axes."""
