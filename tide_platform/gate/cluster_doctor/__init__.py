"""`tide doctor --cluster`: what a Kubernetes cluster has for a deployment, and what it lacks."""
