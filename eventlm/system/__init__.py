"""What the program takes from its host. Constructors hand it down, so that tests can use another."""
