"""Estimates the memory, hours and dollars of a run before anything is rented, and finds fast settings for a device."""
