"""A Kubernetes cluster: pods that train, pods that serve, and what its API says of them."""
