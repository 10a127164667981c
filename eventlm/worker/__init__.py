"""Workers: each computes the steps of one replica, in a process of its own."""
