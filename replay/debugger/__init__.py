"""The time-travel debugger: goes to any event of a recorded run, forwards and backwards, and shows the state there."""
