"""The inference engine around the pure core: live requests, replicas, plug-ins, and the loop that drives them."""
