"""The index of a run: what happened in it as integer columns, and the core's state near every event."""
