"""`eventlm debug`: the time-travel debugger's front ends."""
