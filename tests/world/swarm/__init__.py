"""Many seeds at once: how they are run, shrunk, shown and counted."""
