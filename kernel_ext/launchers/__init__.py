"""How ranks are started: ipyparallel's launchers, and ours for this host, where a fork server forks them."""
