"""What runs inside a rank: its agent, the cells it runs, what they write."""
