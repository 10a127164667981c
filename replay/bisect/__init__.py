"""Where something begins: in a run, in the values of a setting, in the settings of two runs."""
