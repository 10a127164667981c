"""Ranks on the nodes of a Ray cluster.

Ray owns placement, membership and the failures of hosts. It starts one actor for each rank, which starts the ordinary
worker process and watches it. Launches and tensors do not go through Ray.
"""
