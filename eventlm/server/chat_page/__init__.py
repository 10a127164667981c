"""The chat page: `GET /` and the files under `/ui/`, which talk to the server as any other client does."""
