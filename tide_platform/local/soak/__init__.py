"""The loop left to itself for an hour: traffic that shifts, a poisoned window, a sabotaged draft."""
