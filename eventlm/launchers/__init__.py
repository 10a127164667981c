"""Launchers: what starts the ranks of a replica, and where. Plug-ins of the kind `launcher`."""
