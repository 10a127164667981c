"""Small worlds of the core, searched whole: every order of the facts that can come next."""
