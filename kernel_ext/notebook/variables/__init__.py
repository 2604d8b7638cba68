"""Variables of ranks: transfer, comparison and views."""
