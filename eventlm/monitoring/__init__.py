"""Files for Prometheus and Grafana, made from the declared families of /metrics, so that they cannot name another."""
