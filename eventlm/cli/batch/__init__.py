"""`eventlm batch ACTION`: batches of requests without a server."""
