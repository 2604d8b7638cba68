"""What ranks print and show, made into one readable output. No I/O, no clock."""
