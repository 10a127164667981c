"""Do what-ifs predict real reruns? The runs, their mixes of requests and the comparison."""
