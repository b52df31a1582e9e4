"""A whole cluster on this machine, as processes of its own."""

from koinon.local.cluster import LocalCluster

__all__ = ["LocalCluster"]
