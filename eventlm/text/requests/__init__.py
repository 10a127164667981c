"""Requests in OpenAI's shapes: `decoding` reads bodies as structs of `protocol`, `maker` makes requests of them."""
