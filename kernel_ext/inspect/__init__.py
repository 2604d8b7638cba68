"""Looking into ranks: what is in their variables, and where that differs from rank to rank."""
