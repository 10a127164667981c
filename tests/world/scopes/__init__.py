"""Small worlds of the core, searched completely: every order of the facts that can come next."""
