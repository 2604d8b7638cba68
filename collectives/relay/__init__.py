"""A relay: it takes the connections of a host's ranks, and has one to the coordinator. It decides nothing."""
