"""The command line. Only `click` is imported before a command runs."""
