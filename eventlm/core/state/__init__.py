"""What the core knows: requests, replicas and their memory. The rest of the core decides on it and changes it."""
