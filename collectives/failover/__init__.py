"""Failover: successors of a coordinator that has ended."""
