"""The endpoints of llama.cpp's server beside those of OpenAI's API."""
