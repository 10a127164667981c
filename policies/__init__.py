"""Built-in plug-ins: priority policies, batchers and routers. Found by name, never imported by the engine."""
