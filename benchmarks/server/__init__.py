"""What a client's requests cost the server, its front ends and those who watch it."""
