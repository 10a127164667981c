"""From a configuration to an engine: the model, its cache, the plug-ins. Used by the command line and by `LLM`."""
