"""Finding the settings with which an application moves most bytes per second. Runs in the coordinator: no numpy here."""
