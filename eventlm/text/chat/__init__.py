"""From a chat's messages to a prompt, through the checkpoint's chat template or one that came with the request."""
